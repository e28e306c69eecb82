"""``buffer-rl report``: the five lines of a recorded run, each turned red by a fault in its files; the comparison."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.cli import main
from buffer_rl.observe.checks import Check, State, checks_of
from buffer_rl.observe.metrics import MetricsFile
from buffer_rl.observe.report import read_report
from buffer_rl.observe.run_folder import SampleDump, add_facts, sample_record, write_facts
from buffer_rl.options.section import compose
from buffer_rl.records.groups import GroupUid, Sample, Status, VersionSpan
from buffer_rl.verbs.report import ledger_facts, report_run

NAMES = ["prompts", "tokens", "weights", "rewards", "scale"]
STEPS, GROUPS, SAMPLES, LENGTH = 3, 2, 2, 4
_LINE = "admitted, time, from_state, to_state, attempt, rollout_id, reason, step, incarnation"
AGAIN = f"INSERT INTO history ({_LINE}) SELECT {_LINE} FROM history WHERE to_state = 'trained' LIMIT 1"


def uid_of(step: int, group: int) -> GroupUid:
    return GroupUid("data", GROUPS * step + group, 0)


def record(folder: Path, **options: Any) -> Path:
    """A run of three steps with two prompts of two samples of four tokens each, as its writers leave it; one more
    prompt is in quarantine."""
    args: Any = compose(CORE_SECTIONS)(run_dir=str(folder), rollout_batch_size=GROUPS, **options)
    write_facts(folder, args, command=["buffer-rl", "train", "--run-dir", "run 1", "--engine-api-key", "hidden"])
    add_facts(
        folder, start={"checks": 0.5, "trainer": 2.0}, end={"how": "done", "why": "", "at": "2026-01-02T03:04:05"}
    )
    ledger, metrics, dump = Ledger(folder / "ledger.sqlite", run="r"), MetricsFile(folder), SampleDump(folder)
    ledger.set_num_rows("data", 10)
    for step in range(STEPS):
        uids = [uid_of(step, group) for group in range(GROUPS)]
        for uid in uids:
            ledger.lease(uid, step)
            ledger.finish(uid, 1)
            samples = [sample_of(uid, number, version=step) for number in range(SAMPLES)]
            dump.write(step, [{"kind": "train", "data_set": "", **sample_record(sample)} for sample in samples])
        ledger.commit(uids, step, step + 1)
        metrics.write(metrics_of(), step)
        metrics.write({"eval/dev": 0.25 * step}, step)
        dump.write(
            step, [{"kind": "eval", "data_set": "dev", **sample_record(sample_of(uid_of(9, 0), 0, version=step))}]
        )
    ledger.lease(GroupUid("data", 9, 0), STEPS)
    ledger.quarantine(GroupUid("data", 9, 0), 1, "poison")
    (folder / "quarantine.jsonl").write_text('{"uid": "data:9:0", "reason": "poison"}\n')
    for part in (ledger, metrics, dump):
        part.close()
    return folder


def sample_of(uid: GroupUid, number: int, *, version: int) -> Sample:
    return Sample(
        uid=uid,
        sample_index=number,
        prompt="cat=",
        response="tac",
        label="tac",
        reward=float(number),
        status=Status.COMPLETED,
        weight_versions=[VersionSpan(version, 0, LENGTH)],
    )


def metrics_of() -> dict[str, float]:
    rows = GROUPS * SAMPLES
    return {
        "rollout/num_groups": GROUPS,
        "rollout/raw_reward": 0.5,
        "rollout/data_failures": 1.0,
        "train/loss": 0.1,
        "train/train_rollout_logprob_abs_diff": 0.01,
        "train/divisor": rows * LENGTH,
        "train/loss_tokens": rows * LENGTH,
        "train/loss_samples": rows,
        "perf/step_time": 2.0,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return record(tmp_path / "run")


def lines_of(run: Path) -> dict[str, Check]:
    checks = checks_of(read_report(run, ledger=ledger_facts(run)))
    assert [check.name for check in checks] == NAMES
    return {check.name: check for check in checks}


def edit(run: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change each line of a file in place."""
    path = run / name
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def at(step: int, **values: Any) -> Callable[[dict[str, Any]], object]:
    """Values for the line of a step that has their metric, written ``train__loss``."""
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return lambda line: line["step"] == step and set(named) <= set(line) and line.update(named)


def of_sample(kind: str, rollout: int, **values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda line: (line["kind"], line["rollout_id"]) == (kind, rollout) and line.update(values)


def in_ledger(statement: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        database = sqlite3.connect(run / "ledger.sqlite")
        with database:
            database.execute(statement)
        database.close()

    return change


def in_metrics(step: int, **values: Any) -> Callable[[Path], None]:
    return lambda run: edit(run, "metrics.jsonl", at(step, **values))


def in_samples(kind: str, rollout: int, **values: Any) -> Callable[[Path], None]:
    return lambda run: edit(run, "samples.jsonl", of_sample(kind, rollout, **values))


def test_all_five_lines_of_a_sound_run_are_right(run: Path) -> None:
    lines = lines_of(run)
    assert {check.state for check in lines.values()} == {State.RIGHT}
    assert lines["prompts"].text == "6 prompts, each trained once, in 3 steps; 1 quarantined"
    assert lines["rewards"].text.startswith(
        "15 recorded rewards are finite; 3 failed attempts, 1 prompts in quarantine"
    )


@pytest.mark.parametrize(
    ("name", "fault", "found"),
    [
        ("prompts", in_ledger("DELETE FROM commits WHERE rollout_id = 1"), "step 1 was trained, and the ledger has no"),
        ("prompts", in_ledger("DELETE FROM groups WHERE row = 3"), "trained at it"),
        (
            "prompts",
            in_ledger("UPDATE groups SET state = 'leased', step = NULL WHERE row = 2"),
            "history ends with trained",
        ),
        ("prompts", in_ledger(AGAIN), "was trained 2 times"),
        (
            "prompts",
            in_ledger("UPDATE history SET from_state = 'quarantined' WHERE to_state = 'trained' AND rollout_id = 1"),
            "left quarantined for trained",
        ),
        (
            "prompts",
            in_metrics(2, rollout__num_groups=3.0),
            "step 2 trained on 3 prompts, and the ledger has committed 2",
        ),
        ("prompts", lambda run: (run / "ledger.sqlite").write_bytes(b"not a ledger" * 400), "ledger.sqlite"),
        ("tokens", in_metrics(1, train__train_rollout_logprob_abs_diff=0.3), "step 1: 0.3 nats per token"),
        ("tokens", in_metrics(1, train__train_rollout_logprob_abs_diff=None), "step 1: the difference"),
        ("weights", in_samples("train", 1, versions=[[0, 0, 4]]), "rollout 1, data:2:0, sample 0: tokens of version 0"),
        ("weights", in_samples("train", 1, versions=[[1, 0, 3], [1, 2, 4]]), "overlap, or have no tokens"),
        (
            "weights",
            in_samples("eval", 2, versions=[[1, 0, 4]]),
            "evaluation 2, data:18:0, sample 0: tokens of version 1",
        ),
        ("weights", in_samples("train", 1, versions=[["new", 0, 4]]), "its versions cannot be read"),
        ("weights", in_samples("train", 1, versions=7), "its versions cannot be read"),
        ("rewards", in_samples("train", 0, status="failed"), "status failed, and yet the reward"),
        ("rewards", in_samples("train", 0, reward="nan"), "the reward nan is no finite number"),
        ("rewards", in_samples("train", 0, reward={"score": 1.0, "won": "inf"}), "is no finite number"),
        ("rewards", in_metrics(2, rollout__raw_reward=None), "step 2: rollout/raw_reward is not finite"),
        ("scale", in_metrics(1, train__divisor=8.0), "step 1: train divided by 8, and the step has 16 tokens"),
        ("scale", in_metrics(1, train__divisor=4.0), "step 1: train divided by 4, and the step has 16 tokens"),
        ("scale", in_metrics(1, train__divisor=None), "step 1: train/divisor"),
    ],
)
def test_a_fault_in_the_files_turns_its_line_red_and_no_other(
    run: Path, name: str, fault: Callable[[Path], Any], found: str
) -> None:
    fault(run)
    lines = lines_of(run)
    assert {each for each in NAMES if lines[each].state is State.WRONG} == {name}
    assert any(found in line for line in lines[name].faults), lines[name].faults
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert page.count('<li class="wrong">') == 1
    assert page.count('<li class="right">') == 4


def test_what_an_earlier_run_in_the_folder_put_into_quarantine_is_no_fault_of_this_one(run: Path) -> None:
    """``quarantine.jsonl`` keeps its lines: a new ledger trains those prompts."""
    with (run / "quarantine.jsonl").open("a") as file:
        file.write('{"uid": "data:3:0", "reason": "poison"}\n')
    check = lines_of(run)["rewards"]
    assert check.state is State.RIGHT
    assert check.text.endswith("3 failed attempts, 1 prompts in quarantine, none of them counted")


def test_of_many_faults_the_first_are_named_and_all_are_counted(run: Path) -> None:
    edit(run, "samples.jsonl", lambda line: line.update(reward="inf"))
    check = lines_of(run)["rewards"]
    assert check.text == "15 faults, of which the first 5"
    assert len(check.faults) == 5


def test_more_staleness_than_the_schedule_allows_is_wrong(tmp_path: Path) -> None:
    """Up to 2 here: ticket 2 may have tokens of versions 0 to 3, the newest that is published."""
    run = record(tmp_path / "run", schedule="async", use_tis=True)
    edit(run, "metrics.jsonl", lambda line: line["kind"] == "train" and line.update({"staleness/max": 2.0}))
    edit(run, "samples.jsonl", of_sample("train", 2, versions=[[0, 0, 2], [3, 2, 4]]))
    assert lines_of(run)["weights"].state is State.RIGHT
    assert "staleness 2 at most, 2 allowed" in lines_of(run)["weights"].text
    edit(run, "samples.jsonl", of_sample("train", 2, versions=[[4, 0, 4]]))
    assert "tokens of version 4, where only versions 0 to 3 can be" in lines_of(run)["weights"].faults[0]
    edit(run, "samples.jsonl", of_sample("train", 2, versions=[[2, 0, 4]]))
    edit(run, "metrics.jsonl", lambda line: line["step"] == 1 and line.update({"staleness/max": 3.0}))
    assert list(lines_of(run)["weights"].faults) == ["step 1: tokens are 3 versions old, at most 2 is allowed"]


@pytest.mark.parametrize(
    ("options", "divisor", "state"),
    [
        ({"loss_agg_mode": "seq-mean-token-mean"}, 4.0, State.RIGHT),
        ({"loss_agg_mode": "seq-mean-token-mean"}, 16.0, State.WRONG),
        ({"loss_type": "gspo"}, 4.0, State.RIGHT),
        ({"loss_type": "gspo"}, 16.0, State.WRONG),
        ({"loss_type": "dpo"}, 2.0, State.UNKNOWN),
        ({"custom_loss_function_path": "mine:loss"}, 3.0, State.UNKNOWN),
        ({"custom_loss_function_path": "mine:loss"}, 16.0, State.RIGHT),
    ],
)
def test_what_the_divisor_must_be_depends_on_loss_and_aggregation(
    tmp_path: Path, options: dict[str, Any], divisor: float, state: State
) -> None:
    run = record(tmp_path / "run", **options)
    edit(run, "metrics.jsonl", lambda line: line["kind"] == "train" and line.update({"train/divisor": divisor}))
    assert lines_of(run)["scale"].state is state


def test_what_a_run_did_not_record_is_unknown_with_its_reason(run: Path) -> None:
    for name in ("ledger.sqlite", "run.json", "samples.jsonl"):
        (run / name).unlink()
    edit(
        run, "metrics.jsonl", lambda line: [line.pop(name) for name in list(line) if "divisor" in name or "raw" in name]
    )
    lines = lines_of(run)
    assert {check.state for check in lines.values()} == {State.UNKNOWN}
    assert lines["prompts"].text == "the folder has no ledger.sqlite"
    assert "did not note its limit" in lines["tokens"].text
    assert "did not note its divisors" in lines["scale"].text


def test_supervised_rows_are_neither_sampled_nor_scored(tmp_path: Path) -> None:
    run = record(tmp_path / "run", loss_type="sft_loss", rollout_function_path="sft")
    lines = lines_of(run)
    assert [lines[name].state for name in ("tokens", "rewards", "scale")] == [
        State.UNKNOWN, State.UNKNOWN, State.RIGHT,
    ]  # fmt: skip


def test_tokens_that_no_model_sampled_are_in_no_span_of_a_version(run: Path) -> None:
    """As the observations between two turns of an agent."""
    edit(run, "samples.jsonl", of_sample("train", 1, versions=[[1, 0, 2], [1, 3, 4]]))
    assert lines_of(run)["weights"].state is State.RIGHT


def test_a_masked_failure_with_a_reward_is_no_fault(run: Path) -> None:
    """As of an agent that gave up: its sample is not trained on."""
    edit(run, "samples.jsonl", of_sample("train", 0, status="failed", masked=True))
    assert lines_of(run)["rewards"].state is State.RIGHT


def test_the_head_says_what_the_run_was_and_how_it_ended(run: Path) -> None:
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    for name, text in (
        ("algorithm", "grpo, loss policy_loss"),
        ("batch", "2 prompts × 8 samples"),
        ("start-up", "checks 0.5 s · trainer 2.0 s"),
        ("ended", "done, 2026-01-02 03:04:05 UTC"),
        ("time in steps", "0:06"),
    ):
        assert f"<dt>{name}</dt><dd>{text}</dd>" in page
    assert "buffer-rl train --run-dir &#39;run 1&#39; --engine-api-key &#39;***&#39;" in page
    assert "hidden --" not in page
    assert "?</span> " not in page


def in_facts(**values: Any) -> Callable[[Path], None]:
    return lambda run: add_facts(run, **values)


@pytest.mark.parametrize(
    "fault",
    [
        lambda run: edit(run, "metrics.jsonl", lambda line: line.pop("step")),
        lambda run: edit(run, "metrics.jsonl", lambda line: line.update(step=None)),
        in_metrics(1, train__train_rollout_logprob_abs_diff="much"),
        in_samples("train", 1, rollout_id="x"),
        in_facts(start={"checks": "soon"}),
    ],
    ids=["no step", "step null", "text for a number", "rollout x", "text in start"],
)
def test_a_line_of_another_form_is_an_error_that_names_the_folder_and_no_failure_of_a_run_that_is_done(
    run: Path, capsys: pytest.CaptureFixture[str], fault: Callable[[Path], Any]
) -> None:
    fault(run)
    for folders in ([str(run)], [str(run), str(record(run.parent / "other"))]):
        assert main(["report", *folders, "--output", str(run / "page.html")]) == 2
        shown = capsys.readouterr().err
        assert f"{', '.join(folders)}: the report could not be made" in shown
        assert "metrics.jsonl, samples.jsonl and run.json as a run writes them" in shown
        assert "Traceback" not in shown
    report_run(run)
    assert "notice: the run has ended, and its report could not be made: " in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_not_blamed_on_what_the_run_wrote(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "learning_curve.png").mkdir()
    report_run(run)
    shown = capsys.readouterr().err
    assert "its report could not be made" in shown
    assert str(run / "learning_curve.png") in shown
    assert "metrics.jsonl" not in shown
    assert "Traceback" not in shown


def test_several_runs_are_compared_on_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = record(tmp_path / "a" / "run", lr=0.5), record(tmp_path / "b" / "run", lr=0.25)
    edit(second, "metrics.jsonl", lambda line: line["kind"] == "eval" and line.update({"eval/dev": 0.75}))
    edit(second, "metrics.jsonl", at(1, train__divisor=3.0))
    target = tmp_path / "both.html"
    assert main(["report", str(first), str(second), "--output", str(target), "--title", "A & B"]) == 0
    assert capsys.readouterr().out.strip() == str(target)
    page = target.read_text()
    assert "<h1>A &amp; B</h1>" in page
    assert '<span class="key c0"></span>a/run' in page
    assert '<span class="key c1"></span>b/run' in page
    options = page[page.index("Options that differ: 1") : page.index("Curves over training steps")]
    assert (
        '<code>--lr</code></td><td class="of-run"><code>0.5</code></td><td class="of-run"><code>0.25</code>' in options
    )
    assert "<strong>0.500</strong> at step 2" in page
    assert "<strong>0.750</strong> at step 2" in page
    wrong = page[page.index('<ul class="checks wrong">') :]
    assert "<strong>b/run, scale</strong>: 1 fault" in wrong
    assert "<li>step 1: train divided by 3, and the step has 16 tokens</li>" in wrong
    assert "Evaluation: dev" in page


def test_a_folder_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "no"), str(tmp_path)]) == 2
    assert "there is no folder" in capsys.readouterr().err
