"""Environments of verifiers: the rows of a taskset as data, and its episodes as agents in a Python of their own."""
