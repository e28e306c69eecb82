"""Runs that train on what agents wrote to the rollout service: one whose service is killed meanwhile, and one that is
asynchronous, whose agents ask its engine while it trains, and send some groups too late."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.cli import main
from buffer_rl.embedded.launcher import launch
from buffer_rl.errors import ConfigError
from buffer_rl.observe.metrics import read_metrics
from buffer_rl.options.section import compose
from buffer_rl_rollout_service.client import ServiceClient, write_trajectory
from harness.checkpoints import final_weights
from harness.processes import holds_within
from harness.rollout_service import TOKEN, ServiceProcess

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(240)]

GROUPS, GROUP_SIZE, STEPS = 3, 4, 3
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
PROMPT = [3, 4, 6]
"""The ids of "ab=": the tiny model's characters are "abc=", from 3 on."""
WAIT_S = 120.0


@pytest.fixture
def options_for(options_in: Callable[..., Any], task: Path, tmp_path: Path) -> Callable[..., Any]:
    """Options of a run that reads a service; its model has a chat template."""
    model = tmp_path / "model"
    shutil.copytree(task / "model", model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    made = compose([*CORE_SECTIONS, "buffer_rl_rollout_service.options:ServiceOptions"])

    def options(name: str, url: str, **changes: Any) -> Any:
        args = options_in(
            tmp_path / name,
            hf_checkpoint=str(model),
            rollout_batch_size=GROUPS,
            n_samples_per_prompt=GROUP_SIZE,
            rollout_function_path="buffer_rl_rollout_service.rollout:ServiceRollout",
            rollout_timeout_s=WAIT_S,
            **({"deterministic": True, "lr_decay_iters": STEPS} if "schedule" not in changes else {}),
            **changes,
        )
        return made(**args.model_dump(), rollout_service_url=url, rollout_service_token=TOKEN)

    return options


def write_groups(url: str, problems: Sequence[int], missing: int | None = None) -> None:
    for problem in problems:
        for member in range(GROUP_SIZE - (problem == missing)):
            answer = "abc"[: 1 + (problem + member) % 3]
            item = {
                "instance_id": problem,
                "uid": f"{problem}-{member}",
                "reward": answer.count("a") + member,
                "messages": [{"role": "user", "content": "ab="}, {"role": "assistant", "content": answer}],
            }
            write_trajectory(url, TOKEN, item, timeout_s=WAIT_S)


def states_of_foreign_groups(run_dir: Path) -> list[tuple[int, GroupState]]:
    audit = LedgerAudit(run_dir / "ledger.sqlite")
    try:
        assert audit.faults() == []
        return sorted((uid.row, state) for uid, state in audit.states() if uid.source.startswith("service-"))
    finally:
        audit.close()


def statistics_of(process: ServiceProcess) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        async with ServiceClient(process.url, TOKEN) as service:
            return await service.statistics(timeout_s=WAIT_S)

    return asyncio.run(ask())


def test_a_run_trains_on_what_agents_wrote_though_the_service_is_killed(
    train: Callable[[Any], Any], options_for: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"group_size": GROUP_SIZE, "min_group_size": 2, "group_timeout_s": 6.0}
    with ServiceProcess(tmp_path / "store", **flags) as process:
        write_groups(process.url, range(GROUPS + 1))  # of the first step, and a part of the second

        def agents() -> None:
            first_step = GROUPS * GROUP_SIZE
            assert holds_within(WAIT_S, lambda: statistics_of(process)["trajectories"]["delivered"] >= first_step)
            process.kill()
            process.start()
            write_groups(process.url, range(GROUPS + 1, GROUPS * STEPS), missing=GROUPS * STEPS - 1)

        args = options_for("run", process.url, num_rollout=STEPS, eval_interval=STEPS)
        later = threading.Thread(target=agents, daemon=True)
        later.start()
        assert train(args).steps == STEPS
        later.join(WAIT_S)
        statistics = statistics_of(process)
    written = GROUPS * STEPS * GROUP_SIZE - 1
    assert statistics["trajectories"]["written"] == statistics["trajectories"]["delivered"] == written
    assert statistics["partial_groups"] == 1
    run_dir = tmp_path / "run"
    trained = [(number, GroupState.TRAINED) for number in range(1, GROUPS * STEPS + 1)]
    assert states_of_foreign_groups(run_dir) == trained
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rollouts = [line for line in lines if line["kind"] == "rollout"]
    assert [line["rollout/num_groups"] for line in rollouts] == [GROUPS] * STEPS
    assert [line["rollout/service_partial"] for line in rollouts] == [0, 0, 1]
    assert all(line["train/grad_norm"] > 0 for line in lines if line["kind"] == "train")
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [0, STEPS]  # the engine has the new weights
    capsys.readouterr()
    assert main(["ledger", str(run_dir), "--verify"]) == 0


def test_a_run_that_goes_back_to_a_checkpoint_trains_on_the_same_groups_again(
    train: Callable[[Any], Any], options_for: Callable[..., Any], tmp_path: Path
) -> None:
    saves = tmp_path / "saves"
    with ServiceProcess(tmp_path / "store", group_size=GROUP_SIZE) as process:
        write_groups(process.url, range(GROUPS * STEPS + 1))
        common = {
            "num_rollout": STEPS,
            "save": str(saves),
            "save_interval": 1,
            "eval_prompt_data": [],
            "eval_interval": None,
        }
        train(options_for("whole", process.url, **common))
        assert statistics_of(process)["groups"]["delivered"] == GROUPS * STEPS
        again = {**common, "save": str(tmp_path / "others"), "load": str(saves / f"step_{STEPS - 1:06d}")}
        train(options_for("again", process.url, **again))
        statistics = statistics_of(process)
    assert (statistics["groups"]["delivered"], statistics["groups"]["ready"]) == (GROUPS * STEPS, 1)
    expected = [(number, GroupState.TRAINED) for number in range(1, GROUPS * STEPS + 1)]
    assert [states_of_foreign_groups(tmp_path / name) for name in ("whole", "again")] == [expected] * 2
    assert final_weights(tmp_path / "whole") == final_weights(tmp_path / "again")


class Agent(threading.Thread):
    """Samples groups from an engine and writes them to the service, with the versions and log-probabilities that the
    engine reports: those of two steps at once, then a few ahead of the reader. LATE groups, sampled before all others,
    are sent once the reader has published ``late_at``: by then they are too old."""

    LATE = 2

    def __init__(self, engine_url: str, service_url: str, late_at: int) -> None:
        super().__init__(daemon=True)
        self._engine_url, self._service_url, self._late_at = engine_url, service_url, late_at
        self.ended = threading.Event()
        self.errors: list[BaseException] = []
        self.late: list[str] = []

    def run(self) -> None:
        try:
            asyncio.run(self._work())
        except BaseException as error:  # for the test's thread
            self.errors.append(error)

    async def _work(self) -> None:
        async with ServiceClient(self._service_url, TOKEN) as service, aiohttp.ClientSession() as engine:
            kept = [await self._sampled(engine, f"late-{number}") for number in range(self.LATE)]
            for number in range(2 * GROUPS):
                await self._write(service, await self._sampled(engine, f"first-{number}"))
            for number in itertools.count():
                while (facts := await service.statistics(timeout_s=WAIT_S))["groups"]["ready"] >= GROUPS:
                    if self.ended.is_set():
                        return
                    await asyncio.sleep(0.01)
                if (facts["weight_version"] or 0) >= self._late_at and kept:
                    await self._write(service, kept.pop())
                await self._write(service, await self._sampled(engine, f"problem-{number}"))

    async def _write(self, service: ServiceClient, group: list[dict[str, Any]]) -> None:
        for item in group:
            answer = await service.write(item, timeout_s=WAIT_S)
        if item["instance_id"].startswith("late"):
            self.late.append(str(answer["group"]))

    async def _sampled(self, engine: aiohttp.ClientSession, problem: str) -> list[dict[str, Any]]:
        return list(await asyncio.gather(*[self._one(engine, problem, member) for member in range(GROUP_SIZE)]))

    async def _one(self, engine: aiohttp.ClientSession, problem: str, member: int) -> dict[str, Any]:
        params = {"max_new_tokens": 6, "temperature": 1.0}
        asked = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}
        async with engine.post(f"{self._engine_url}/generate", json=asked) as response:
            answer = await response.json()
        ids, meta = answer["output_ids"], answer["meta_info"]
        return {
            "instance_id": problem,
            "uid": str(member),
            "reward": ids.count(PROMPT[0]) + member / 10,
            "tokens": [*PROMPT, *ids],
            "response_length": len(ids),
            "rollout_log_probs": [value for value, *_ in meta["output_token_logprobs"]],
            "weight_versions": meta["weight_versions"],
        }


def test_an_asynchronous_run_trains_on_what_agents_send_within_its_bound_and_counts_what_is_too_old(
    train: Callable[[Any], Any], options_for: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps, run_dir = 6, tmp_path / "run"
    with ExitStack() as stack:
        process = stack.enter_context(ServiceProcess(tmp_path / "store", group_size=GROUP_SIZE))
        common: dict[str, Any] = {"schedule": "async", "max_staleness": 2, "use_tis": True, "num_rollout": steps}
        args = options_for("run", process.url, **common)
        run_dir.mkdir()
        engine = launch(args, 0, str(run_dir / "outside.log"))
        stack.callback(engine.stop)
        engine.wait_ready(60)
        agent = Agent(engine.url, process.url, late_at=2)
        agent.start()
        assert holds_within(WAIT_S, lambda: statistics_of(process)["groups"]["ready"] >= 2 * GROUPS)
        roles = {"num_actor_fwd_workers": 1, "eval_prompt_data": [], "eval_interval": None}
        outside: dict[str, Any] = {"rollout_engine": "external", "rollout_external_engine_addrs": [engine.url]}
        args = options_for("run", process.url, **outside, **common, **roles)
        try:
            assert train(args).steps == steps
        finally:
            agent.ended.set()
        agent.join(WAIT_S)
        assert agent.errors == []
        dropped = statistics_of(process)["dropped"]["too_old"] // GROUP_SIZE
    audit = LedgerAudit(run_dir / "ledger.sqlite")
    entries = {uid: audit.entry(uid) for uid, _ in audit.states()}
    audit.close()
    late = [entry for uid, entry in entries.items() if entry and str(uid.row) in agent.late]
    assert [(entry.state, entry.reason) for entry in late] == [(GroupState.REJECTED, "too_old")] * Agent.LATE
    assert sum(entry.reason == "too_old" for entry in entries.values() if entry) == dropped
    counts = Counter(entry.state for entry in entries.values() if entry)
    assert counts[GroupState.TRAINED] == steps * GROUPS
    capsys.readouterr()
    assert main(["ledger", str(run_dir), "--verify"]) == 0
    records = read_metrics(run_dir)
    staleness = [record["staleness/max"] for record in records if "staleness/max" in record]
    assert len(staleness) == steps
    assert staleness[:2] == [0, 1]  # what was there before the run
    assert max(staleness) <= 2
    assert sum(record.get("production/drop_too_old", 0) for record in records) == dropped


def test_an_asynchronous_run_refuses_what_does_not_say_its_versions(
    train: Callable[[Any], Any], options_for: Callable[..., Any], tmp_path: Path
) -> None:
    with ServiceProcess(tmp_path / "store", group_size=GROUP_SIZE) as process:
        write_groups(process.url, range(1))
        args = options_for("run", process.url, schedule="async", allow_uncorrected=True)
        with pytest.raises(ConfigError, match=r"(?s)does not say which weights.*in each trajectory weight_version"):
            train(args)
