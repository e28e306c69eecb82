"""The rollout function: the service's groups in the real Buffer, each once, also when a rollout is made again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.errors import ConfigError, DataError, DeadlineError
from buffer_rl.options.section import compose
from buffer_rl.plan.schedule import LOCKSTEP, Mode, Schedule
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import GroupUid, RolloutReport
from buffer_rl.rollout.context import RolloutContext
from buffer_rl.rollout.conversion import GroupConverter
from buffer_rl.rollout.user_rollout import run_user_rollout
from buffer_rl.testing.tiny import make_char_tokenizer
from buffer_rl_rollout_service import options as plugin
from buffer_rl_rollout_service.rollout import ServiceRollout, kept_from
from buffer_rl_rollout_service.server import Service
from buffer_rl_rollout_service.store import Rules, Store
from harness.asgi import serving_app
from harness.ledger_contents import entries
from harness.local_buffer import local_client, local_state
from harness.tickets import close_rollout, schedule_of

ASYNC = Schedule(mode=Mode.ASYNC, target=1, max_staleness=2)
TOKENS: dict[str, Any] = {"tokens": [5, 6, 7, 8], "response_length": 3}
TOKEN = "a-token-of-32-characters-or-more"
FIRST: dict[str, Any] = {"prompt_ids": [5, 6], "output_ids": [7, 1], "log_probs": [-0.5, -0.25]}
NEXT: dict[str, Any] = {
    "prompt_ids": [5, 6, 7, 1, 8],
    "output_ids": [9],
    "log_probs": [-1.0],
    "finish_reason": "length",
}
OTHER: dict[str, Any] = {"prompt_ids": [6], "output_ids": [4], "log_probs": [-2.0]}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"


class Bench:
    """A store behind HTTP, and the Buffer of a run of ``num_groups`` groups a step."""

    def __init__(
        self, folder: Path, url: str, store: Store, schedule: Schedule, num_groups: int, **options: Any
    ) -> None:
        data = folder / "train.jsonl"
        data.write_text(json.dumps({"prompt": "1", "label": "1"}) + "\n")
        self.args = compose([*CORE_SECTIONS, "buffer_rl_rollout_service.options:ServiceOptions"])(
            prompt_data=str(data),
            rollout_batch_size=num_groups,
            n_samples_per_prompt=2,
            rollout_timeout_s=60.0,
            rollout_service_url=url,
            rollout_service_token=TOKEN,
            rollout_function_path="rollout_service",
            schedule=schedule.mode,
            max_staleness=schedule.max_staleness,
            target_staleness=schedule.target,
            **options,
        )
        self.store = store
        self.state = local_state(self.args, Ledger.in_memory(), schedule=schedule)
        self.function = ServiceRollout(self.args)  # that of one worker
        self.metrics: dict[str, float] = {}

    def write(self, problem: str, *rewards: float, **changes: Any) -> None:
        for number, reward in enumerate(rewards):
            messages = [{"role": "user", "content": "ab="}, {"role": "assistant", "content": "ba"}]
            item = {"instance_id": problem, "uid": str(number), "reward": reward, "messages": messages, **changes}
            self.store.write(problem, str(number), reward, json.dumps(item).encode())

    async def roll(self, ticket: Any, function: ServiceRollout | None = None) -> dict[str, float]:
        """function: that of another worker."""
        buffer = local_client(self.state, ticket, GroupConverter(self.args))
        tokenizer = make_char_tokenizer()
        tokenizer.chat_template = TEMPLATE
        context = RolloutContext.build(self.args, registry=PluginRegistry(), engine=None, tokenizer=tokenizer)
        try:
            with context.active():
                output = await run_user_rollout(function or self.function, self.args, buffer, where="rollout")
        finally:
            await context.aclose()
        return output.metrics

    async def step(self, number: int, **versions: int) -> RolloutReport:
        """Ticket and step of this number, with groups of these problems and versions; then the publication."""
        for problem, version in versions.items():
            self.write(problem, 1.0, 0.0, weight_version=version)
        ticket = self.state.generate(number)
        self.metrics = await self.roll(ticket)
        report = close_rollout(self.state, ticket)
        self.state.commit(number, step=number + 1)
        self.state.release(number + 1)
        return report

    def counts(self) -> dict[str, int]:
        return {state: n for state, n in self.store.statistics()["trajectories"].items() if n}


@asynccontextmanager
async def bench(
    folder: Path, *, group_timeout_s: float = 600.0, schedule: Schedule = LOCKSTEP, num_groups: int = 2, **options: Any
) -> AsyncIterator[Bench]:
    store = Store(folder / "store", Rules(group_size=2, min_group_size=1, timeout_s=group_timeout_s))
    async with serving_app(Service(store, TOKEN, max_body_bytes=1 << 20).app()) as url:
        yield Bench(folder, url, store, schedule, num_groups, **options)


async def test_groups_become_rows_with_the_answers_unmasked(tmp_path: Path) -> None:
    async with bench(tmp_path) as run:
        turns = [("user", "ab="), ("assistant", "b"), ("user", "c="), ("assistant", "a")]
        messages = [{"role": role, "content": content} for role, content in turns]
        run.write("p", 1.0, 0.0, messages=messages, finish_reason="length", extra_info={"tool_calls": 3})
        tokens = {"messages": None, "tokens": [5, 6, 7, 8], "response_length": 3, "loss_mask": [1, 0, 1]}
        run.write("q", 2.0, 4.0, **tokens, rollout_log_probs=[-0.5, -1.0, -1.5])
        ticket = run.state.generate(0)
        metrics = await run.roll(ticket)
        report = close_rollout(run.state, ticket)
        batch = run.state.get_data(0)
        assert (report.num_groups, report.num_rows, report.drops) == (2, 4, {})
        assert [row.uid.row for row in batch.row_ids] == [1, 1, 2, 2]
        spoken = make_char_tokenizer().convert_tokens_to_ids([*"ab=b", "<eos>", *"c=a", "<eos>"])
        assert [list(t) for t in batch.columns["tokens"][1:3]] == [spoken, [5, 6, 7, 8]]
        assert [list(m) for m in batch.columns["loss_mask"][1:3]] == [[1, 1, 0, 0, 1, 1], [1, 0, 1]]
        assert list(batch.columns["raw_reward"]) == [1, 0, 2, 4]
        assert list(batch.columns["truncated"]) == [True, True, False, False]
        assert list(batch.columns["rollout_log_probs"][3]) == [-0.5, -1.0, -1.5]
        assert metrics["raw_reward"] == 1.75
        assert run.counts() == {"written": 4, "delivered": 4}


async def test_turns_become_rows_of_one_sample_with_the_ids_and_versions_that_were_sampled(tmp_path: Path) -> None:
    async with bench(tmp_path) as run:
        for problem in "pq":
            run.write(
                problem,
                1.0,
                0.0,
                messages=None,
                turns=[{**turn, "version": 0} for turn in (FIRST, OTHER, NEXT)],
            )
        ticket = run.state.generate(0)
        metrics = await run.roll(ticket)
        report = close_rollout(run.state, ticket)
        batch = run.state.get_data(0)
    assert (report.num_groups, report.num_rows, report.drops) == (2, 8, {})
    assert [(row.sample_index, row.part) for row in batch.row_ids[:4]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    columns = batch.columns
    assert [list(tokens) for tokens in columns["tokens"][:2]] == [[5, 6, 7, 1, 8, 9], [6, 4]]
    assert [list(mask) for mask in columns["loss_mask"][:2]] == [[1, 1, 0, 1], [1]]
    assert [list(each) for each in columns["rollout_log_probs"][:2]] == [[-0.5, -0.25, 0.0, -1.0], [-2.0]]
    assert list(columns["truncated"][:2]) == [True, True]  # rows have the status of their sample
    assert metrics["raw_reward"] == 0.5


async def test_turns_that_are_too_old_or_too_long_are_dropped(tmp_path: Path) -> None:
    async with bench(tmp_path, rollout_max_context_len=6) as run:
        longer = {**NEXT, "output_ids": [9, 9], "log_probs": [-1.0, -1.0]}
        run.write("long", 1.0, 0.0, messages=None, turns=[FIRST, longer])
        run.write("unknown", 1.0, 0.0, messages=None, turns=[FIRST, {**OTHER, "output_ids": [99999]}])
        for problem in "pq":
            run.write(problem, 1.0, 0.0, messages=None, turns=[FIRST])
        ticket = run.state.generate(0)
        metrics = await run.roll(ticket)
        assert close_rollout(run.state, ticket).num_groups == 2
    assert metrics["service_drop_unusable"] == 2


@pytest.mark.parametrize(("decode_json", "text"), [(True, '{"a": 1}'), (False, '"{\\"a\\": 1}"')])
async def test_arguments_of_tool_calls_of_openais_form_are_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decode_json: bool, text: str
) -> None:
    own = "{% for m in messages %}{{ m.content or m.tool_calls[0].function.arguments | tojson }}{% endfor %}"
    monkeypatch.setattr(f"{__name__}.TEMPLATE", own)
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    async with bench(tmp_path, decode_json=decode_json, loss_mask_type="qwen") as run:
        for problem in "pq":
            run.write(problem, 1.0, 0.0, messages=turns)
        ticket = run.state.generate(0)
        await run.roll(ticket)
        close_rollout(run.state, ticket)
        tokens = run.state.get_data(0).columns["tokens"][0]
    assert list(tokens) == make_char_tokenizer().encode(f"q{text}", add_special_tokens=False)


async def test_a_rollout_that_is_made_again_has_the_same_groups_and_none_is_trained_twice(tmp_path: Path) -> None:
    async with bench(tmp_path, save=str(tmp_path / "saves"), save_interval=1) as run:
        for number in range(6):
            run.write(f"p{number}", 1.0, 0.0)
        rows = []
        for attempt in range(2):  # the rows of the first are lost with the rollout worker
            ticket = run.state.generate(0)
            await run.roll(ticket)
            close_rollout(run.state, ticket)
            rows.append([row.uid.row for row in run.state.get_data(0).row_ids])
            if not attempt:
                run.state.abandon(0)
        assert rows == [[1, 1, 2, 2]] * 2
        run.state.commit(0, step=1)
        run.state.release(1)
        ticket = run.state.generate(1)
        await run.roll(ticket)
        close_rollout(run.state, ticket)
        assert [row.uid.row for row in run.state.get_data(1).row_ids] == [3, 3, 4, 4]
        assert run.counts() == {"written": 12, "ready": 4, "delivered": 8}


async def test_what_cannot_be_trained_on_or_is_filtered_is_dropped_with_its_reason(tmp_path: Path) -> None:
    async with bench(
        tmp_path, dynamic_sampling_filter_path="filter_hub.reward_deviation:nonzero", rollout_max_context_len=6
    ) as run:
        run.write("alike", 1.0, 1.0)
        run.write("long", 1.0, 0.0, messages=None, tokens=[3] * 7, response_length=2)
        run.write("p", 1.0, 0.0)
        run.write("partial", 1.0)
        run.write("q", 1.0, 0.0)
        ticket = run.state.generate(0)
        metrics = await run.roll(ticket)
        assert close_rollout(run.state, ticket).num_groups == 2
        assert metrics["service_drop_unusable"] == 1
        dropped = run.store.statistics()["dropped"]
        assert dropped.pop("unusable") == 2
        assert list(dropped.values()) == [2]  # by the filter
        assert run.counts() == {"written": 9, "open": 1, "delivered": 4, "dropped": 4}


@pytest.mark.slow
async def test_a_rollout_may_have_more_groups_than_one_read_gives(tmp_path: Path) -> None:
    async with bench(tmp_path, num_groups=1025) as run:
        for number in range(1025):
            run.write(f"p{number}", 1.0, 0.0)
        ticket = run.state.generate(0)
        await run.roll(ticket)
        assert close_rollout(run.state, ticket).num_groups == 1025
        assert run.counts() == {"written": 2050, "delivered": 2050}


@pytest.mark.slow
async def test_a_partial_group_is_trained_on_and_counted(tmp_path: Path) -> None:
    async with bench(tmp_path, group_timeout_s=1.0) as run:
        run.write("p", 1.0, 0.0)
        run.write("partial", 1.0)
        ticket = run.state.generate(0)
        metrics = await run.roll(ticket)
        assert metrics["service_partial"] == 1
        assert close_rollout(run.state, ticket).num_rows == 3


async def test_when_nothing_can_be_trained_on_the_run_ends_and_the_rest_stays(tmp_path: Path) -> None:
    async with bench(tmp_path, rollout_max_context_len=3) as run:
        for number in range(5):
            run.write(f"p{number}", 1.0, 0.0)
        with pytest.raises(DataError, match="6 tokens"):
            await run.roll(run.state.generate(0))
        assert run.counts() == {"written": 10, "ready": 2, "leased": 4, "dropped": 4}


async def test_a_rollout_without_enough_groups_ends_at_its_deadline_with_what_the_service_has(tmp_path: Path) -> None:
    async with bench(tmp_path) as run:
        object.__setattr__(run.args, "rollout_timeout_s", 1.0)
        run.write("p", 1.0, 0.0)
        with pytest.raises(DeadlineError, match=r"1 of 2 groups came within 1 s.* 0 open and 0 ready"):
            await run.roll(run.state.generate(0))


async def test_the_service_is_asked_before_a_run_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(tmp_path) as run:
        check = plugin.buffer_rl_configure
        await asyncio.to_thread(check, run.args)
        with pytest.raises(ConfigError, match="groups of 2 trajectories"):
            await asyncio.to_thread(check, run.args.model_copy(update={"n_samples_per_prompt": 8}))
        with pytest.raises(ConfigError, match="--rollout-service-url"):
            await asyncio.to_thread(check, run.args.model_copy(update={"rollout_service_url": None}))
        other = {"rollout_service_url": None, "rollout_function_path": "default"}
        await asyncio.to_thread(check, run.args.model_copy(update=other))


async def test_a_group_that_is_older_than_the_bound_is_replaced_and_counted(tmp_path: Path) -> None:
    async with bench(tmp_path, schedule=ASYNC) as run:
        for number in range(3):
            await run.step(number, **{f"{number}-{member}": number for member in "ab"})
        tokens = {"messages": None, **TOKENS}
        spans = [{"version": "0", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 3}]
        run.write("mixed", 1.0, 0.0, **tokens, weight_versions=spans)
        run.write("masked", 1.0, 0.0, **tokens, weight_versions=spans, loss_mask=[0, 1, 1])
        report = await run.step(3, late=0, just=1)
        assert (report.num_groups, report.staleness, report.drops) == (2, [1, 2], {"too_old": 2})
        assert run.metrics["service_drop_too_old"] == 2
        entries = [run.state.ledger.entry(GroupUid(f"service-{run.store.store_id}", n, 0)) for n in range(7, 11)]
        assert [(entry.state, entry.reason) for entry in entries] == [
            (GroupState.REJECTED, "too_old"),
            (GroupState.TRAINED, ""),
            (GroupState.REJECTED, "too_old"),
            (GroupState.TRAINED, ""),
        ]
        assert run.store.statistics()["dropped"] == {"too_old": 4}


async def test_a_dropped_group_that_comes_again_since_the_service_was_not_told_is_passed_over(tmp_path: Path) -> None:
    async with bench(tmp_path) as run:
        report = await run.step(0, new=1, one=0, two=0)
        assert report.drops == {"too_new": 1}
        run.store._db.execute("UPDATE groups SET state = 'ready', has_bodies = 1 WHERE number = 1")
        for member in range(2):
            body = json.dumps({"instance_id": "new", "uid": str(member), "reward": 1.0, "weight_version": 1} | TOKENS)
            run.store._db.execute("INSERT INTO bodies VALUES (?, 1, ?)", (member + 1, body.encode()))
        report = await run.step(1, three=1, four=1)
        assert (report.num_groups, report.drops) == (2, {})


async def test_weights_that_a_run_cannot_have_published_yet_are_not_trained_on(tmp_path: Path) -> None:
    """As of a run that went back to an earlier checkpoint, and will use the numbers for other weights."""
    for schedule, newest in ((ASYNC, 3), (LOCKSTEP, 0)):
        (folder := tmp_path / schedule.mode).mkdir()
        async with bench(folder, schedule=schedule) as run:
            report = await run.step(0, new=newest + 1, one=newest, two=0)
            assert (report.num_groups, report.drops) == (2, {"too_new": 1})


async def test_an_asynchronous_run_refuses_groups_without_versions_and_says_what_to_send(tmp_path: Path) -> None:
    for schedule in (ASYNC, schedule_of(1)):
        assert schedule is not None
        (folder := tmp_path / schedule.mode).mkdir()
        async with bench(folder, schedule=schedule) as run:
            run.write("p", 1.0, 0.0, weight_version=0)
            await asyncio.to_thread(plugin.buffer_rl_configure, run.args)
            run.write("q", 1.0, 0.0)
            with pytest.raises(
                ConfigError, match=r"(?s)'0' of problem 'q' does not say which weights.*weight_version, a whole"
            ):
                await run.roll(run.state.generate(0))
    async with bench(tmp_path, schedule=ASYNC) as run:
        run.write("p", 1.0, 0.0)
        with pytest.raises(ConfigError, match=r"(?s)--schedule async.*weight_versions"):
            await asyncio.to_thread(plugin.buffer_rl_configure, run.args)  # before the run has started


@pytest.mark.parametrize("is_new_process", [True, False])
async def test_if_production_starts_again_tickets_get_what_no_step_has_and_nothing_else(
    tmp_path: Path, is_new_process: bool
) -> None:
    async with bench(tmp_path, schedule=ASYNC) as run:
        for number in range(10):
            run.write(f"p{number}", 1.0, 0.0, weight_version=0)
        await run.step(0)
        assert run.counts()["delivered"] == 4
        for _ in range(2):
            for number in (1, 2):
                ticket = run.state.generate(number)
                await run.roll(ticket)
                run.state.end_ticket(ticket)
            assert run.counts()["delivered"] == 12
            run.state.abandon(1)
            if is_new_process:
                run.function = ServiceRollout(run.args)
        assert [(await run.step(number)).num_groups for number in (1, 2)] == [2, 2]
        found = sorted(entries(run.state.ledger).items())
        assert [(uid.row, entry.step) for uid, entry in found] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (6, 3)]
        assert run.counts() == {"written": 20, "ready": 8, "delivered": 12}


async def test_a_group_that_is_lost_is_read_again_for_a_later_ticket_than_its_own(tmp_path: Path) -> None:
    """Ticket 1, of another worker, is faster: step 0 takes its groups, and those of ticket 0 wait for step 1."""
    async with bench(tmp_path, schedule=ASYNC) as run:
        for number in range(5):
            run.write(f"p{number}", 1.0, 0.0, weight_version=0)
        tickets = [run.state.generate(number) for number in range(2)]
        for ticket in reversed(tickets):
            await run.roll(ticket, ServiceRollout(run.args))
            run.state.end_ticket(ticket)
        run.state.close_selection(0)
        run.state.commit(0, step=1)
        run.state.release(1)
        run.state.abandon(1)
        assert (await run.step(1)).num_groups == 2
        found = sorted(entries(run.state.ledger).items())
        assert [(uid.row, entry.step) for uid, entry in found] == [(1, 1), (2, 1), (3, 2), (4, 2)]


async def test_two_workers_with_a_ticket_each_share_the_groups(tmp_path: Path) -> None:
    async with bench(tmp_path, schedule=ASYNC) as run:
        for number in range(4):
            run.write(f"p{number}", 1.0, 0.0, weight_version=0)
        tickets = [run.state.generate(number) for number in range(2)]
        await asyncio.gather(*[run.roll(ticket, ServiceRollout(run.args)) for ticket in tickets])
        assert [run.state.end_ticket(ticket).num_groups for ticket in tickets] == [2, 2]
        assert run.counts() == {"written": 8, "delivered": 8}


def test_an_asynchronous_run_may_ask_again_for_groups_of_m_earlier_tickets() -> None:
    args = compose(CORE_SECTIONS)(save="saves", save_interval=3, schedule="async", max_staleness=2)
    assert [kept_from(args, number) for number in (3, 6, 9)] == [0, 1, 4]


@pytest.mark.parametrize(
    ("interval", "rollout_id", "first"),
    [(None, 7, 7), (1, 0, 0), (1, 5, 4), (3, 5, 0), (3, 6, 3), (3, 8, 3), (3, 9, 6)],
)
def test_the_service_keeps_what_the_last_two_checkpoints_lack(
    interval: int | None, rollout_id: int, first: int
) -> None:
    args = compose(CORE_SECTIONS)(save="saves", save_interval=interval)
    assert kept_from(args, rollout_id) == first
