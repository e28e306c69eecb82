"""Rollout engines: the HTTP clients, and the fleet behind the router.

client          generation through the router, and the answer of an engine
control         calls to all engines at once, and the control calls for synchronous code
external        engines that run elsewhere
fleet           starts and stops the engines and the router of a run
heartbeat       finds engines that hang
host            engines behind actors, on the nodes and devices that Ray gives them
http_server     limits of HTTP servers for their clients: sizes, deadlines, idle connections
registry        the engines of a fleet now, and the control calls of a publication
replica         the states of one engine
router          the router and its list of workers
router_process  ``python -m buffer_rl.engines.router_process``, the router's process
loop_thread     an event loop in a thread of its own, for synchronous code
row_ids         requests of several rows: ids and seeds
server_info     what an engine says of itself
supervisor      takes dead engines off the router's list and replaces them
text            text of token ids, and stop strings
options         options
"""
