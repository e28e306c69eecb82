"""The command line: one file a verb, named as the verb. ``table`` lists them.

preflight: what a run needs of this machine and of its folders, checked for train, eval and generate
plugin_templates, plugin_template_tests: what ``plugins new`` writes
"""
