"""A run that trains on what agents wrote to the rollout service, which is killed meanwhile."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.buffer.ledger_tables import GroupState
from buffer_rl.cli import main
from buffer_rl.options.section import compose
from buffer_rl_rollout_service.client import ServiceClient, write_trajectory
from harness.processes import holds_within
from harness.rollout_service import TOKEN, ServiceProcess

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(240)]

GROUPS, GROUP_SIZE, STEPS = 3, 4, 3
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
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
            deterministic=True,
            lr_decay_iters=STEPS,
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
    weights = [load_file(tmp_path / name / "hf" / "model.safetensors") for name in ("whole", "again")]
    assert {name: array.tobytes() for name, array in weights[0].items()} == {
        name: array.tobytes() for name, array in weights[1].items()
    }
