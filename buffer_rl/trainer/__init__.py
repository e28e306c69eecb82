"""The trainer: from rows to weights.

collate        rows in micro-batches, as padded tensors
packing        rows as one sequence without padding
forward        log-probabilities and entropies under a model
output_layer   output layer and log-probabilities as one function, without the logits of all tokens
vocabulary     log-probabilities and entropies from logits, some tokens at a time
routing_replay tokens go to the experts that computed them in the engine
objective      loss and advantage estimator of a run; gradients before the step's totals are known
host_memory    copies of a GPU's tensors in pinned memory of the host
optimizer      AdamW, reduction and sums of gradients
learning_rate  the learning rate of each optimizer step
steps          optimizer steps on a rollout; steps that are not finite; the KL coefficient under --kl-target
stream         rows of a rollout that still runs: the torch dataset, the stages of roles
model          a model, and its weights as those of a Hugging Face folder
pretrained     loading such a folder
sharding       a model that is split over ranks, or computes in bfloat16
lora           adapters in place of full training
save_dtype     the number format of the folders of models that are written for others
converter      base class of model converters; reading a folder tensor by tensor
rank_files     files of a rank in a checkpoint
torch_trainer  the default trainer backend
logprob_gate   comparison of the engine's log-probabilities with the trainer's
rank           a rank as a Ray actor
peers          how ranks meet: at the start, before a forward pass, in sums
reward_model   processes of the reward model
role_worker    processes of the roles ref, teacher, actor_fwd and advantages
role_model     the model of such a process, and the versions that it takes
options        flags
"""
