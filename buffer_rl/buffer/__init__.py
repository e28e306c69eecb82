"""The Buffer: the only owner of datasets, sample groups, pools and the ledger.

Logic, without Ray:

- state: ``BufferState``, the operations of the Buffer
- rollouts: the queue, the open rollouts and their leases
- partial: what a group keeps when it is requeued
- feed: where fresh groups come from
- codec: groups as JSON
- pools: the pools of all rollouts
- pool: one rollout's rows, filled and read while it runs
- readers: which groups a reading task gets next
- columns: how columns travel and are stored
- calls: which operations change the state, and how a repeated call is recognised
- ledger*, sqlite_ledger, row_file, record: the state of every group, on disk

Processes:

- actor: the Buffer's process, and its watcher
- client: the Buffer for its callers
- rollout_client: the ``buffer`` of a rollout function
- calling: deadlines and retries of calls
- storage: the processes that own large payloads
- options: the flags
"""
