"""What one sees: progress, metrics, sample dumps, reports."""
