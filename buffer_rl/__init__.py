"""buffer_rl: plugin-driven, buffer-centric reinforcement-learning post-training of language models.

types           records that travel: samples, groups, batches, tickets
sample          one prompt with one response
ids             identities of groups, rows and versions
user_args       what user functions receive as ``args``
lazy_list       lists that are made when they are first read
contracts       what a plugin of each kind receives and returns
contract_check  checks of what plugins return
kinds           the kinds of plugins, with their flags
hookspecs       hooks of pluggy plugins
plugins         the registry: from a reference to an object
scope           marks that authors put on their functions
roles           the roles of a run, one row each
token_loss      what a loss returns, and the sums of a step
config          option classes, composed and frozen; options as JSON
options         the list of all option classes
errors          the errors
checkpoint      checkpoints: whole or absent
file_kind       what a file is that is not what its place asks for
remote          paths that fsspec reaches, and checkpoints there
parent          a process that ends with the one that started it
signals         signals that end a run or a command
terminal        what a terminal may show of text of models and data
redaction       what may be written down of options and addresses
utf8            text that UTF-8 cannot encode
model_config    what a model's configuration says of its longest sequence
environment     variables of the environment, and which addresses no proxy is for
cli             the command ``buffer-rl``
"""

__version__ = "0.1.0"
