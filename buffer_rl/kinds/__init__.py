"""What a plugin of each kind receives and returns.

contracts    one Protocol for each kind
table        the table of kinds: name, flags, signature
token_loss   what a loss receives and returns
marks        marks on plugin functions: the rows that they need together, the columns that they read
results      checks of what plugins return
"""
