"""Rollout engines: the HTTP clients, and the fleet behind the router.

protocol        what SGLang's protocol says of rows of a request, kinds of memory and ``/server_info``
http            a session, calls to all engines at once, and an event loop for synchronous callers
client          generation through the router, and the answer of an engine
control         the control calls for synchronous code: to engines at fixed URLs, and to those of a fleet
external        engines that run elsewhere
fleet           starts and stops the engines and the router of a run
host            engines behind actors, on the nodes and devices that Ray gives them
http_server     limits of HTTP servers for their clients: sizes, deadlines, idle connections
openai          OpenAI's chat and text completions to the body of ``/generate``, and back
registry        the states of one engine, and the engines of a fleet now
router          the router and its list of workers
router_process  ``python -m buffer_rl.engines.router_process``, the router's process
supervisor      finds engines that hang, takes dead ones off the router's list and replaces them
text            text of token ids, and stop strings
"""
