"""IFBench: 1 if the response follows every instruction of its row, by the benchmark's own checkers, else 0.

Source: Pyatkin et al. 2025, Generalizing Verifiable Instruction Following, arXiv:2507.02833. The checkers are the
package ``ifbench`` of https://github.com/allenai/IFBench, which is in no package index: clone it, install its
requirements, and put its folder on PYTHONPATH. Nothing is fetched or installed here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from buffer_rl.errors import RewardError
from buffer_rl.records.groups import Sample, Status
from rm_hub.answers import answer_of, where
from rm_hub.ifeval import instructions_of


def score(args: Any, sample: Sample) -> float:
    """1.0 if the response follows every instruction of the row and ended by itself, else 0.0.

    The metadata holds ``instruction_id_list`` and, in the same order, ``kwargs``, one mapping for each id; entries that
    are None count as absent. ``prompt_text``, or else a prompt that is text, is what instructions about the prompt
    read. Raises RewardError for an unknown id, and where the package is not there.
    """
    place = where(sample, "rm_hub.ifbench")
    checkers = _checkers(sample, _registry(), place)
    text = answer_of(args, sample).strip()
    if sample.status is not Status.COMPLETED or not text:
        return 0.0
    return float(all(checker.check_following(text) for checker in checkers))


def _checkers(sample: Sample, registry: Mapping[str, Any], place: str) -> list[Any]:
    prompt = sample.metadata.get("prompt_text", sample.prompt)
    made = []
    for name, given in instructions_of(sample, place):
        if name not in registry:
            of_it = f"{place}, instruction {name!r:.80}"
            raise RewardError("there is no such instruction", where=of_it, expected="an id of IFBench")
        checker = registry[name](name)
        checker.build_description(**{key: value for key, value in given.items() if value is not None})
        if "prompt" in (checker.get_instruction_args() or ()):
            checker.build_description(prompt=str(prompt))
        made.append(checker)
    return made


def _registry() -> Mapping[str, Any]:
    """The class of each instruction by its id."""
    try:
        found: Mapping[str, Any] = importlib.import_module("ifbench.instructions_registry").INSTRUCTION_DICT
    except ImportError as error:
        what, of = f"the checkers of IFBench cannot be imported: {error}", "https://github.com/allenai/IFBench"
        hint = f"clone {of}, pip install -r its requirements.txt, and put its folder on PYTHONPATH"
        raise RewardError(what, where="rm_hub.ifbench", hint=hint) from error
    return found
