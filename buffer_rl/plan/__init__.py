"""What a run is, as data: computed from the options, without torch and Ray.

roles       the table of roles: what each computes, with which model, in how many processes
algorithm   which models, fields and estimators the options ask for
algorithms  the table of algorithms: estimator, loss, normalisation of rewards
counts      how many processes each role has; how many optimizer steps a rollout has, and of how many samples
layout      ranks in pipeline, data, context and tensor parallelism
schedule    what may overlap with generation
staleness   checks and notices of runs that train on samples of older weights
flops       what a model computes on a row, and the metrics of a step's speed
"""
