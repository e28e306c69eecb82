"""Weight publication: from the trainer to the engines, version by version."""
