"""``buffer-rl rescore``: which samples it finds, which options it has, and what it compares."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.cli import main
from buffer_rl.data.source import PromptDataSource
from buffer_rl.options.section import compose
from buffer_rl.records.groups import GroupUid
from buffer_rl.verbs.rescore.rescoring import compared, rank_correlation

REWARDS = """
def longer(args, sample):
    return float(len(sample.response) + sample.metadata["bonus"])


def named(args, sample):
    return {"length": len(sample.response), "other": "text"}


def two(args, sample):
    return {"length": len(sample.response), "minus": -len(sample.response)}


def group(args, group):
    return [float(place) for place, _ in enumerate(group)]


async def later(args, sample):
    return 1.0 if sample.label == "0" else 0.0


def broken(args, sample):
    if sample.label == "1":
        raise SystemExit("out")
    return float(len(sample.response))


def keep_first(args, group):
    if group[0].label == "0":
        raise KeyboardInterrupt
    return group[0].label != "1"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two rollouts of two groups of two samples; samples.jsonl has both of the first and one of the second."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"p{row}", "label": str(row), "metadata": {"bonus": row}} for row in range(4)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("rewards.py").write_text(REWARDS)
    changed = {
        "--prompt-data": ["rows.jsonl"],
        "--label-key": "label",
        "--metadata-key": "metadata",
        "--n-samples-per-prompt": 2,
        "--custom-rm-path": "rewards.py:longer",
        "--engine-api-key": "***",
    }
    args: Any = compose(CORE_SECTIONS)(
        **{name.removeprefix("--").replace("-", "_"): value for name, value in changed.items() if value != "***"}
    )
    source = PromptDataSource(args).source_hashes[0]
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"started": "", "version": "0", "changed": changed}))
    uids = [GroupUid(source, row, 0) for row in range(4)]
    ledger = Ledger(run / "ledger.sqlite", run="r")
    lines = []
    for row, uid in enumerate(uids):
        attempt = ledger.lease(uid, row // 2)
        ledger.finish(uid, attempt)
        for index, response in enumerate(("a", "bcd")):
            line = {"rollout_id": row // 2, "kind": "train", "uid": str(uid), "sample_index": index}
            line |= {"prompt": f"p{row}", "response": response, "label": str(row), "status": "completed"}
            line |= {"reward": float(len(response) + row), "versions": [[row // 2, 0, len(response)]]}
            lines += [line] * (row != 3)
    for rollout in range(2):
        ledger.commit(uids[2 * rollout : 2 * rollout + 2], rollout, rollout + 1)
    ledger.close()
    (run / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.fixture
def rescored(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def rescored(*argv: str, status: int = 0) -> dict[str, Any]:
        assert main(["rescore", str(folder), *argv, "--json"]) == status
        facts = json.loads(capsys.readouterr().out)
        assert isinstance(facts, dict)
        return facts

    return rescored


def test_the_runs_own_reward_sees_texts_labels_and_metadata_and_gives_what_was_recorded(
    rescored: Callable[..., dict[str, Any]],
) -> None:
    everything = rescored()["all"]
    assert (everything["groups"], everything["of"], everything["rows"]) == (3, 4, 6)
    assert everything["old"] == everything["new"] == 3.0
    assert (everything["equal_rewards"], everything["equal_best"], everything["correlation"]) == (1, 1, 1)
    assert (everything["signs"], everything["dropped"], everything["failed"]) == (0, {}, {})


def test_steps_have_means_of_their_own_and_say_how_many_groups_are_recorded(
    rescored: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    first, second = rescored("--custom-group-rm-path", "rewards.py:group")["steps"]
    assert (first["groups"], first["of"], first["old"], first["new"]) == (2, 2, 2.5, 0.5)
    assert (second["groups"], second["of"], second["old"], second["new"]) == (1, 2, 4.0, 0.5)
    assert main(["rescore", str(folder)]) == 0
    assert "3 of 4 groups were scored" in capsys.readouterr().out


def test_another_reward_replaces_that_of_the_run_and_its_key(
    rescored: Callable[..., dict[str, Any]], folder: Path
) -> None:
    facts = rescored("--custom-rm-path", "rewards.py:named", "--reward-key", "length", "--output", "rows.jsonl")
    assert (facts["all"]["new"], facts["rows_written"]) == (2.0, 6)
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    assert [(row["old_reward"], row["new_reward"]) for row in rows[:2]] == [(1.0, 1.0), (3.0, 3.0)]
    assert rows[0]["reward"] == {"length": 1, "other": "text"}
    assert rows[0]["new_advantage"] == -rows[1]["new_advantage"] == pytest.approx(-(0.5**0.5), abs=1e-6)
    assert rescored("--custom-rm-path", "rewards.py:later")["all"]["new"] == pytest.approx(1 / 3)
    facts = rescored("--rm-type", "exact_match")
    assert (facts["reward"], facts["all"]["new"]) == ("--rm-type exact_match", 0.0)


def test_recorded_mappings_are_read_by_the_runs_own_key_and_new_ones_by_the_key_that_is_given(
    rescored: Callable[..., dict[str, Any]], folder: Path
) -> None:
    text = json.loads((folder / "run.json").read_text())
    text["changed"] |= {"--custom-rm-path": "rewards.py:two", "--reward-key": "length"}
    (folder / "run.json").write_text(json.dumps(text))
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for line in lines:
        line["reward"] = {"length": len(line["response"]), "minus": -len(line["response"])}
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for argv, new, signs in (
        ([], 2.0, 0),
        (["--reward-key", "minus"], -2.0, 6),
        (["--custom-rm-path", "rewards.py:two", "--reward-key", "minus"], -2.0, 6),
        (["--custom-rm-path", "rewards.py:longer"], 3.0, 0),
    ):
        everything = rescored(*argv)["all"]
        assert (everything["old"], everything["new"], everything["signs"]) == (2.0, new, signs)


def test_what_the_users_code_raises_is_counted_by_reason(rescored: Callable[..., dict[str, Any]], folder: Path) -> None:
    facts = rescored("--custom-rm-path", "rewards.py:broken")
    assert facts["all"]["failed"] == {"reward_failed:exception": 1}
    assert facts["all"]["groups"] == 2
    assert "SystemExit" in facts["errors"]["reward_failed:exception"]
    facts = rescored("--custom-rm-path", "rewards.py:named", status=1)  # a mapping without a key
    assert facts["all"]["failed"] == {"reward_failed:invalid": 3}
    text = json.loads((folder / "run.json").read_text())
    text["changed"]["--dynamic-sampling-filter-path"] = "rewards.py:keep_first"
    (folder / "run.json").write_text(json.dumps(text))
    facts = rescored()
    assert facts["all"]["dropped"] == {"filter_failed": 1, "filtered": 1}
    assert facts["all"]["groups"] == 3


def test_an_estimator_that_needs_what_is_not_recorded_has_no_advantages(
    rescored: Callable[..., dict[str, Any]], folder: Path
) -> None:
    text = json.loads((folder / "run.json").read_text())
    text["changed"]["--advantage-estimator"] = "gae"
    (folder / "run.json").write_text(json.dumps(text))
    facts = rescored()
    assert facts["all"]["signs"] is None
    assert "values" in facts["errors"]["no_advantages"]


def test_rows_that_are_not_in_the_data_any_more_are_scored_without_metadata(
    rescored: Callable[..., dict[str, Any]], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.jsonl").write_text(json.dumps({"prompt": "new", "label": "1", "metadata": {}}) + "\n")
    assert rescored("--custom-rm-path", "rewards.py:later")["all"]["new"] == pytest.approx(1 / 3)
    assert main(["rescore", str(folder), "--custom-rm-path", "rewards.py:later"]) == 0
    assert "their samples have no metadata" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "word"),
    [(["--rm-model", "folder"], "--rm-model"), (["--custom-rm-path", "rewards.py:none"], "none"), (["--rm-type"], "")],
)
def test_what_cannot_score_is_an_error(
    folder: Path, capsys: pytest.CaptureFixture[str], argv: list[str], word: str
) -> None:
    assert main(["rescore", str(folder), *argv]) == 2
    assert word in capsys.readouterr().err


def test_a_run_without_samples_says_how_they_are_recorded(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "samples.jsonl").unlink()
    assert main(["rescore", str(folder)]) == 2
    assert "--dump-samples" in capsys.readouterr().err


def test_the_rank_correlation_is_spearmans_with_mean_ranks_of_equal_values() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 40, 30]) == pytest.approx(0.8)
    assert rank_correlation([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(0.948683298)
    assert rank_correlation([1, 2], [5, 5]) is None


def test_nothing_compares_to_nothing() -> None:
    assert compared([])["old"] is compared([])["correlation"] is None
