"""Rewards for code: programs that a model wrote are run in a sandbox, and judged outside of it."""
