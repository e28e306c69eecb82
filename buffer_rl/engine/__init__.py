"""Rollout engines: the HTTP clients, the fleet behind the router, the embedded engine.

- ``client.py``: generation through the router, and the answer of an engine
- ``control.py``: calls to all engines at once, and the control calls for synchronous code
- ``fleet.py``: starts, checks, replaces and stops the engines and the router of a run
- ``registry.py``: the engines of a fleet now, their heartbeat, the control calls of a publication
- ``router.py``: the router and its list of workers
- ``router_process.py``: ``python -m buffer_rl.engine.router_process``, the router's process
- ``process.py``: server processes and their API key
- ``text.py``: text of token ids, and stop strings
- ``embedded/``: an engine of our own, for Hugging Face models
- ``options.py``: options
"""
