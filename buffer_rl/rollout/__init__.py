"""Rollouts: generation, scoring, filtering, evaluation; where user code runs.

default         the default rollout function: leases, generates, scores and filters groups until enough are kept
sft             the rollout function of supervised fine-tuning: the data's answers; loss masks of conversations
evaluate        evaluation on held-out prompts, and its metrics
production      generates and scores one group; task groups
deadlines       how long the work on a ticket may take
generate        the built-in generate function: sampling parameters, continued responses, several turns in a sample
requests        what is asked of the engines, for which lease: ids, seeds, samples that share a request, the stop
prompts         the tokenizer, chat templates, prompts to token ids
scoring         chooses each sample's reward function and computes the reward within a deadline
reward_pool     the processes of synchronous rewards: batches, deadlines, kills
reward_process  the process that computes synchronous rewards and can be killed
reward_model_client  calls on the processes of the reward model
failures        kinds and domains of failed attempts
failure_policy  requeue, quarantine or the end of the run after a failed attempt
baseline        the reward of a greedy response to each prompt, where an estimator needs it
user_rollout    calls a user's rollout function and reads its answer, slime's evaluation answers too
user_functions  calls the user's filters and log functions
conversion      one finished group to columns
stats           counts of a rollout, and its metrics
context         what rollout functions share: tokenizer, engine, scorer, places for samples in flight
lease           what generating code works on: ticket, group, attempt, requests; current_lease() for user functions
worker          the process of a rollout worker
data_source     the process of a user's data source
options         the options of rollouts, rewards and evaluation
"""
