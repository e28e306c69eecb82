"""The project's own test harness, for tests and benchmarks.

ledger_failpoints   kills a process at every statement that it sends to a ledger
ledger_kills        kills a process that writes a ledger at random moments
ledger_mutants      ledgers that are wrong on purpose
mutants             faults that are put into a copy of the project
memory_ledger       the model that the ledger is compared with
ledger_contents     what a ledger holds, its counts, a way back to its own copy
saved_state         a checkpoint of a ``BufferState`` in memory
faulty_runs         live runs whose driver, rank or Buffer is killed
processes           which processes descend from a process
scripts             scripts in processes of their own, which are forked where the tests' processes are
"""
