"""Servers end at once."""

from __future__ import annotations

from harness.quick_http import quick_clients_and_servers as quick_clients_and_servers
