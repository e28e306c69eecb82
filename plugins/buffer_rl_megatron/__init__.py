"""Training on megatron-core: ``--train-backend megatron``.

options      parallelism and precision under Megatron's own names, and their check before a run starts
model_shape  arguments of slime's scripts that describe the model, compared with its configuration
compat       megatron-core on the CPU: each assumption about CUDA, replaced where there is no CUDA device
models       architectures: mbridge's mapping of each, made to fit the layers of this package
layers       the layers of ``--transformer-impl local``: norms, and the layer specification
bridge       Hugging Face folders to Megatron models and back, through mbridge, in shards
convert      ``buffer-rl convert``
attention    which tokens of a row a context-parallel rank has; causal attention for ``--transformer-impl local``
vocabulary   log-probabilities and entropies of a vocabulary that is split over ranks
routing      routing replay: which experts a micro-batch's tokens go to
forward      micro-batches through a model's pipeline, and what comes out of it for response tokens
checkpoint   weights and optimizer state in torch_dist folders, for any later layout
optimizer    gradients over replicas, clipping, Megatron's optimizer, its state in checkpoints, and the learning rate
trainer      the trainer backend
backend      what ``--train-backend megatron`` names
"""
