"""Options from flags, environment and YAML, and from the launch scripts of slime.

help       options as argparse flags, and their help texts
values     from text to an option's value and type
yaml_file  the file of options, every key with its line
sources    the merge of file, environment and flags, with the origin of each value

unknown_flags    flags that are no options: accepted with a word, or refused all at once
slime_flags      the flags of slime and Megatron that are no options here, with what each means
slime_verdicts   the verdict of each flag of a command of slime
slime_import     a command of slime as options
slime_file       these options as a file
shell_words      a bash script as words and operators
shell_syntax     its commands as a tree
shell_values     texts of which the shell alone would know parts
shell_expansion  variables, arrays and words expanded
shell_script     the training command that a script would start, without running it
"""
