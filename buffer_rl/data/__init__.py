"""Data files: reading, validation, epoch order."""
