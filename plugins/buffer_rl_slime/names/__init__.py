"""Trees of modules that are imported under names of other packages (``buffer_rl.plugin.import_names``)."""
