"""Functions, classes, methods and properties of shipped code that no shipped code names: lists them, and fails.

    python tests/unused_names.py

Names that others call are below with the reason. Entry points of ``pyproject.toml`` and the import names of slime are
used, and ``buffer_rl/testing`` is for tests.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from vulture import Vulture

from buffer_rl.plan.algorithms import REFERENCES
from buffer_rl_slime.names import SLIME

ROOT = Path(__file__).parents[1]
SHIPPED = ("buffer_rl", "rm_hub", "filter_hub", "plugins")
KINDS = ("function", "class", "method", "property")
LOWEST_CONFIDENCE = 60  # of 100: what vulture gives to all names that are defined and never mentioned
ALLOWED: Mapping[str, str] = {
    "Bubblewrap": "the options of the code reward name it by reference",
    "SandboxServer": "the options of the code reward name it by reference",
    "between": "filters of users are made with it",
    "redirect_request": "urllib calls it for each redirect",
    "_check_value": "argparse calls it for each value",
    "_one_text_is_a_list_of_one": "pydantic calls it for each option that is a list",
    "_has_no_credentials": "pydantic calls it for addresses of trackers",
    "_use_wandb_is_a_logger": "pydantic calls it when options are made",
    "get_seq_length": "transformers asks a cache for it",
    "get_mask_sizes": "transformers asks a cache for it",
    "is_compileable": "transformers asks a cache for it",
    "timeout_keep_alive_handler": "uvicorn calls it when a connection has been idle for long",
    "picture_file": "docs/timelines.py and benchmarks/algorithms_page.py write pictures with it",
    "enter_working_directory": "Ray calls it by its path in each worker",
    "__getattr__": "Python asks a module for a name that is not there",
    "__dir__": "Python asks a module for its names, for those that it imports late too",
    "_repr_png_": "notebooks ask a result for its picture",
    "generate_turn": "generate functions of users call it",
    "add_observation": "generate functions of users call it",
    "cache_key": "evaluation functions of users read it",
    "inject_metadata": "evaluation functions of users call it",
    "spec_accept_rate": "functions of users read it",
    "spec_accept_length": "functions of users read it",
    "prefix_cache_hit_rate": "functions of users read it",
    "weighted": "rewards of users are composed with it",
    "at_least": "filters of users are made with it",
    "at_most": "filters of users are made with it",
    "with_fallback": "filters of users are made with it",
    "wait_stream": "megatron-core calls it of a CUDA stream",
    "record_event": "megatron-core calls it of a CUDA stream",
    "get_replay_topk": "megatron-core's routers call it",
    "NameMap": "model converters of users derive from it",
    "ModelShapeOptions": "an option section, named by its path",
    "Glm4Bridge": "mbridge finds it by the model type that it is registered for",
    "_build_config": "mbridge calls it",
    "write_trajectory": "agents call it",
    "ServiceRollout": "named by its path in --rollout-function-path",
    "_has_one_form": "pydantic calls it for each trajectory",
    "create_module": "importlib calls it",
    "on_dynamic_filter_drop": "rollout functions of slime call it",
    "dp_rank_context": "rollout functions of slime call it",
    "submit_generate_tasks": "rollout functions of slime call it",
    "clear_instances": "functions of slime call it",
    "get_loss_mask": "rollout functions of slime call it",
}


def entry_points() -> set[str]:
    """Names of objects that ``pyproject.toml`` and the table of algorithms give to plugin hosts."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    references = [*groups.values(), *REFERENCES.values()]
    return {reference.partition(":")[2] for group in references for reference in group.values()}


def import_names() -> set[str]:
    """Names that code written for slime imports."""
    names = (SLIME.names_of(module) for module in SLIME.modules)
    return {there for found in names for _, there in found.values()}


def hooks() -> set[str]:
    """Methods that pluggy calls by their names."""
    return {
        line.split("def ")[1].split("(")[0]
        for line in _lines("buffer_rl/plugin/hookspecs.py")
        if "def buffer_rl_" in line
    }


def unused() -> Iterator[tuple[str, str]]:
    """``(place, name)`` of what no shipped code mentions."""
    found = Vulture()
    found.scavenge([str(ROOT / folder) for folder in SHIPPED])
    for item in found.get_unused_code(min_confidence=LOWEST_CONFIDENCE):
        path = Path(item.filename).relative_to(ROOT)
        if item.typ in KINDS and "testing" not in path.parts:
            yield f"{path}:{item.first_lineno}", item.name


def main() -> int:
    """Returns 1 if there are others than those that are allowed, or an exception that is none."""
    found = list(unused())
    used_elsewhere = entry_points() | hooks() | import_names()
    for place, name in found:
        if name not in ALLOWED and name not in used_elsewhere:
            print(f"{place}: nothing calls {name!r}: delete it, or say in {Path(__file__).name} who does")
    superfluous = set(ALLOWED) - {name for _, name in found}
    for name in sorted(superfluous):
        print(f"tests/{Path(__file__).name}: {name!r} is used or gone: delete the exception")
    return int(bool(superfluous) or any(name not in ALLOWED and name not in used_elsewhere for _, name in found))


def _lines(path: str) -> list[str]:
    return (ROOT / path).read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    sys.exit(main())
