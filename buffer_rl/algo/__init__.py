"""Advantages, losses, KL estimators, aggregation, batching: pure functions."""
