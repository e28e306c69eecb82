"""The process of a user's data source, and its callers."""
