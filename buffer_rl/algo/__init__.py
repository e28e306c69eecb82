"""Formulas: pure functions of arrays and tensors.

advantages   group-normalised rewards; advantage estimators (numpy)
aggregation  from token losses to one number
losses       policy loss, supervised loss, KL estimators (torch)
"""
