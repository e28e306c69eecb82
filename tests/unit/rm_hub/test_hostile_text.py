"""Rows and responses that are programs: whatever a reward does with them, none is run as one."""

from __future__ import annotations

import builtins
import copy
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from types import CodeType
from typing import Any

import pytest
import reasoning_gym
import sympy
import sympy.physics.units  # which evaluates its own constants when it is imported
from reasoning_gym.factory import DATASETS
from sympy.parsing import sympy_parser

from buffer_rl.errors import RewardError
from buffer_rl.kinds.marks import is_for_rows
from buffer_rl.records.groups import Sample, Status
from rm_hub import boxed, dapo, deepscaler, exact_match, f1, gpqa, ifeval, math, numeric, random
from rm_hub import reasoning_gym as hub
from rm_hub.compose import weighted

PROGRAM = "__import__('os').system('false')"
PAYLOADS = (
    PROGRAM,
    f"[{PROGRAM}]",
    f"[[{PROGRAM}, 1], [0, 1]]",
    f"['1', {PROGRAM}]",
    f"({PROGRAM}).real",
    "(lambda: ().__class__.__base__.__subclasses__())()",
    f"\\boxed{{{PROGRAM}}}",
    f"<think>x</think>Answer: \\boxed{{sqrt({PROGRAM})}}",
    "x + __import__('sys').exit()",
    f'{{"a": "{PROGRAM}"}}',
    "(" * 300 + PROGRAM + ")" * 300,
)
REFUSED = frozenset(
    {
        "composite",
        "intermediate_integration",
        "polynomial_multiplication",
        "propositional_logic",
        "rubiks_cube",
        "simple_integration",
    }
)


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What turned text into code meanwhile. It is refused too, but graders catch everything, so look at the record."""
    calls: list[str] = []

    def forbid(owner: Any, name: str, *, texts_only: bool = False) -> None:
        original = getattr(owner, name)

        def forbidden(*given: Any, **options: Any) -> Any:
            asked_by = sys._getframe(1).f_globals["__name__"]
            a_module = name == "exec" and isinstance(
                given[0], CodeType
            )  # that is imported; of text, compile comes first
            if a_module or asked_by == MONOMIALS or (texts_only and not isinstance(given[0], str)):
                return original(*given, **options)
            calls.append(f"{name}({given[:1]!r:.80})")
            raise AssertionError(f"{name} was called")

        patches.setattr(owner, name, forbidden)

    with monkeypatch.context() as patches:
        for name in ("eval", "exec", "compile"):
            forbid(builtins, name)
        forbid(sympy_parser, "eval_expr")
        for owner in [module for name, module in sys.modules.items() if name.partition(".")[0] in USERS_OF_SYMPY]:
            for name in ("parse_expr", "sympify"):
                if getattr(owner, name, None) in (sympy_parser.parse_expr, sympy.sympify):
                    forbid(owner, name, texts_only=True)
        yield calls


MONOMIALS = "sympy.polys.monomials"  # it writes functions from a template in which only the number of variables differs
USERS_OF_SYMPY = ("sympy", "reasoning_gym", "math_verify", "latex2sympy2_extended", "rm_hub")


def sample_of(name: str, entry: dict[str, Any], response: str) -> Sample:
    metadata = {"source_dataset": name, "entry": entry}
    return Sample(prompt="?", response=response, label="1", status=Status.COMPLETED, metadata=metadata)


def graded(name: str, entry: dict[str, Any], response: str) -> float | None:
    try:
        return hub.score_partial(None, sample_of(name, entry, response))
    except RewardError:
        return None


def poisoned(value: Any, payload: str) -> Any:
    """``value`` with every text in it, keys apart, replaced."""
    if isinstance(value, str):
        return payload
    if isinstance(value, dict):
        return {key: poisoned(item, payload) for key, item in value.items()}
    return [poisoned(item, payload) for item in value] if isinstance(value, list | tuple) else value


def hostile_entries(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The entry with one payload or another in its answer, in one text of its metadata, and in all of them."""
    for payload in PAYLOADS:
        yield {**entry, "answer": payload}
        yield poisoned(entry, payload)
    for key in entry["metadata"]:
        yield {**entry, "metadata": {**entry["metadata"], key: PROGRAM}}


@pytest.fixture(scope="module")
def entries() -> dict[str, dict[str, Any]]:
    """A row of every task that reasoning-gym can make, as it comes out of a data file."""
    made = {}
    for name in DATASETS:
        if name != "composite":
            entry = reasoning_gym.create_dataset(name, seed=3, size=1)[0]
            made[name] = json.loads(json.dumps(entry, default=str))
            graded(name, made[name], "")  # made outside the record: its word lists are read, its modules imported
    return made


def test_no_task_runs_what_a_row_or_a_response_says(
    entries: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorded(monkeypatch) as calls:
        for name, entry in entries.items():
            for payload in PAYLOADS:
                assert name in REFUSED or graded(name, entry, payload) is not None, (name, payload)
            for hostile in hostile_entries(entry):
                for response in (str(entry["answer"]), PROGRAM):
                    graded(name, copy.deepcopy(hostile), response)
                    assert not calls, (name, hostile, response)
        for payload in (*PAYLOADS, "composite", "os.system", "reasoning_gym.composite:x"):
            assert graded(payload, entries["chain_sum"], "1") is None
    assert calls == []


def test_the_record_sees_what_the_graders_of_refused_tasks_run(
    entries: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    for name in DATASETS:
        if name in hub.SAFE or name == "composite":
            continue
        grade = reasoning_gym.get_score_answer_fn(name)
        with recorded(monkeypatch) as calls:
            grade(PROGRAM, copy.deepcopy(entries[name]))
        if calls:
            seen.add(name)
    assert seen == (REFUSED | set(hub.OWN)) - {
        "coin_flip", "composite", "game_of_life_halting", "propositional_logic", "rubiks_cube"
    }  # fmt: skip


def test_every_installed_task_is_graded_or_refused_by_name(entries: dict[str, dict[str, Any]]) -> None:
    assert set(DATASETS) == hub.SAFE | set(hub.OWN) | REFUSED
    for name in REFUSED:
        with pytest.raises(RewardError, match=f"the grader of '{name}' is not known to be safe"):
            hub.score(None, sample_of(name, {"answer": "1", "metadata": {}}, "1"))


def test_right_answers_earn_full_marks_and_others_do_not(entries: dict[str, dict[str, Any]]) -> None:
    right = {name: entry["answer"] for name, entry in entries.items() if name not in REFUSED}
    right["graph_color"] = json.dumps(entries["graph_color"]["metadata"]["possible_answer"])
    for name, answer in right.items():
        if name in ("boxnet", "rush_hour"):  # their rows hold no solution
            assert graded(name, entries[name], "no move") in (0.0, 0.01)
            continue
        assert hub.score(None, sample_of(name, entries[name], answer)) == 1.0, name
        assert graded(name, entries[name], "?!") != 1.0, name


@pytest.mark.parametrize(
    "response",
    [
        "", "?!", "nan", "NaN + n ani", "inf", "-inf", "{}", "null", "-1", "0", "[1]", "[[1]]", "[]", '{"a": 1}',
        '[{"a": 1}]', "1e400", "1e9999999", "-1e-9999999", "9" * 5000, "1/0", "True", '"a"', "a b\nc d", "\0",
        "[" * 5000, "x^2 = 1, \u00b2",
    ],
)  # fmt: skip
def test_wrong_text_earns_a_number_and_is_never_an_error(entries: dict[str, dict[str, Any]], response: str) -> None:
    for name, entry in entries.items():
        if name not in REFUSED:
            marks = hub.score_partial(None, sample_of(name, copy.deepcopy(entry), response))
            assert 0.0 <= marks < 1.0 or response == entry["answer"], (name, marks)


@pytest.mark.parametrize("name", ["boxnet", "coin_flip", "prime_factorization"])
def test_a_row_that_no_response_can_be_graded_on_is_an_error(name: str) -> None:
    with pytest.raises(RewardError, match=f"the grader of '{name}' failed"):
        hub.score(None, sample_of(name, {"answer": "?", "metadata": {}}, "[1]"))


@pytest.mark.parametrize(
    ("name", "response", "marks"),
    [
        ("game_of_life_halting", "True", 1.0),
        ("game_of_life_halting", "False", 0.0),
        ("coin_flip", "0.375", 1.0),
        ("coin_flip", "3/8", 1.0),
        ("coin_flip", "0.37509", 1.0),
        ("coin_flip", "0.3752", 0.0),
        ("coin_flip", "37.5%", 0.0),
        ("coin_flip", "about 0.375", 0.0),
        ("countdown", "(6 - 2) * 5", 1.0),
        ("countdown", " ( 6-2 )*5 ", 1.0),
        ("countdown", "(6 - 2) * 5 + 0", 0.0),  # 0 is not given
        ("countdown", "5 * 2 + 6", 0.0),
        ("countdown", "6 2 5", 0.0),
        ("countdown", "(6 - 2)(5)", 0.0),
        ("countdown", "20", 0.0),
        ("countdown", "5 ** 6 - 2", 0.0),
        ("countdown", "5 / (6 - 6)", 0.0),
        ("puzzle24", "6 * (5 - 2 + 1)", 1.0),
        ("puzzle24", "5 * 6 - 2 * 1", 0.0),
        ("puzzle24", "24", 0.0),
        ("puzzle24", "12 * 2", 0.0),
        ("bitwise_arithmetic", "-0x1F", 1.0),
        ("bitwise_arithmetic", "-31", 1.0),
        ("bitwise_arithmetic", "0x1f", 0.0),
        ("bitwise_arithmetic", "-0x10 - 0xf", 0.0),
        ("number_sorting", "['-2', '1.5', '10']", 1.0),
        ("number_sorting", '[-2, 1.5, "10"]', 1.0),
        ("number_sorting", "['10', '1.5', '-2']", 0.0),
        ("number_sorting", "-2, 1.5, 10", 0.0),
        ("n_queens", "Q _\n_ _", 1.0),
        ("n_queens", "[['Q', '_'], ['_', '_']]", 0.0),
        ("n_queens", "_", 0.0),
    ],
)
def test_tasks_whose_graders_evaluate_are_graded_without(name: str, response: str, marks: float) -> None:
    metadata = {
        "countdown": {"target": 20, "numbers": [2, 5, 6]},
        "puzzle24": {"numbers": [6, 5, 2, 1]},
        "number_sorting": {"direction": "ascending"},
        "n_queens": {"valid_answers": ["Q _\n_ _"]},
    }
    answer = {
        "coin_flip": "0.375",
        "game_of_life_halting": "True",
        "bitwise_arithmetic": "-0x1f",
        "number_sorting": "['-2', '1.5', '10']",
    }.get(name, "?")
    assert graded(name, {"answer": answer, "metadata": metadata.get(name, {})}, response) == marks


@pytest.mark.parametrize("answer", [PROGRAM, f"['1', {PROGRAM}]", "{'1': 2}", "[" * 5000 + "]" * 5000, 7])
def test_a_row_whose_answer_is_no_list_of_numbers_is_an_error(answer: Any) -> None:
    with pytest.raises(RewardError, match="the grader of 'number_sorting' failed"):
        hub.score(None, sample_of("number_sorting", {"answer": answer, "metadata": {"direction": "ascending"}}, "[1]"))


@pytest.mark.parametrize("run", [eval, lambda text: exec(text), lambda text: compile(text, "<answer>", "eval")])
def test_a_grader_that_runs_text_in_a_later_version_is_stopped(
    run: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(builtins, "ran", ran, raising=False)

    def later_version(answer: str, entry: dict[str, Any]) -> float:
        try:
            run(answer)
        except Exception:
            return 0.1
        return 1.0

    monkeypatch.setattr(hub, "_grader", lambda name: later_version)
    with pytest.raises(RewardError, match="tried to run text as code"):
        hub.score(None, sample_of("chain_sum", {"answer": "1", "metadata": {}}, "ran.append('here')"))
    assert ran == []
    assert eval("1 + 1") == 2  # only while a grader works


def test_a_grader_may_import_a_module_while_it_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "words_of_a_task.py").write_text("LIST = ['a']\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def grader(answer: str, entry: dict[str, Any]) -> float:
        import words_of_a_task  # type: ignore[import-not-found]

        return float(answer in words_of_a_task.LIST)

    monkeypatch.setattr(hub, "_grader", lambda name: grader)
    assert hub.score(None, sample_of("chain_sum", {"answer": "1", "metadata": {}}, "a")) == 1.0


IFEVAL = {"instruction_id_list": ["keywords:existence", "detectable_format:json_format"], "kwargs": [{}, {}]}
CHOICES: dict[str, Any] = {"choices": [PROGRAM, "4"]}
LATEX = (
    "\\frac{1}{2}", "2^{10} + \\sqrt{x}", "4", "0.5", "1,000", "0,5", "50\\%", "1.5e3", "5 \\text{ cm}", "f(x)",
    "\\{1, 2\\}", "[1, 2)", "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\log_{2} 8",
    f"\\frac{{{PROGRAM}}}{{2}}", f"\\text{{{PROGRAM}}}", f"x_{{{PROGRAM}}}", f"\\operatorname{{{PROGRAM}}}(x)",
    f"\\mathrm{{{PROGRAM}}}", f"1{PROGRAM}", f"\\{{{PROGRAM}\\}}",
)  # fmt: skip
OTHERS: tuple[tuple[Callable[..., Any], dict[str, Any]], ...] = (
    (exact_match.score, {}),
    (numeric.score, {}),
    (math.score, {}),
    (dapo.score, {}),
    (dapo.score_binary, {}),
    (deepscaler.score, {}),
    (deepscaler.score_boxed, {}),
    (f1.score, {}),
    (f1.score_exact, {}),
    (boxed.score_f1, {}),
    (gpqa.score, CHOICES),
    (gpqa.score_lenient, CHOICES),
    (boxed.score_gpqa, CHOICES),
    (random.score, {}),
    (ifeval.score, IFEVAL | {"kwargs": [{"keywords": [PROGRAM]}, {}]}),
    (ifeval.score_fraction, IFEVAL | {"kwargs": [{"keywords": [PROGRAM]}, {}]}),
    (weighted(("rm_hub.math:score", 0.5), ("rm_hub.deepscaler:score", 0.5)), {}),
)


@pytest.mark.parametrize(("reward", "metadata"), OTHERS, ids=lambda value: getattr(value, "__module__", ""))
def test_no_other_reward_runs_what_a_row_or_a_response_says(
    reward: Callable[..., Any], metadata: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def scored(label: Any, response: str, metadata: dict[str, Any]) -> None:
        with suppress(RewardError):
            reward(None, Sample(response=response, label=label, status=Status.COMPLETED, metadata=metadata))

    texts = [*PAYLOADS, *LATEX]
    for text in ("\\frac{1}{3}", "x^{9} - y"):  # before the record: modules are imported, parsers are built
        scored("\\sqrt{7} + y", f"<think></think>\\boxed{{{text}}}", metadata)
    with recorded(monkeypatch) as calls:
        for text in texts:
            for response in (text, f"<think></think>\\boxed{{{text}}}", f"<think></think>Answer: ${text}$"):
                scored("x + \\frac{1}{3}", response, metadata)
                assert not calls, response
            for label in (text, [PROGRAM, text]):
                scored(label, "<think></think>\\boxed{x + \\sqrt{7}}", metadata)
                scored(label, text, poisoned(metadata, text))
                assert not calls, label
    assert calls == []


def test_the_rewards_that_rows_may_choose_are_these() -> None:
    marked = {
        entry.name
        for entry in entry_points(group="buffer_rl.reward")
        if entry.value.startswith("rm_hub.") and is_for_rows(entry.load())
    }
    assert marked == {
        "exact_match", "numeric", "math", "math_boxed", "dapo", "dapo_binary", "deepscaler", "f1", "f1_exact",
        "boxed_f1", "gpqa", "gpqa_lenient", "boxed_gpqa", "ifeval", "ifeval_fraction", "random",
        "remote", "remote_rm",  # which send rows to an address of the run's options
    }  # fmt: skip
