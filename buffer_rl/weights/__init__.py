"""Weight publication: from the trainer to the engines, version by version.

publish        pauses the engines, has a transport bring them a version, checks it; the folder of role ``actor_fwd``
confirm        compares what engines sample after a publication with the trainer
sender         the side of a transport in the trainer's ranks
names          checks the names and shapes of what is published
disk           transport ``disk``, a folder of safetensors per version
tensor         transport ``tensor``, the trainer's memory on the same machine
distributed    transport ``distributed``, broadcasts to all engines at once
shared_bucket  layout of a bucket of tensors, handles of it, and SGLang's pickled form
shared_memory  anonymous memory files, written once and then sealed
process_group  gloo groups of a sender and the engines and roles that receive its broadcasts
cuda_ipc       CUDA memory in two processes
options        options
"""
