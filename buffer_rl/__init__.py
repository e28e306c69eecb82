"""buffer_rl: plugin-driven, buffer-centric reinforcement-learning post-training of language models.

Packages, each of which imports only those above it:

records   what travels between processes, as data
kinds     what a plugin of each kind receives and returns
plugin    from a plugin reference to an object that meets its contract
options   options from flags, environment and YAML
plan      what a run is, as data
files     checkpoints, remote paths, configuration of model folders
observe   progress, metrics, timeline and reports
data      readers, validation, order and custom sources of prompts
buffer    the Buffer: state, ledger, pools, actor and clients
cluster   Ray: session, placement, groups of actors, processes
engines   clients of rollout engines, and the fleet behind the router
weights   weights from the trainer to the engines
algo      formulas of advantages, losses and corrections
embedded  an engine of our own, for Hugging Face models
rollout   from prompts to finished groups
trainer   the trainer: from rows to weights
driver    the steps of a run, and its start
testing   fakes and linters for the tests of users
verbs     one file per verb of the command line

Beside them: ``errors``; ``args``, the list of all option sections; ``api``, what Python programs call; ``cli``, the
command ``buffer-rl``, which ``__main__`` calls.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from buffer_rl.api import TrainResult, train

__all__ = ["TrainResult", "train"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``train`` and ``TrainResult``, imported when they are asked for: they import much."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("buffer_rl.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class OldNames:
    """The last finder of modules: asked for what no other one found, it tells the new name of what has moved."""

    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]
        """As importlib's finders."""
        if name.startswith("buffer_rl."):
            from buffer_rl.plugin.old_names import find_spec

            return find_spec(name)
        return None


sys.meta_path.append(OldNames)
