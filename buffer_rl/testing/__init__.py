"""Fakes that ship with the library, for tests of plugins and of the library itself.

decoding          slots, clock and version spans of ``fake_engine``, and what a real server does with requests
fake_buffer       a Buffer in memory, for tests of rollout functions
fake_engine       an HTTP server that answers ``/generate`` as a function says, with faults on order
faulty_server     the HTTP server of ``fake_engine``, which fails on order
lint              rows from a seed and findings, of the linters
lint_estimator    does an advantage estimator hold what it declares?
lint_loss         does a loss hold what it declares? a step of a loss without a model (imports torch)
tiny              tiny models with random weights, and a character tokenizer
virtual_machine   processes that share cores, and engines whose requests share a batch, in virtual time
virtual_rollouts  rollouts, engines and selections of known lengths, over a real ``BufferState``
virtual_time      a runtime of the driver whose clock moves to the next timer
"""
