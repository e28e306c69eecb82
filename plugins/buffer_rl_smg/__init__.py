"""smg, the successor of sglang-router, as the router of a run: ``--router smg``.

router  its package, and the program that runs it
"""
