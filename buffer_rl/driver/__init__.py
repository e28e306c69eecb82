"""The one loop, and the schedule that shapes it."""
