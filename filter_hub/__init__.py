"""Filters, one file each. Refer to one as ``filter_hub.reward_deviation:nonzero`` or by its registered name."""
