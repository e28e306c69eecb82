"""Formulas: pure functions of arrays and tensors.

algorithms   the table of algorithms: estimator, loss, normalisation of rewards
advantages   group-normalised rewards; advantage estimators (numpy)
aggregation  from token losses to one number
kl           KL estimators
ratio        probability ratios, clip range, the clipped surrogate
losses       policy loss (PPO), supervised loss (torch)
gspo, cispo, gmpo, sapo, decoupled, dpo    losses by the papers of these names
corrections  weights for the difference between the engine's and the trainer's log-probabilities
"""
