"""What a plugin of each kind receives and returns.

rollout      of rollout functions, generate functions, filters and loggers
reward       of rewards
data         of data sources and conversions to training columns
objective    of advantage estimators, losses and corrections
trainer      of trainer backends, own roles, model converters and providers
engine       of engine launchers and weight transports
table        the table of kinds: name, flags, signature
token_loss   what a loss receives and returns
marks        marks on plugin functions: the rows that they need together, the columns that they read
results      checks of what plugins return
"""
