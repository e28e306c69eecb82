"""Fakes that ship with the library, for tests of plugins and of the library itself.

fake_buffer      a Buffer in memory, for tests of rollout functions
fake_engine      an HTTP server that answers ``/generate`` as a function says, with faults on order
fake_roles       rollouts, a trainer and a publisher without processes
local_buffer     the real Buffer without its process
tiny             tiny models with random weights, and a character tokenizer
virtual_runtime  a runtime whose calls take virtual time
"""
