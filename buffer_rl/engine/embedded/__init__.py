"""The embedded engine: a Hugging Face model behind SGLang's HTTP protocol, on CPU or one GPU.

- ``launcher.py``: starts the engine as a child process; the plugin entry ``embedded``
- ``server.py``: ``python -m buffer_rl.engine.embedded.server``, the process itself
- ``routes.py``: SGLang's HTTP routes, and the check of the API key
- ``protocol.py``: the body of ``/generate`` to engine requests, and back to the answer
- ``service.py``: requests in flight, commands and health, in the event loop
- ``engine_thread.py``: the one thread that owns the scheduler and the model
- ``scheduler.py``: a request, and continuous batching of the running ones
- ``sampling.py``: sampling parameters, and the draw of a token
- ``cache.py``: memory of keys and values, and of prompts that several requests share
- ``model.py``: the fast decoder, for the architectures that it knows
- ``fallback.py``: the decoder for every other model
- ``decode_check.py``: compares a decoder with the model's own forward pass, on a small copy
- ``loader.py``: models from Hugging Face folders, new weights for them, checksums of the weights served
"""
