"""Formulas: pure functions of arrays and tensors.

algorithms   the table of algorithms: estimator, loss, normalisation of rewards
advantages   group-normalised rewards; advantage estimators (numpy)
aggregation  from token losses to one number
losses       policy loss, supervised loss, KL estimators (torch)
"""
