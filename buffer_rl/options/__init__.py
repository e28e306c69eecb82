"""Options from flags, environment and YAML.

section        a section of options, and the composition of several
checks         a run's checks, section by section, and their short forms
help           options as argparse flags, and their help texts
values         from text, or a YAML file, to options' values and types
sources        the merge of file, environment and flags, with the origin of each value; flags that are no options
user_args      the options as code of the user receives them
redaction      what may be written down of options and addresses: everything but their secrets
file_kind      files that are not what their place asks for, for error messages
"""
