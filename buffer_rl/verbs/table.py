"""The verbs of the command line, in the order in which ``--help`` shows them."""

from __future__ import annotations

# Verb to summary. The module ``buffer_rl.verbs.VERB`` has ``add_parser(subparsers, argv)``, which sets ``run``.
VERBS = {
    "train": "train a model",
    "eval": "evaluate a model or a checkpoint",
    "generate": "print a model's responses to prompts",
    "plugins": "list, check and begin plugins",
    "data": "validate, show and count data files",
    "report": "write one HTML page of a run",
    "ledger": "where each group of a run is, and whether it adds up",
    "checkpoint": "check that checkpoints are whole",
    "export": "take the model out of a checkpoint",
    "completion": "print a completion script for a shell",
}
