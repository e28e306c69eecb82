"""Rollout engines: the HTTP clients, the fleet behind the router, the embedded engine.

client          generation through the router, and the answer of an engine
control         calls to all engines at once, and the control calls for synchronous code
fleet           starts, checks, replaces and stops the engines and the router of a run
host            engines behind actors, on the nodes and devices that Ray gives them
registry        the engines of a fleet now, their heartbeat, the control calls of a publication
router          the router and its list of workers
router_process  ``python -m buffer_rl.engine.router_process``, the router's process
process         server processes and their API key
rows            requests of several rows: ids and seeds
text            text of token ids, and stop strings
embedded/       an engine of our own, for Hugging Face models
options         options
"""
