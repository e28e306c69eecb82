"""The tasks, the held-out accuracy and the table of the comparison with TRL, which itself is not needed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from buffer_rl.testing.tiny import make_tiny_model

Script = Callable[[str], ModuleType]


def record(system: str, **more: Any) -> dict[str, Any]:
    """A run of four steps of 2 s, the first of 10 s, evaluated every second step."""
    usual: dict[str, Any] = {
        "kind": "run",
        "task": "short",
        "system": system,
        "seed": 0,
        "cores": 2,
        "steps": 4,
        "settings": {},
        "load": 0.5,
        "version": "1",
        "start_s": 3.0,
        "seconds": [10.0, 2.0, 2.0, 2.0],
        "cpu": {"all": [9.0, 5.0, 1.5, 5.0]},
        "accuracy": {"0": 0.2, "2": 0.4, "4": 0.8},
    }
    return usual | more


def test_each_column_of_a_long_sum_is_right_and_its_answers_have_10_to_116_tokens(script: Script) -> None:
    tasks = script("comparison_tasks")
    lengths = []
    for prompt, answer in tasks.rows(tasks.TASKS["long"], 4000, "test"):
        columns = re.findall(r"([a-p])(\d)(\d)", prompt)
        assert "".join(letter for letter, _, _ in columns) == "abcdefghijklmnop"[: len(columns)]
        first, second = (int("".join(column[i] for column in columns)[::-1]) for i in (1, 2))
        steps = re.findall(r"([a-p])(\d)(\d)(\d)=(\d\d)", answer)
        assert [step[:3] for step in steps] == columns
        for place, (_, a, b, carry, total) in enumerate(steps):
            below = 10**place
            assert int(carry) == (first % below + second % below) // below
            assert int(total) == int(a) + int(b) + int(carry)
        last, total = ":1." if first + second >= 10 ** len(columns) else ":.", first + second
        assert answer[7 * len(columns) :] == last
        assert int("".join(step[4][1] for step in steps)[::-1]) == total % 10 ** len(columns)
        lengths.append(len(answer) + 1)  # a token a character, and the end token
    assert (min(lengths), max(lengths)) == (10, 116)
    assert sorted(lengths)[len(lengths) // 2] < 116 / 3


def test_a_word_is_answered_backwards_and_every_answer_fits(script: Script) -> None:
    tasks = script("comparison_tasks")
    for task in tasks.TASKS.values():
        for prompt, answer in tasks.rows(task, 500, "test"):
            assert len(answer) + 1 <= task.max_tokens
            assert len(prompt) + len(answer) + 1 <= task.context
            assert set(prompt + answer) <= set(task.characters)
    assert all(prompt == answer[::-1] + "=" for prompt, answer in tasks.rows(tasks.TASKS["short"], 20, "test"))


def test_rows_of_a_part_are_always_the_same_and_those_of_another_part_are_not(script: Script) -> None:
    tasks = script("comparison_tasks")
    task = tasks.TASKS["short"]
    assert tasks.rows(task, 20, "held-out") == tasks.rows(task, 30, "held-out")[:20]
    assert not set(tasks.rows(task, 200, "held-out")) & set(tasks.rows(task, 200, "train 0"))


def test_greedy_accuracy_is_that_of_transformers_generate(script: Script, tmp_path: Path) -> None:
    tasks = script("comparison_tasks")
    make_tiny_model(tmp_path, characters="ab=", init_scale=0.5, seed=1, tie_word_embeddings=False)
    model, tokenizer = tasks.load(tmp_path)
    eos = tokenizer.eos_token_id
    prompts = [f"{number:05b}".replace("0", "a").replace("1", "b") + "=" for number in range(32)]
    ids = torch.tensor([tokenizer.encode(prompt) for prompt in prompts])
    mask = torch.ones_like(ids)
    new = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=6, pad_token_id=0)[:, 6:].tolist()
    ended = [row[: row.index(eos)] if eos in row else None for row in new]
    answers = [
        "abababab" if row is None or index % 4 == 0 else tokenizer.decode(row) for index, row in enumerate(ended)
    ]
    right = sum(row is not None for index, row in enumerate(ended) if index % 4)
    assert 0 < right < 24
    task = replace(tasks.TASKS["short"], max_tokens=6)
    assert tasks.accuracy(model, tokenizer, task, list(zip(prompts, answers, strict=True)), 0.0) == right / 32


def test_seconds_to_an_accuracy_are_on_a_straight_line_between_evaluations(script: Script) -> None:
    seconds_to = script("against_trl").seconds_to
    assert seconds_to(0.3, record("a")) == pytest.approx(6.0)  # half of the first 12 s
    assert seconds_to(0.4, record("a")) == pytest.approx(12.0)
    assert seconds_to(0.7, record("a")) == pytest.approx(15.0)  # and three quarters of the next 4 s
    assert seconds_to(0.81, record("a")) is None
    assert seconds_to(0.1, record("a")) == 0.0
    assert seconds_to(0.5, record("a", accuracy={"0": 0.2, "2": 0.6, "4": 0.1})) == pytest.approx(9.0)


def test_cpu_seconds_leave_out_the_first_step_and_those_with_saved_weights(script: Script) -> None:
    cpu_a_step = script("against_trl").cpu_a_step
    assert cpu_a_step(record("a")) == {"all": 1.5}
    # Of a system that is read from the end of the first step on.
    assert cpu_a_step(record("a", cpu={"engine": [5.0, 0.25, 5.0]})) == {"engine": 0.25}


def test_the_table_compares_the_newest_run_of_each_seed_with_trl(script: Script) -> None:
    module = script("against_trl")
    slow = {"seconds": [10.0, 4.0, 4.0, 4.0]}
    records = [
        record("TRL", **slow, settings={"threads": 1, "micro_batch": 64}),
        record("ours", seconds=[99.0] * 4),
        record("ours"),
        record("ours", seed=1),
        record("ours", cores=1, seconds=[50.0] * 4),
        record("short of it", accuracy={"0": 0.2, "2": 0.3, "4": 0.3}),
        record("in part", seed=0),
        record("in part", seed=1, accuracy={"0": 0.2, "4": 0.3}),
        record("TRL", kind="probe", seconds=[0.1] * 4),
    ]
    task = replace(module.TASKS["short"], steps=4, target=0.6)
    lines = [line for line in module.table(task, 2, records) if line.startswith("| ")][1:]
    cells = {line.split(" | ")[0]: [cell.strip(" |") for cell in line.split(" | ")[1:]] for line in lines}
    assert {len(row) + 1 for row in cells.values()} == {len(module.HEADER)}
    # TRL reaches 0.6 after 14 s and half of 8 s, ours after 12 s and half of 4 s.
    assert cells["| TRL 1 (1 thread, micro-batches of 64)"][:6] == [
        "1",
        "4.00 (4.00 to 4.00)",
        "1.00x",
        "1.50 (1.50 to 1.50)",
        "18 (18 to 18)",
        "1.00x",
    ]
    assert cells["| ours 1"][:2] == ["2", "2.00 (2.00 to 2.00)"]
    assert [cells["| ours 1"][i] for i in (2, 4, 5)] == ["2.00x", "14 (14 to 14)", "1.29x"]
    assert cells["| in part 1"][4:6] == ["14 (14 to 14), 1 of 2 reach it", "-"]
    assert cells["| short of it 1"][4:6] == ["-, 0 of 1 reach it", "-"]


def test_what_has_run_with_the_same_settings_is_not_run_again(script: Script, tmp_path: Path) -> None:
    module = script("against_trl")
    task = replace(module.TASKS["short"], steps=4)
    options = {"schedule": "pipelined", "stream_gradients": True}
    comparison = module.Comparison(out=tmp_path, cores=2, options=options, trl_python="/nonexistent")
    assert comparison.ours == "buffer_rl pipelined streamed"
    known = [record(comparison.ours), record("TRL", settings={"threads": 1, "micro_batch": 64})]
    known += [record("TRL", settings={"threads": 2, "micro_batch": 512}), record(comparison.ours, seed=1)]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in known))
    assert comparison.once(task, comparison.ours, 0) == known[0]
    assert comparison.once(task, "TRL", 0, threads=1, micro_batch=64) == known[1]
    assert comparison.found(system="TRL", settings={"threads": 2, "micro_batch": 64}) is None
    assert comparison.found(system="TRL") == known[2]


def test_the_seconds_of_a_step_begin_at_the_end_of_the_one_before_without_its_checkpoint(script: Script) -> None:
    module = script("comparison_ours")
    perf = [
        {"perf/step_time": 9.0},
        {"perf/step_time": 1.5, "perf/save_time": 0.5},
        {"perf/step_time": 1.0},
    ]
    assert module.step_seconds(perf, [20.0, 22.0, 23.25], waits_for_saves=True) == [9.0, 1.5, 1.25]
    assert module.step_seconds(perf, [20.0, 22.0, 23.25], waits_for_saves=False) == [9.0, 2.0, 1.25]


def test_a_run_is_described_by_a_file_that_reads_as_it_was_written(script: Script, tmp_path: Path) -> None:
    spec = script("comparison_ours").Spec(
        folder=tmp_path / "run",
        start=tmp_path / "start",
        rows=tmp_path / "rows.jsonl",
        max_tokens=12,
        steps=4,
        eval_every=2,
        seed=1,
        cores=64,
        options={"schedule": "lockstep"},
    )
    assert type(spec).read(spec.write()) == spec
