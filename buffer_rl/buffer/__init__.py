"""The Buffer: the only owner of datasets, sample groups, pools and the ledger.

state           ``BufferState``, the operations of the Buffer, without Ray
rollouts        production: the tickets and their leases
queue           the groups that wait to be leased again, and what they keep
feed            where fresh groups come from
codec           groups as JSON; how columns and row ids travel
selections      what each step trains on, from its opening to its release, and what these groups say of it
window          which finished groups a step of an asynchronous run takes
pool            one selection's rows, filled and read while it is open
readers         which finished groups one step trains on, and which of them a reading task gets next
columns         how columns are stored
ledger          the durable state of every group, and what is known of the run beside them, on SQLite
ledger_tables   a group's states, the rules by which they change, and its tables in SQL
ledger_file     the ledger's file: schema, checks, copies, its place in a run
ledger_audit    reads a ledger that may be in use; checks its accounting
calls           which operations change the state, and how a repeated call is recognised
actor           the Buffer's process, and its watcher
client          the Buffer for its callers
rollout_client  the ``buffer`` of a rollout function
storage         the processes that own large payloads
"""
