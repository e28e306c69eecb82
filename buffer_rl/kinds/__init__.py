"""What a plugin of each kind receives and returns, by audience: Protocols, rows of the table, checks of results.

rollout      of rollout functions, generate functions and loggers
agent        of agents, and the session that they get
reward       of rewards and filters
data         of data sources and conversions to training columns
objective    of advantage estimators, losses and corrections
trainer      of trainer backends, own roles, model converters and providers
engine       of engine launchers and weight transports
kind         what the table says of a kind
table        the table of kinds, by name
token_loss   what a loss receives and returns
marks        marks on plugin functions: the rows that they need together, the columns that they read
"""
