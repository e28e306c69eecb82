"""The project's own test harness, for tests and benchmarks.

ledger_failpoints   kills a process at every statement that it sends to a ledger
ledger_kills        kills a process that writes a ledger at random moments
ledger_mutants      ledgers that are wrong on purpose
saved_state         a checkpoint of a ``BufferState`` in memory
faulty_runs         live runs whose driver, rank or Buffer is killed
"""
