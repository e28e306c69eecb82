"""Weight publication: from the trainer to the engines, version by version.

- ``publish.py``: pauses the engines, has a transport bring them a version, checks it; the folder of role ``actor_fwd``
- ``disk.py``: transport ``disk``, a folder of safetensors per version
- ``tensor.py``: transport ``tensor``, the trainer's memory on the same machine
- ``shared_bucket.py``: layout of a bucket of tensors, handles of it, and SGLang's pickled form
- ``shared_memory.py``: anonymous memory files, written once and then sealed
- ``cuda_ipc.py``: CUDA memory in two processes
- ``options.py``: options
"""
