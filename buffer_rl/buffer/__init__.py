"""The Buffer: the only owner of datasets, sample groups, pools and the ledger."""
