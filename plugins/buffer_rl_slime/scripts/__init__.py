"""The launch scripts of slime and Relax as options, without running them.

flags            the flags of slime and Megatron that are no options here, with what each means
peers            flags of Relax and miles, and names of other toolkits, for generation beside training
meaning          what a flag is here, as data
verdicts         the verdict of each flag of a command of slime
asynchronous     what commands that generate while they train mean as --schedule
translation      a command of slime as options, and these as a file
shell_words      a bash script as words and operators
shell_syntax     its commands as a tree
shell_values     texts of which the shell alone would know parts
shell_expansion  variables, arrays and words expanded
shell_script     the training command that a script would start, its flags and their values
verb             ``buffer-rl import slime SCRIPT``, ``buffer-rl import relax SCRIPT``
"""
