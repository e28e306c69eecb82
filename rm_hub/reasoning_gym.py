"""Scores of reasoning-gym's tasks, by the graders that the tasks ship, where these run no text as code.

Source: Stojanovski et al. 2025, Reasoning Gym, arXiv:2505.24760; ``reasoning_gym.get_score_answer_fn``. Many of its
graders give partial credit, the default one for any text that contains the answer (length of the answer over
length of the text); a policy learns to exploit that, so ``score`` gives credit for full marks only.

Some of its graders call ``eval``, or sympy's ``parse_expr``, which does, on the response or on fields of the row. So a
task is graded only if it is named here: ``SAFE`` are those whose graders were read and compare text, numbers and JSON;
``OWN`` are graded by this file. All others are refused, and so is every task that a later version adds. Refused are
``composite``, ``intermediate_integration``, ``polynomial_multiplication`` and ``simple_integration`` for what they
evaluate, ``propositional_logic`` and ``rubiks_cube`` because a short answer can fill the memory.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fractions import Fraction
from typing import Any

from buffer_rl.errors import RewardError
from buffer_rl.records.groups import Sample, Status
from rm_hub.answers import has_answer, response_of, where
from rm_hub.expressions import ExpressionError, evaluate
from rm_hub.numeric import whole_number

PLACE = "rm_hub.reasoning_gym"
FULL_MARKS = 1.0
PROBABILITY_TOLERANCE = Fraction(1, 10**4)
"""Of ``coin_flip``, as in reasoning-gym."""

SAFE = frozenset(
    """
    ab acre advanced_geometry aiw arc_1d arc_agi base_conversion basic_arithmetic bf binary_alternation boxnet
    caesar_cipher calendar_arithmetic chain_sum circuit_logic codeio color_cube_rotation
    complex_arithmetic count_bits count_primes course_schedule cryptarithm decimal_arithmetic decimal_chain_sum
    dice emoji_mystery family_relationships figlet_font fraction_simplification futoshiki game_of_life
    gcd graph_color group_anagrams gsm_symbolic isomorphic_strings jugs kakurasu
    knight_swap knights_knaves largest_island lcm leg_counting letter_counting letter_jumble list_functions
    mahjong_puzzle manipulate_matrix maze mini_sudoku modulo_grid needle_haystack number_filtering number_format
    number_sequence number_sorting palindrome_generation palindrome_partitioning path_star polynomial_equations
    pool_matrix power_function prime_factorization products quantum_lock ransom_note rearc rectangle_count
    rotate_matrix rotten_oranges rush_hour self_reference sentence_reordering shortest_path simple_equations
    simple_geometry sokoban spell_backward string_manipulation string_splitting string_synthesis sudoku survo
    syllogism time_intervals tower_of_hanoi tsumego word_ladder word_sequence_reversal word_sorting zebra_puzzles
    """.split()  # noqa: SIM905 (a name a line is three screens)
)
"""Tasks of versions 0.1.19 to 0.1.25 whose graders were read; ``number_sorting`` for an answer that is JSON."""

WITHOUT_ANSWER = frozenset({"boxnet", "graph_color", "rush_hour"})
"""Tasks of ``SAFE`` whose rows have no answer: the grader follows the moves, or checks the colouring."""

Grader = Callable[[str, dict[str, Any]], float]

_ARITHMETIC = re.compile(r"[\d\s()*/+-]+")
_NO_ARITHMETIC = re.compile(r"[\d)]\s+[\d(]|[\d)]\(|\)\d|[*/]\s*[*/]")  # 2 4 and 2(4), which are no sums; ** and //


def score(args: Any, sample: Sample) -> float:
    """1.0 if the task's grader gives full marks and the sample ended by itself, else 0.0.

    ``sample.metadata`` holds ``source_dataset`` (or ``dataset``), the task's name, and ``entry``, the task as
    reasoning-gym made it; without ``entry``, it is put together from the prompt, the label and the metadata.
    Raises RewardError if reasoning-gym is not installed, or knows no such task, or the task is in neither ``SAFE``
    nor ``OWN``, or its grader fails on the row's own answer too. A response that a grader fails on is wrong.
    """
    return float(score_partial(args, sample) >= FULL_MARKS)


def score_partial(args: Any, sample: Sample) -> float:
    """The grader's own score, from 0 to 1, with its partial credit; 0.0 for a sample that did not end by itself, or not
    its ``<think>``.

    Tasks of ``OWN`` have full marks or none.
    """
    entry = _entry(sample)
    name = _dataset(sample, entry)
    if entry.get("answer") is None and name not in WITHOUT_ANSWER:
        raise _no_answer(sample)
    grade = OWN.get(name) or _grader(name)
    response = response_of(args, sample).strip()
    # The grader of ``complex_arithmetic`` takes "nan" for the right number.
    is_nan = name == "complex_arithmetic" and "nan" in response.replace(" ", "").lower()
    if sample.status is not Status.COMPLETED or not has_answer(sample) or is_nan:
        return 0.0

    def graded(answer: str) -> float:
        as_graded = _as_graded(name, entry)
        with _watch().running():
            return float(grade(answer, as_graded))

    try:
        return graded(response)
    except Exception as error:  # the fault boundary around graders of others
        if not _watch().stopped:
            with suppress(Exception):
                graded("{}" if name in WITHOUT_ANSWER else str(entry["answer"]))  # {}: no moves, no colours
                return 0.0
        what = f"the grader of {name!r} failed: {type(error).__name__}: {error}"
        raise RewardError(what, where=where(sample, PLACE)) from error


def _same_text(response: str, entry: dict[str, Any]) -> float:
    return float(response == entry["answer"].strip())


def _one_of_the_boards(response: str, entry: dict[str, Any]) -> float:
    boards = entry["metadata"]["valid_answers"]
    if not isinstance(boards, list):
        raise TypeError("valid_answers is no list")
    return float(response in boards)


def _same_integer(response: str, entry: dict[str, Any]) -> float:
    right = int(entry["answer"], 0)
    try:
        return float(int(response, 0) == right)
    except ValueError:
        return 0.0


def _same_probability(response: str, entry: dict[str, Any]) -> float:
    """Whether two numbers differ by ``PROBABILITY_TOLERANCE`` at most; the grader that is replaced computes
    ``1e9999999`` exactly."""
    right, answer = whole_number(entry["answer"]), whole_number(response)
    if right is None:
        raise ValueError("the answer is no number")
    return float(answer is not None and abs(answer - right) <= PROBABILITY_TOLERANCE)


def _reaches(response: str, target: Any, numbers: Any) -> float:
    """Whether an expression of whole numbers, + - * / and brackets has the value ``target`` and uses each of
    ``numbers`` once."""
    right, allowed = Fraction(target), sorted(map(int, numbers))
    if not _ARITHMETIC.fullmatch(response) or _NO_ARITHMETIC.search(response):
        return 0.0
    try:
        used = sorted(map(int, re.findall(r"\d+", response)))
        return float(used == allowed and evaluate(response, {}) == right)
    except (ExpressionError, ValueError):
        return 0.0


OWN: Mapping[str, Grader] = {
    "binary_matrix": _same_text,
    "spiral_matrix": _same_text,
    "string_insertion": _same_text,
    "n_queens": _one_of_the_boards,
    "bitwise_arithmetic": _same_integer,
    "coin_flip": _same_probability,
    "game_of_life_halting": _same_text,
    "countdown": lambda response, entry: _reaches(response, entry["metadata"]["target"], entry["metadata"]["numbers"]),
    "puzzle24": lambda response, entry: _reaches(response, 24, entry["metadata"]["numbers"]),
}
"""Tasks whose graders in reasoning-gym evaluate text, compute huge numbers (``coin_flip``) or give every text full
marks (``game_of_life_halting``), graded here by what earns full marks there.

``countdown`` and ``puzzle24`` want every given number once; the grader of ``puzzle24`` accepts any four numbers.
"""


@functools.lru_cache(maxsize=256)  # a grader is an object that may read word lists when it is made
def _grader(name: str) -> Grader:
    try:
        from reasoning_gym import get_score_answer_fn
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        hint = "pip install 'buffer-rl[examples]'"
        raise RewardError("reasoning-gym is not installed", where=PLACE, hint=hint) from error
    if name not in DATASETS:
        raise RewardError(f"reasoning-gym has no data set {name!r:.80}", where=PLACE)
    if name not in SAFE:
        what = f"the grader of {name!r} is not known to be safe: it evaluates text, or has not been read"
        hint = "leave these rows out, or grade them by a function of your own (--custom-rm-path)"
        expected = "a task of SAFE or OWN in rm_hub/reasoning_gym.py"
        raise RewardError(what, where=PLACE, expected=expected, hint=hint)
    grader: Grader = get_score_answer_fn(name)
    return grader


class _Watch(threading.local):
    """Stops a grader that turns text into code, as one of ``SAFE`` may in another version of reasoning-gym.

    By Python's audit events (PEP 578), which ``eval``, ``exec`` and ``compile`` raise before they do anything.
    """

    active = False
    stopped = False

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """The process's audit hook. Modules that are imported meanwhile are code from files, and are let through."""
        if not self.active or event not in ("compile", "exec"):
            return
        place = arguments[1] if event == "compile" else getattr(arguments[0], "co_filename", "<string>")
        if not isinstance(place, str) or (place.startswith("<") and not place.startswith("<frozen ")):
            self.stopped = True
            raise RuntimeError("text is not run as code here")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch this thread meanwhile. Raises RuntimeError at the end if something was stopped: graders catch all."""
        self.active, self.stopped = True, False
        try:
            yield
        finally:
            self.active = False
        if self.stopped:
            raise RuntimeError("it tried to run text as code")


@functools.cache  # an audit hook stays for the life of the process
def _watch() -> _Watch:
    watch = _Watch()
    sys.addaudithook(watch.audit)
    return watch


def _as_graded(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """The entry in the form that its grader wants."""
    if name == "number_sorting":  # made as ['-1', '2.5'], and its grader evaluates an answer that is no JSON
        numbers = json.loads(entry["answer"].replace("'", '"'))
        if not isinstance(numbers, list):
            raise TypeError("the answer is no list")
        return {**entry, "answer": json.dumps([float(number) for number in numbers])}
    if name in ("arc_agi", "rearc"):  # made of tuples, which are lists in a data file and equal none
        board = tuple(tuple(row) for row in entry["metadata"]["output"])
        return {**entry, "metadata": {**entry["metadata"], "output": board}}
    return entry


def _entry(sample: Sample) -> dict[str, Any]:
    entry = sample.metadata.get("entry")
    if entry is None:
        entry = {"question": sample.prompt, "answer": sample.label, "metadata": sample.metadata}
    if not isinstance(entry, dict):
        raise _no_answer(sample)
    return entry


def _no_answer(sample: Sample) -> RewardError:
    expected = 'metadata {"source_dataset": NAME, "entry": {"question", "answer", "metadata"}}, or a label'
    return RewardError("there is no answer to compare with", where=where(sample, PLACE), expected=expected)


def _dataset(sample: Sample, entry: dict[str, Any]) -> str:
    inner = entry.get("metadata")
    own = inner.get("source_dataset") if isinstance(inner, dict) else None
    name = sample.metadata.get("source_dataset") or sample.metadata.get("dataset") or own
    if not isinstance(name, str):
        what, expected = "the row does not say which data set it is of", '"source_dataset" or "dataset" in its metadata'
        raise RewardError(what, where=where(sample, PLACE), expected=expected)
    return name
