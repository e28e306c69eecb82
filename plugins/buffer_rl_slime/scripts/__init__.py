"""The launch scripts of slime as options, without running them.

flags            the flags of slime and Megatron that are no options here, with what each means
verdicts         the verdict of each flag of a command of slime
translation      a command of slime as options, and these as a file
shell_words      a bash script as words and operators
shell_syntax     its commands as a tree
shell_values     texts of which the shell alone would know parts
shell_expansion  variables, arrays and words expanded
shell_script     the training command that a script would start
verb             ``buffer-rl import slime SCRIPT``
"""
