"""Compares slime's own graders with those that stand for them here: ``python tests/slime_graders.py PATH`` of a slime
checkout, with sympy and pylatexenc installed.

Prints a table in Markdown, one row a name of ``--rm-type``, with the differences by their names in rm_hub/README.md;
exits with 1 where a decision is not the one that tests/unit/rm_hub/grader_vectors.jsonl has. Nothing of the checkout is
copied.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).parent))

from buffer_rl.plugin.registry import PluginRegistry
from harness.grader_vectors import Reward, Vector, our_grader, our_name, vectors

PACKAGE = "rm_hub_of_the_checkout"


def their_grader(checkout: Path) -> Callable[[Vector], Reward]:
    """slime's dispatch by ``--rm-type``, over the names of ``slime.utils`` that this library provides."""
    PluginRegistry.from_flags(["slime"])
    folder = checkout / "slime" / "rollout" / "rm_hub"
    spec = importlib.util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    spec.loader.exec_module(module)

    def graded(vector: Vector) -> Reward:
        args = SimpleNamespace(custom_rm_path=None, rm_type=vector.rm_type)
        try:
            reward = asyncio.run(module.async_rm(args, vector.sample()))
        except Exception:  # the boundary to code of others
            return "error"
        return round(float(reward["score"] if isinstance(reward, dict) else reward), 6)

    return graded


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    given = parser.parse_args()
    if not (given.checkout / "slime").is_dir():
        parser.error(f"{given.checkout} is no checkout of slime: it has no folder slime")
    if importlib.util.find_spec("pylatexenc") is None:
        parser.error("slime's graders need pylatexenc: pip install pylatexenc")
    theirs, unlisted = their_grader(given.checkout.resolve()), []
    by_type: dict[str, list[Vector]] = {}
    for vector in vectors():
        by_type.setdefault(vector.rm_type, []).append(vector)
    print("| `--rm-type` of slime | here | vectors | equal | differing |\n|---|---|---|---|---|")
    for rm_type, mine in by_type.items():
        ours, equal, differing = our_grader(rm_type), 0, Counter[str]()
        for vector in mine:
            found, wanted = (ours(vector), theirs(vector)), (vector.reward, vector.slime)
            if found != wanted:
                unlisted.append(
                    f"{rm_type} {vector.response[-80:]!r}, label {vector.label!r:.40}: {found}, not {wanted}"
                )
            equal += found[0] == found[1]
            if found[0] != found[1]:
                differing[vector.why or "not listed"] += 1
        named = "; ".join(f"{why} {count}" for why, count in differing.most_common())
        print(f"| {rm_type} | {our_name(rm_type)} | {len(mine)} | {equal} | {named} |", flush=True)
    for line in unlisted:
        print(f"not as listed (here, slime): {line}", file=sys.stderr)
    return int(bool(unlisted))


if __name__ == "__main__":
    sys.exit(main())
