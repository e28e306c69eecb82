"""The way over from slime (plugins/buffer_rl_slime/README.md): its import names on top of this library, for functions
that were written for it, and its launch scripts as options.

scripts   ``buffer-rl import slime``, and what slime's flags mean on a command line of this library
names     the table of modules that are imported as ``slime`` or ``miles`` if no package of that name is installed
http      ``post`` and ``get``, with the run's authorization for the run's own engines
rollout   ``GenerateState``, ``generate``, ``generate_and_rm``, ``generate_rollout``, ``generate_sft_rollout``
rewards   ``async_rm``, the graders and dynamic sampling filters by slime's names
tools     ``run`` for coroutines, ``load_function`` and other small helpers
data_source  the base class of data sources

A function that runs in a rollout finds its tokenizer, engine and rewards in ``buffer_rl.rollout.context``.
"""
