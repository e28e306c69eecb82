"""An example of a plugin package for buffer_rl."""
