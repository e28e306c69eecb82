"""Formulas: pure functions of arrays and tensors.

algorithms   the table of algorithms: estimator, loss, normalisation of rewards
options      what advantage estimators read
advantages   group-normalised rewards; the estimator grpo (numpy, as all estimators)
rewards      rewards as the algorithm normalises them, by means of rloo and pass_at_k too
returns      token rewards, discounted returns, normalisation over a rollout
reinforce    the estimators reinforce_plus_plus, reinforce_plus_plus_baseline, remax and gpg
gae          the estimator gae, for runs with values
aggregation  from token losses to one number
kl           KL estimators
kl_target    the KL coefficient that follows a target, and its options
ratio        probability ratios, clip range, the clipped surrogate
losses       policy loss (PPO), supervised loss (torch)
gspo, cispo, gmpo, sapo, decoupled, dpo    losses by the papers of these names
corrections  weights for the difference between the engine's and the trainer's log-probabilities
"""
