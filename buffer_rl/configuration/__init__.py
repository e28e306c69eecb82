"""Options from flags, environment and YAML: the parts behind ``buffer_rl.config``."""
