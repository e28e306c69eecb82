"""The command line: one file a verb, named as the verb.

table           the verbs, in the order of ``--help``
init            ``init``: a project to begin with, whose files are in project/
train           ``train``: checks, then trains
dry_run         what ``--dry-run`` shows
eval            ``eval``: a model or a checkpoint
generate        ``generate``: responses to prompts
plugins         ``plugins``: list, check, new; what it writes is in plugin/
plugin_trial    ``plugins check --on``: one function called on rows of a file
data            ``data``: validate, show and count data files
plan            ``plan``: the speed of a run with other splits of devices and schedules; a package
report          ``report``: the HTML page of a run
ledger          ``ledger``: where each group of a run is
why             ``why``: what became of a group, or where a step's time went; a package
rescore         ``rescore``: another reward on the samples of a run; a package
checkpoint      ``checkpoint``: check that checkpoints are whole
drill           ``drill``: a configuration and faults, for a certificate; a package
export          ``export``: the model of a checkpoint
completion      ``completion``: a script for the shell
engine_checks   what the engines of a run can do of what it asks for
preflight       the model folders of a run, and those that it writes to
resources       what a run needs in numbers: rows for ranks, cores, space
row_sources     the rows that a run reads, with file and line
trial           a trial of a few rows before a run: rendered, encoded, made training rows
reward_trial    a trial of the reward on answers to a few rows
run_records     what a run's folder has recorded of its groups and steps
"""
