"""A run in which a trainer rank is killed starts its processes again from its newest checkpoint, and ends with the
parameters of an undisturbed one, bit by bit. ``benchmarks/faults.py rank`` does the same at random moments."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.errors import WorkerDiedError
from buffer_rl.observe.metrics import read_metrics
from harness.checkpoints import final_weights

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS, GROUPS = 5, 3
SPLIT: dict[str, Any] = {"num_train_ranks": 2, "fsdp_size": 2, "adam_eps": 1e-2}
"""A model that is split over two ranks, and with adapters."""
ADAPTERS = SPLIT | {"lora_rank": 4, "ref_load": None}

# Each moment kills the last rank once; the folder's name says which moments.
KILLERS = """
import os, signal
from pathlib import Path

import transformers

from buffer_rl.buffer.ledger_audit import LedgerAudit
from buffer_rl.trainer.torch_trainer import TorchTrainer


def model(args):
    '''That of the folder; the processes of the reference role end themselves three times, in their second pass.'''
    model = transformers.AutoModelForCausalLM.from_pretrained(args.hf_checkpoint)
    passes = []

    def die(_model, _args, inputs):
        if inputs["input_ids"].numel() <= 12:  # it is tried whether the model takes packed rows
            return
        passes.append(1)
        deaths = Path(args.run_dir, "deaths")
        if len(passes) == 2 and (not deaths.exists() or len(deaths.read_text()) < 3):
            with deaths.open("a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)

    if b"FusedProcess" in Path("/proc/self/cmdline").read_bytes():
        model.register_forward_pre_hook(die, with_kwargs=True)
    return model


class Trainer(TorchTrainer):
    def __init__(self, args, rank, world_size, objective):
        super().__init__(args, rank, world_size, objective)
        self.folder, self.is_last, self.steps = Path(args.run_dir), rank == world_size - 1, 0
        self.prefix = "critic_" if objective.critic else ""

    def die(self, moment):
        moment = f"{self.prefix}{moment}_{self.steps}"
        if self.is_last and moment in self.folder.name.split("-") and not (self.folder / moment).exists():
            (self.folder / moment).touch()
            pid = os.getpid()
            if moment.startswith("buffer"):
                audit = LedgerAudit(self.folder / "ledger.sqlite")
                pid = int(audit.facts()["note:pid"].split()[0])
            os.kill(pid, signal.SIGKILL)

    def accumulate(self, batch):
        self.die("before")
        return super().accumulate(batch)

    def optimizer_step(self, scale):
        self.die("update")
        answer = super().optimizer_step(scale)
        self.steps += 1
        self.die("buffer")
        return answer

    def save(self, path):
        self.die("save")
        super().save(path)

    def load(self, path):
        super().load(path)
        self.steps = int(Path(path).parent.name.removeprefix("step_"))

    def export(self):
        self.die("publish")
        yield from super().export()
"""

Run = Callable[..., Path]


@pytest.fixture(scope="module")
def run(
    train: Callable[[Any], Any], options_in: Callable[..., Any], task: Path, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """Trains and returns the run's folder: ``run(name, **options)``."""
    folder = tmp_path_factory.mktemp("restarts")
    (folder / "killers.py").write_text(KILLERS)

    def run(name: str, **options: Any) -> Path:
        options |= {key: value.format(folder=folder) for key, value in options.items() if isinstance(value, str)}
        saves = {"save": str(folder / f"{name}_saves")} if "save_interval" in options else {}
        args = options_in(
            folder / name,
            train_backend=f"{folder / 'killers.py'}:Trainer",
            use_kl_loss=True,
            kl_loss_coef=0.1,
            num_rollout=STEPS,
            deterministic=True,
            progress="plain",
            lr_decay_style="cosine",
            trace=True,
            **{"ref_load": str(task / "model")} | saves | options,
        )
        assert train(args).steps == STEPS
        return Path(args.run_dir)

    return run


@pytest.fixture(scope="module")
def undisturbed(run: Run) -> Path:
    """A run in which nothing dies."""
    return run("undisturbed")


def check_equal(disturbed: Path, undisturbed: Path) -> None:
    """Equal parameters and metrics, and a ledger in which each step's groups are trained, once."""
    assert final_weights(disturbed) == final_weights(undisturbed)
    audit = LedgerAudit(disturbed / "ledger.sqlite")
    assert audit.faults() == []
    assert audit.commits() == [(step, step + 1, GROUPS) for step in range(STEPS)]
    found, expected = (
        [line for line in read_metrics(folder) if line["kind"] in ("train", "eval")]
        for folder in (disturbed, undisturbed)
    )
    assert found == expected


def test_a_rank_that_is_killed_in_its_optimizer_step_changes_no_bit(
    run: Run, undisturbed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    disturbed = run("update_3", save_interval=2)
    said = capfd.readouterr().out
    assert (disturbed / "update_3").exists()
    assert "from the checkpoint of step 2 (global restart 1 of 3)" in said
    check_equal(disturbed, undisturbed)


@pytest.mark.parametrize(
    ("moments", "options"),
    [
        ("update_1-update_4", {"num_train_ranks": 2, "save_interval": 2}),
        ("update_3", {"num_train_ranks": 2, "schedule": "pipelined", "stream_gradients": True, "num_ref_workers": 1}),
        ("save_4", {"save_interval": 2}),
        ("publish_3", {"save_interval": 2}),
        ("publish_4", {"save_interval": 2}),
        ("buffer_3", {"save_interval": 2, "buffer_max_restarts": 0}),
        ("publish_1", {"weight_sync_mode": "tensor"}),
        ("publish_2", {"save_interval": 1, "async_save": True}),
    ],
    ids=[
        "two_ranks",
        "streamed_without_checkpoints",
        "in_save",
        "in_publish",
        "after_save",
        "buffer",
        "in_publish_by_tensor",
        "while_a_checkpoint_is_written",
    ],
)
def test_a_rank_may_be_killed_at_any_moment_of_a_step(
    run: Run, undisturbed: Path, moments: str, options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    disturbed = run(moments if options.get("num_train_ranks") != 2 else f"{moments}-2", **options)
    said = capfd.readouterr().out
    happened = moments.split("-")
    assert [moment for moment in happened if not (disturbed / moment).exists()] == []
    assert said.count("all processes of the run are started again") == len(happened)
    check_equal(disturbed, undisturbed)


@pytest.fixture(scope="module")
def undisturbed_split(run: Run) -> Callable[[dict[str, Any]], Path]:
    """Of each kind of model in parts, a run in which nothing dies."""

    @cache
    def of(name: str) -> Path:
        return run(f"undisturbed_{name}", **(ADAPTERS if name == "adapters" else SPLIT), save_interval=2)

    return lambda kind: of("adapters" if kind is ADAPTERS else "split")


@pytest.mark.parametrize(
    ("kind", "moments", "options"),
    [
        (SPLIT, "before_1-update_3", {}),
        (SPLIT, "save_2-publish_4", {"async_save": True}),
        (ADAPTERS, "save_2-publish_4", {}),
    ],
    ids=["in_a_step", "in_a_save", "in_a_save_of_adapters"],
)
def test_a_rank_that_has_a_part_of_the_model_may_be_killed_at_any_moment(
    run: Run, undisturbed_split: Callable[..., Path], kind: dict[str, Any], moments: str, options: dict[str, Any]
) -> None:
    disturbed = run(f"{moments}-{len(kind)}", save_interval=2, **kind, **options)
    assert [moment for moment in moments.split("-") if not (disturbed / moment).exists()] == []
    check_equal(disturbed, undisturbed_split(kind))


@pytest.mark.parametrize(("kind", "ranks"), [(SPLIT, 1), (SPLIT, 4), (ADAPTERS, 1)], ids=["1", "4", "adapters_on_1"])
def test_what_two_ranks_saved_is_continued_on_another_number_of_ranks(
    undisturbed_split: Callable[..., Path],
    train: Callable[[Any], Any],
    options_in: Callable[..., Any],
    kind: dict[str, Any],
    ranks: int,
) -> None:
    """From the checkpoint of step 4, which two ranks wrote; the weights are those of the two to rounding."""
    undisturbed = undisturbed_split(kind)
    folder = undisturbed.with_name(f"{undisturbed.name}_on_{ranks}")
    (saved,) = undisturbed.with_name(f"{undisturbed.name}_saves").glob("step_*4")
    more: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.1, "progress": "plain", "deterministic": True}
    more |= {"num_rollout": STEPS, "lr_decay_style": "cosine", "load": str(saved)}
    # Of kind stays adam_eps: a difference of gradients becomes none that is larger, of weights.
    more |= kind | {"num_train_ranks": ranks, "fsdp_size": 1 if ranks == 1 else -1}
    ran = train(options_in(folder, **more))
    assert ran.steps == STEPS
    audit = LedgerAudit(folder / "ledger.sqlite")
    assert audit.faults() == []
    assert audit.commits() == [(step, step + 1, GROUPS) for step in range(STEPS)]
    found, expected = (load_file(each / "hf" / "model.safetensors") for each in (folder, undisturbed))
    assert max(float(abs(found[name] - expected[name]).max()) for name in expected) < 1e-4


def test_the_death_of_a_rank_of_the_critic_takes_the_policy_back_with_it(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    ppo = {"advantage_estimator": "ppo", "lambd": 0.9, "num_critic_only_steps": 1, "save_interval": 1}
    undisturbed = run("undisturbed_critic", **ppo)
    disturbed = run("critic_update_2", **ppo)
    said = capfd.readouterr().out
    assert said.count("critic.train: the process died") == 1
    assert "from the checkpoint of step 2 (global restart 1 of 3)" in said
    check_equal(disturbed, undisturbed)


def test_a_role_that_dies_for_the_third_time_starts_the_whole_run_again(
    run: Run, undisturbed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    disturbed = run("three", num_ref_workers=1, custom_model_provider_path="{folder}/killers.py:model")
    said = capfd.readouterr().out
    assert (disturbed / "deaths").read_text() == "xxx"
    assert [number for number in (1, 2) if f"ref died and is replaced ({number} of 2)" not in said] == []
    assert "from the start (global restart 1 of 3)" in said
    check_equal(disturbed, undisturbed)


def test_after_the_last_global_restart_a_death_ends_the_run_and_says_what_to_do(run: Run) -> None:
    with pytest.raises(WorkerDiedError) as caught:
        run("update_1-update_2", max_global_restarts=1)
    assert caught.value.where == "train.train"
    assert "--max-global-restarts: 1 of 1 were used; --load goes on" in caught.value.hint
