"""Reward functions, one file each. Refer to one as ``rm_hub.exact_match:score`` or by its registered name."""
