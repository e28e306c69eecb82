"""The way over from slime (docs/coming_from_slime.md): its import names on top of this library, for functions that were
written for it, and its launch scripts as options.

scripts   ``buffer-rl import slime``, and what slime's flags mean on a command line of this library
names     the tree of modules that is imported as ``slime`` or ``miles`` where no package of that name is installed
http      ``post`` and ``get``, with the run's authorization for the run's own engines
running   ``run``: a coroutine from a synchronous function
rollout   ``GenerateState``, ``generate``, ``generate_and_rm``, ``generate_rollout``
rewards   ``async_rm`` and the graders by slime's names
filters   records and functions of dynamic sampling filters
masks     loss masks of conversations
tools     ``load_function`` and other small helpers
hooks     hooks of samples
sft       supervised fine-tuning
data_source  the base class of data sources
traces    spans that record nothing
absent    names that can be imported and not used
missing   what cannot be had, and the page that says what is in its place

A function that runs in a rollout finds its tokenizer, engine and rewards in ``buffer_rl.rollout.context``.
"""
