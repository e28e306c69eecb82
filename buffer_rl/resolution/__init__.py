"""From a plugin reference to a checked object: the parts behind ``buffer_rl.plugins``."""
