"""Weight publication: from the trainer to the engines, version by version.

publish        pauses the engines, has a transport bring them a version, compares what they sample with the trainer
role_weights   the actor's weights for the roles that compute with them
sender         the side of a transport in the trainer's ranks, and the check of names and shapes of what is sent
disk           transport ``disk``, a folder of safetensors per version
tensor         transport ``tensor``, the trainer's memory on the same machine
distributed    transport ``distributed``, broadcasts to all engines at once
delta          what changed between two versions, and digests of versions
adapters       adapters alone, beside each other at the engines, and the check that these apply them
follow         each version for engines that others run, in a folder that they poll
shared_bucket  layout of a bucket of tensors, handles of it, and SGLang's pickled form
shared_memory  memory of two processes: anonymous memory files, sealed once written, and CUDA memory
process_group  gloo groups of a sender and the engines and roles that receive its broadcasts
options        options
"""
