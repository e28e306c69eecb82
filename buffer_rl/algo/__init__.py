"""Formulas: pure functions of arrays and tensors.

options      what advantage estimators read
advantages   the estimator grpo (numpy, as all estimators)
rewards      rewards of a prompt's samples: shaped, then normalised as the algorithm wants (rloo, pass_at_k, ...)
returns      token rewards, discounted returns, normalisation over a rollout, the part of a teacher
reinforce    the estimators reinforce_plus_plus, reinforce_plus_plus_baseline, remax and gpg
gae          the estimator gae, for runs with values
aggregation  from token losses to one number
kl           KL estimators, and the coefficient that follows a target
losses       probability ratios, clip range, the clipped surrogate; losses of policies, supervised and value loss
dpo          the loss of pairs
corrections  weights for the difference between the engine's and the trainer's log-probabilities
"""
