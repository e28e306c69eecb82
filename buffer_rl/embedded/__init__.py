"""The embedded engine: a Hugging Face model behind SGLang's HTTP protocol, on CPU or one GPU.

launcher       starts the engine as a child process; the plugin entry ``embedded``
server         ``python -m buffer_rl.embedded.server``, the process itself
routes         SGLang's HTTP routes, and the check of the API key
generation_routes  ``/generate`` and OpenAI's routes, their streams, and clients that go away
protocol       the body of ``/generate`` to engine requests, and finished ones to its answer
streams        text and tokens of requests that are answered while they run
metrics        what ``/metrics`` says
service        requests in flight, commands and health, in the event loop
engine_thread  the one thread that owns the scheduler and the model
scheduler      a request, and continuous batching of the running ones
sampling       sampling parameters, the draw of a token, log-probabilities of others
cache          memory of keys and values, and of prompts that several requests share
fast_decoder   the decoder for the architectures that it knows
fallback       the decoder for every other model
routers        the modules of a mixture of experts that choose experts, and what they choose
decode_check   compares a decoder with the model's own forward pass, on a small copy
weight_groups  groups in which a sender broadcasts weights to engines
adapter        LoRA adapters of peft's format, as low-rank additions to the products of a decoder
kept_weights   the newest version as it was published, which deltas change
staged_update  the weight update under way: what has arrived, and what is ready to be served
loader         models from Hugging Face folders, new weights for them, checksums of the weights served
"""
