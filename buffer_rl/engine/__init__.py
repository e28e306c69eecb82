"""Rollout engines: the HTTP client, the fleet behind the router, the embedded engine."""
