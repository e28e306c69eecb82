from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
from typing import Any

import pytest

from buffer_rl.errors import ConfigError, DataError, PluginError
from buffer_rl.records.groups import Status
from buffer_rl.rollout.failures import FailureKind
from buffer_rl.rollout.reward_pool import MAX_LOST_PER_CALL
from buffer_rl.rollout.reward_process import DONE, changed_metadata
from harness.processes import holds_within

TIMEOUT_S = 2.0
HANG_IF_SLOWER_S = 60.0  # a deadline that was ignored, not one that was missed


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def score_labels(kit: Any, labels: list[Any], function: str, **options: Any) -> tuple[Any, list[Any]]:
    group = kit.make_group(6, labels=labels)
    options = {"custom_rm_path": kit.user(function), "rm_timeout_s": TIMEOUT_S, **options}
    async with kit.opened(**options) as context, asyncio.timeout(HANG_IF_SLOWER_S):
        failures = await context.scorer.score(group.samples)
    return group, failures


async def test_a_synchronous_reward_runs_in_another_process_and_keeps_the_order(kit: Any) -> None:
    group, failures = await score_labels(kit, ["3", "1", "2"], "told_by_label")
    assert ([s.reward for s in group], failures) == ([3.0, 1.0, 2.0], [])
    group, _ = await score_labels(kit, ["x"] * 3, "process_id")
    pids = {sample.reward for sample in group}
    assert len(pids) == 1
    assert os.getpid() not in pids


async def test_what_a_synchronous_reward_writes_into_the_metadata_comes_back_with_the_number(
    kit: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    group = kit.make_group(6, labels=["3", "4"])
    for sample in group:
        sample.metadata |= {"seen": {"times": 1}, "scratch": [1], "kept": (1, 2), "tests": b"\x00" * 1000}
    async with kit.opened(custom_rm_path=kit.user("notes")) as context:
        assert await context.scorer.score(group.samples) == []
    assert [sample.metadata["parts"] for sample in group] == [{"format": 1.0, "steps": [n, None]} for n in (3, 4)]
    assert [sample.metadata["seen"] for sample in group] == [{"times": 2}] * 2
    assert all("scratch" not in sample.metadata and sample.metadata["kept"] == (1, 2) for sample in group)
    assert group[0].metadata["tests"] == b"\x00" * 1000  # not JSON, and not changed
    said = capfd.readouterr().err
    assert said.count("sets sample.metadata['object'] to a value of type object, which JSON cannot hold") == 1
    assert "'tests'" not in said


async def test_a_group_reward_writes_into_the_metadata_of_each_sample(kit: Any) -> None:
    group = kit.make_group(6, labels=["x"] * 3)
    async with kit.opened(custom_group_rm_path=kit.user("notes_of_group")) as context:
        assert await context.scorer.score(group.samples) == []
    assert [sample.metadata["rank"] for sample in group] == [0, 1, 2]


def test_only_changed_metadata_travel() -> None:
    large = {"cases": ["x" * 1000] * 100, "flag": False}
    assert changed_metadata(pickle.dumps(large), large) == {}
    changed = changed_metadata(pickle.dumps(large), {**large, "flag": True})
    assert changed == {"set": {"flag": True}, "removed": [], "not_json": {}}
    assert changed_metadata(pickle.dumps({}), None) == {"not_json": {"metadata": "NoneType"}}


@pytest.mark.parametrize(
    ("behaviour", "kind", "message"),
    [
        ("raise", FailureKind.EXCEPTION, "KeyError: 'no such answer'"),
        ("exit", FailureKind.EXCEPTION, "SystemExit: 3"),
        pytest.param("interrupt", FailureKind.EXCEPTION, "KeyboardInterrupt", marks=pytest.mark.slow),
        ("nan", FailureKind.INVALID, r"nan \(float\), not finite"),
        pytest.param("inf", FailureKind.INVALID, r"inf \(float\), not finite", marks=pytest.mark.slow),
        ("none", FailureKind.INVALID, r"is None(.|\n)*hint: a reward function without a return statement"),
        pytest.param(
            "list", FailureKind.INVALID, r"\[1.0\](.|\n)*hint: .* --custom-group-rm-path", marks=pytest.mark.slow
        ),
        pytest.param("text", FailureKind.INVALID, "'1.0'", marks=pytest.mark.slow),
        ("hang", FailureKind.TIMEOUT, "--rm-timeout-s 2"),
        ("die", FailureKind.CRASH, "exit status 7"),
        pytest.param("segfault", FailureKind.CRASH, "SIGSEGV", marks=pytest.mark.slow),
    ],
)
async def test_a_bad_reward_is_a_named_failure_of_its_sample_alone(
    kit: Any, behaviour: str, kind: FailureKind, message: str
) -> None:
    group, failures = await score_labels(kit, ["1", behaviour, "2"], "told_by_label")
    assert [s.reward for s in group] == [1.0, None, 2.0]
    assert [s.status for s in group] == [Status.PENDING, Status.FAILED, Status.PENDING]
    (failure,) = failures
    assert failure.reward is kind
    with pytest.raises(type(failure.error), match=message) as caught:
        raise failure.error
    assert "told_by_label" in str(caught.value)
    assert "row source:6:0/1.0" in str(caught.value)


async def test_an_exception_shows_the_users_traceback(kit: Any) -> None:
    _, (failure,) = await score_labels(kit, ["raise"], "told_by_label")
    assert 'raise KeyError("no such answer")' in failure.error.what
    assert "reward_process.py" not in failure.error.what


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [pytest.param("hang", FailureKind.TIMEOUT, marks=pytest.mark.slow), ("die", FailureKind.CRASH)],
)
async def test_after_two_lost_processes_the_rest_of_a_group_is_given_up(
    kit: Any, behaviour: str, kind: FailureKind
) -> None:
    labels = [behaviour, behaviour, "1", behaviour]
    group, failures = await score_labels(kit, labels, "told_by_label", rm_timeout_s=1.0)
    assert MAX_LOST_PER_CALL == 2
    assert [failure.reward for failure in failures] == [kind] * 4
    assert "not run" in failures[2].error.what
    assert all(sample.reward is None for sample in group)


async def test_a_process_that_died_between_two_groups_costs_the_next_one_nothing(kit: Any) -> None:
    async with kit.opened(custom_rm_path=kit.user("process_id")) as context:
        groups = [kit.make_group(row, labels=["x"] * 2) for row in range(2)]
        await context.scorer.score(groups[0].samples)
        (first,) = kit.pids(context)
        (process,) = context.scorer.pool.live
        os.kill(first, signal.SIGKILL)
        assert await asyncio.to_thread(holds_within, HANG_IF_SLOWER_S, lambda: not process.runs())
        assert await context.scorer.score(groups[1].samples) == []
        assert {sample.reward for sample in groups[1]} == set(kit.pids(context)) != {first}


@pytest.mark.slow
async def test_what_a_reward_prints_is_not_lost_when_its_process_is_killed(
    kit: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    await score_labels(kit, ["a7"], "prints_and_hangs", rm_timeout_s=2.0)
    assert "about to score a7" in capfd.readouterr().out


async def test_an_asynchronous_reward_has_the_same_failures(kit: Any) -> None:
    labels = ["4", "hang", "raise", "exit", "none"]
    group, failures = await score_labels(kit, labels, "slow_async", rm_timeout_s=1.0)
    assert [s.reward for s in group] == [4.0, None, None, None, None]
    raised = [FailureKind.EXCEPTION] * 2
    assert [f.reward for f in failures] == [FailureKind.TIMEOUT, *raised, FailureKind.INVALID]


async def test_a_reward_that_is_marked_is_called_where_the_samples_are_and_its_failures_stay_its_own(kit: Any) -> None:
    labels = ["pid", "raise", "exit", "interrupt", "nan", "4"]
    group, failures = await score_labels(kit, labels, "told_at_once")
    assert [s.reward for s in group] == [float(os.getpid()), None, None, None, None, 4.0]
    assert [f.reward for f in failures] == [FailureKind.EXCEPTION] * 3 + [FailureKind.INVALID]


@pytest.mark.parametrize(
    ("function", "reward"),
    [("callable_object", 2.0), ("answers_with_a_coroutine", 1.0), ("numpy_scalar", 0.25)],
)
async def test_every_form_of_function_and_number_is_accepted(kit: Any, function: str, reward: float) -> None:
    group, failures = await score_labels(kit, ["1"], function)
    assert ([s.reward for s in group], failures) == ([reward], [])


async def test_a_mapping_needs_a_reward_key(kit: Any) -> None:
    group, failures = await score_labels(kit, ["1"], "as_mapping", reward_key="score")
    assert (group[0].reward, failures) == ({"score": 0.0, "other": 0.0}, [])
    _, (failure,) = await score_labels(kit, ["1"], "as_mapping")
    assert "--reward-key" in failure.error.what
    assert "source:" not in failure.error.what  # the row is named once, in where


async def test_a_reward_that_the_generate_function_set_is_kept_and_checked(kit: Any) -> None:
    group = kit.make_group(0)
    group[0].reward, group[1].reward = 0.75, float("nan")
    async with kit.opened() as context:
        (failure,) = await context.scorer.score(group.samples)
    assert group[0].reward == 0.75
    assert (failure.reward, group[1].reward) == (FailureKind.INVALID, None)


async def test_with_a_teacher_what_nothing_scores_has_the_reward_0(kit: Any) -> None:
    group = kit.make_group(0)
    group[0].reward = 0.75
    async with kit.opened(use_opd=True) as context:
        assert await context.scorer.score(group.samples) == []
    assert [sample.reward for sample in group][:2] == [0.75, 0.0]


async def test_without_a_reward_function_there_is_one_clear_error(kit: Any) -> None:
    async with kit.opened() as context:
        with pytest.raises(ConfigError, match="--custom-rm-path"):
            await context.scorer.score(kit.make_group(0).samples)


def choosing(kit: Any, name: str) -> Any:
    """A group whose rows choose the reward ``name``."""
    group = kit.make_group(0)
    for sample in group:
        sample.metadata["rm_type"], sample.response, sample.status = name, "1", Status.COMPLETED
    return group


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("numeric", {}, DataError, "--row-rm-types numeric"),
        ("numeric", {"row_rm_types": ["f1", "gpqa"]}, DataError, "'exact_match' or 'f1' or 'gpqa'"),
        ("reasoning_gym", {}, DataError, "does not let rows choose"),
        ("reasoning_gym", {"row_rm_types": ["reasoning_gym"]}, ConfigError, "@rows_may_choose"),
        ("reasoning_gym_partial", {"row_rm_types": ["reasoning_gym_partial"]}, ConfigError, "not marked as safe"),
        ("numerik", {"row_rm_types": ["numerik"]}, PluginError, "numeric"),
        ("PATH", {}, DataError, "does not let rows choose"),
        ("PATH", {"row_rm_types": ["PATH"]}, PluginError, "never a path to code"),
    ],
)
async def test_a_row_chooses_only_what_the_run_lists_and_its_author_marked(
    kit: Any, name: str, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    name = kit.user("told_by_label") if name == "PATH" else name
    if options.get("row_rm_types") == ["PATH"]:
        options = {"row_rm_types": [name]}
    group = choosing(kit, name)
    async with kit.opened(rm_type="exact_match", **options) as context:
        with pytest.raises(error, match=words) as caught:
            await context.scorer.score(group.samples)
    if error is DataError:
        assert "row source:0:0/0.0" in str(caught.value)
    assert [sample.reward for sample in group] == [None, None]


@pytest.mark.slow
async def test_what_the_user_chose_is_not_the_rows_choice(kit: Any) -> None:
    async with kit.opened(rm_type=kit.user("told_by_label"), row_rm_types=["f1"]) as context:
        for name in (kit.user("told_by_label"), "f1", ""):  # the run's own, a listed and marked one, none
            group = choosing(kit, name)
            assert await context.scorer.score(group.samples) == []
            assert [sample.reward for sample in group] == [1.0, 1.0]
    async with kit.opened(custom_rm_path=kit.user("told_by_label")) as context:
        group = choosing(kit, "remote")
        assert await context.scorer.score(group.samples) == []  # which scores every row


@pytest.mark.slow
async def test_an_evaluation_set_may_name_any_registered_reward_for_its_own_rows(kit: Any) -> None:
    metadata = {"source_dataset": "chain_sum"}
    async with kit.opened(rm_type="exact_match") as context:
        group = choosing(kit, "reasoning_gym")
        for sample in group:
            sample.metadata |= metadata
        assert await context.scorer.score(group.samples, of_set="reasoning_gym") == []
        assert [sample.reward for sample in group] == [1.0, 1.0]
        for of_set in ("", "reasoning_gym_partial"):
            fresh = choosing(kit, "reasoning_gym")
            with pytest.raises(DataError):
                await context.scorer.score(fresh.samples, of_set=of_set)


@pytest.mark.slow
async def test_a_blocking_reward_leaves_the_event_loop_free(kit: Any) -> None:
    beats = 0

    async def heartbeat() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0.01)
            beats += 1

    async with kit.opened(custom_rm_path=kit.user("block_for_label")) as context:
        await context.scorer.score(kit.make_group(0, labels=["0"]).samples)  # starts the process
        beating = asyncio.create_task(heartbeat())
        await context.scorer.score(kit.make_group(1, labels=["1.5"]).samples)
        beating.cancel()
    assert beats >= 5


async def test_groups_are_scored_by_as_many_processes_as_allowed(kit: Any) -> None:
    groups = [kit.make_group(row, labels=["x"]) for row in range(6)]
    async with kit.opened(custom_rm_path=kit.user("process_id"), rm_workers=2) as context:
        await asyncio.gather(*(context.scorer.score(group.samples) for group in groups))
        assert {int(group[0].reward) for group in groups} == set(kit.pids(context))
        assert len(kit.pids(context)) <= 2


@pytest.mark.slow
async def test_the_deadline_is_of_each_sample_not_of_the_group(kit: Any) -> None:
    labels = ["0.4", "0.4", "0.4", "3600", "0.4"]
    group, (failure,) = await score_labels(kit, labels, "block_for_label", rm_timeout_s=1.2)
    assert [sample.reward for sample in group] == [1.0, 1.0, 1.0, None, 1.0]
    assert failure.reward is FailureKind.TIMEOUT
    assert "row source:6:0/3.0" in str(failure.error)


async def test_a_group_wakes_the_event_loop_once(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[bytes] = []
    feed = asyncio.StreamReader.feed_data
    monkeypatch.setattr(
        asyncio.StreamReader, "feed_data", lambda stream, data: (received.append(data), feed(stream, data))
    )
    async with kit.opened(custom_rm_path=kit.user("length")) as context:
        await context.scorer.score(kit.make_group(0).samples)  # starts the process
        group = kit.make_group(1, labels=["x"] * 200)
        for sample in group:
            sample.response_length = sample.sample_index
        received.clear()
        assert await context.scorer.score(group.samples) == []
    assert [sample.reward for sample in group] == list(range(200))
    assert received == [DONE]


async def test_samples_of_a_slow_reward_are_shared_out_over_the_processes(kit: Any) -> None:
    async with kit.opened(custom_rm_path=kit.user("process_id_after_50_ms"), rm_workers=2) as context:
        split = []
        for row in range(2):
            group = kit.make_group(row, labels=["x"] * 8)
            assert await context.scorer.score(group.samples) == []
            split.append([sample.reward for sample in group])
    first, second = split
    assert len(set(first)) == 1  # how long it takes is not known yet
    assert len(set(second)) == 2
    assert len(set(second[:4])) == len(set(second[4:])) == 1


@pytest.mark.slow
async def test_parts_of_a_group_give_up_together(kit: Any) -> None:
    async with kit.opened(custom_rm_path=kit.user("block_for_label"), rm_workers=2, rm_timeout_s=1.5) as context:
        await context.scorer.score(kit.make_group(0, labels=["0.2"]).samples)
        group = kit.make_group(1, labels=["3600", "0.1", "0.1", "3600", "0.1", "0.1"])
        failures = await context.scorer.score(group.samples)
    assert {failure.reward for failure in failures} == {FailureKind.TIMEOUT}
    assert sum("not run" in failure.error.what for failure in failures) == 2  # the rest of the part that lost last
    assert sorted(str(sample.reward) for sample in group) == ["1.0"] * 2 + ["None"] * 4


async def test_closing_ends_the_processes_even_while_one_hangs(kit: Any) -> None:
    async with kit.opened(custom_rm_path=kit.user("told_by_label"), rm_timeout_s=60) as context:
        await context.scorer.score(kit.make_group(0, labels=["1"]).samples)
        (pid,) = kit.pids(context)
        hanging = asyncio.create_task(context.scorer.score(kit.make_group(1, labels=["hang"]).samples))
        await asyncio.sleep(0)
        hanging.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await hanging
        group = kit.make_group(2, labels=["2"])
        await context.scorer.score(group.samples)  # a fresh process: an old answer must not reach this sample
        assert group[0].reward == 2.0
        (fresh,) = kit.pids(context)
        assert fresh != pid
    assert not alive(fresh)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a daemon has descended from")
async def test_a_daemon_of_a_reward_ends_with_the_reward_process(kit: Any, tmp_path: Any) -> None:
    files = [tmp_path / "of_one_that_ends", tmp_path / "of_one_that_hangs"]
    async with kit.opened(custom_rm_path=kit.user("starts_a_daemon"), rm_timeout_s=TIMEOUT_S) as context:
        group = kit.make_group(6, labels=[str(file) for file in files])
        (failure,) = await context.scorer.score(group.samples)
        first, second = (int(file.read_text()) for file in files)
        assert (failure.reward, group[0].reward) == (FailureKind.TIMEOUT, first)
        assert holds_within(5.0, lambda: not alive(first) and not alive(second))
        group = kit.make_group(7, labels=[str(files[0])])
        assert await context.scorer.score(group.samples) == []
        assert alive(int(group[0].reward))  # while the process that started it works
    assert holds_within(5.0, lambda: not alive(int(group[0].reward)))


async def test_a_module_that_breaks_on_import_is_no_samples_fault(kit: Any, tmp_path: Any) -> None:
    (tmp_path / "bad_reward.py").write_text("import no_such_module_anywhere\ndef score(args, sample): return 0.0\n")
    async with kit.opened(custom_rm_path=f"{tmp_path / 'bad_reward.py'}:score") as context:
        with pytest.raises(PluginError, match="no_such_module_anywhere"):
            await context.scorer.score(kit.make_group(0).samples)


@pytest.mark.parametrize("function", ["rank_in_group", "rank_in_group_later"])
async def test_a_group_reward_scores_all_samples_together(kit: Any, function: str) -> None:
    options = {"custom_rm_path": None, "custom_group_rm_path": kit.user(function)}
    group, failures = await score_labels(kit, ["b", "c", "a"], "told_by_label", **options)
    assert ([sample.reward for sample in group], failures) == ([1.0, 2.0, 0.0], [])


@pytest.mark.parametrize(
    ("behaviour", "kind", "message"),
    [
        ("raise", FailureKind.EXCEPTION, "no such answer"),
        pytest.param("hang", FailureKind.TIMEOUT, "--rm-timeout-s 2", marks=pytest.mark.slow),
        ("nan", FailureKind.INVALID, "not finite"),
        ("short", FailureKind.INVALID, "a list of 3 numbers"),
        ("drop", FailureKind.INVALID, "a list of 3 numbers"),
        ("drop later", FailureKind.INVALID, "a list of 3 numbers"),
    ],
)
async def test_a_bad_group_reward_fails_the_whole_group_by_name(
    kit: Any, behaviour: str, kind: FailureKind, message: str
) -> None:
    function = "rank_in_group_later" if "later" in behaviour else "rank_in_group"
    options = {"custom_rm_path": None, "custom_group_rm_path": kit.user(function)}
    group, (failure,) = await score_labels(kit, [behaviour, "c", "a"], "told_by_label", **options)
    assert [(sample.reward, sample.status) for sample in group] == [(None, Status.FAILED)] * 3
    assert failure.reward is kind
    assert message in str(failure.error)
    assert "group source:6:0" in failure.error.where


async def test_text_that_utf_8_cannot_encode_costs_no_reward_process(kit: Any) -> None:
    _, (failure,) = await score_labels(kit, ["1"], "raises_a_lone_surrogate")
    assert failure.reward is FailureKind.EXCEPTION
    assert "bad text \ud800 in 1" in failure.error.what
    group, failures = await score_labels(kit, ["1", "2"], "rewards_with_a_lone_surrogate", reward_key="score")
    assert failures == []
    assert [sample.reward for sample in group] == [{"score": 1.0, "why": "\ud800"}] * 2
