"""Lockstep, pipelined and streamed gradients end with the same parameters, bit by bit; so does a run whose reference
role was killed. The quickstart's model on a few of its prompts; ``benchmarks/schedule_equality.py`` has every pair."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from buffer_rl.files.row_file import read_rollout
from buffer_rl.observe.metrics import read_metrics
from buffer_rl.observe.timeline import read_trace
from buffer_rl.testing.tiny import make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "prepare.py"
WORDS = ("cat", "dog", "tree", "house", "water", "green", "stone", "light")
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
PIPELINED = {"schedule": "pipelined"}
STREAMED = {"schedule": "pipelined", "stream_gradients": True}

# A random model spells nothing: the reward is for having the answer's first letter somewhere, so that some prompts have
# four equal rewards, and are dropped by the filter, and some have not.
REWARD = """
def score(args, sample):
    return float(sample.label[0] in sample.response)
"""

# For runs in which work is to begin before the first rollout ends, however slow it is: the sample that is scored first
# waits for a forward pass. What is sampled and what is rewarded is as without.
WAITING = """
import asyncio, time
from pathlib import Path

import transformers

HERE = Path(__file__).parent


def model(args):
    # That of the folder; says when it is at work.
    model = transformers.AutoModelForCausalLM.from_pretrained(args.hf_checkpoint)

    def say(_model, _args, inputs):
        if inputs["input_ids"].numel() > 12:  # fewer: it is tried whether the model takes packed rows
            (HERE / "at_work").touch()

    model.register_forward_pre_hook(say, with_kwargs=True)
    return model


async def score(args, sample):
    try:
        (HERE / "waiting").touch(exist_ok=False)
    except FileExistsError:
        return float(sample.label[0] in sample.response)
    deadline = time.monotonic() + 60
    while not (HERE / "at_work").exists():
        assert time.monotonic() < deadline, "nobody worked on a finished group while the rollout ran"
        await asyncio.sleep(0.01)
    return float(sample.label[0] in sample.response)
"""

Run = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight of the quickstart's prompts, its model, and a copy of that as the reference."""
    folder = tmp_path_factory.mktemp("quickstart")
    spec = importlib.util.spec_from_file_location("quickstart_prepare", QUICKSTART)
    assert spec is not None
    assert spec.loader is not None
    prepare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    prepare.make_model(folder / "model")
    (folder / "reference").symlink_to("model")
    (folder / "train.jsonl").write_text("".join(json.dumps(prepare.make_row(word)) + "\n" for word in WORDS))
    (folder / "letters.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def run(train: Callable[[Any], Any], options_in: Callable[..., Any], folder: Path) -> Run:
    """Trains for five steps and returns the run's folder: ``run(name, **options)``."""

    def run(name: str, **options: Any) -> Path:
        args = options_in(
            folder / name,
            **{
                "prompt_data": str(folder / "train.jsonl"),
                "hf_checkpoint": str(folder / "model"),
                "ref_load": str(folder / "reference"),
                "custom_rm_path": f"{folder / 'letters.py'}:score",
                "eval_prompt_data": [],
                "eval_interval": None,
                "num_rollout": 5,
                "rollout_max_response_len": 12,
                "lr": 1e-3,
                "deterministic": True,
                **options,
            },
        )
        assert train(args).steps == 5
        return Path(args.run_dir)

    return run


def waiting(folder: Path) -> dict[str, Any]:
    """Options of one run that uses ``WAITING``, whose files are put into ``folder``."""
    folder.mkdir()
    (folder / "waiting_run.py").write_text(WAITING)
    file = folder / "waiting_run.py"
    return {"custom_model_provider_path": f"{file}:model", "custom_rm_path": f"{file}:score", "rm_timeout_s": 120.0}


def weights(run_dir: Path) -> dict[str, np.ndarray]:
    return load_file(run_dir / "hf" / "model.safetensors")


def equal(a: Path, b: Path) -> bool:
    left, right = weights(a), weights(b)
    return left.keys() == right.keys() and all(left[name].tobytes() == right[name].tobytes() for name in left)


def has_trained(run_dir: Path, folder: Path) -> bool:
    """Whether every matrix moved, by more than rounding."""
    initial, final = load_file(folder / "model" / "model.safetensors"), weights(run_dir)
    return all(np.abs(final[name] - initial[name]).max() > 1e-4 for name in initial)


def dropped(run_dir: Path) -> float:
    """Groups that the filter dropped."""
    records = read_metrics(run_dir)
    return sum(value for record in records for name, value in record.items() if name.startswith("rollout/drop_"))


def sampled_at_first(run_dir: Path) -> list[tuple[str, int, str]]:
    """Prompt, sample and response of what was shown of the first rollout, whose weights all runs have."""
    shown = map(json.loads, (run_dir / "samples.jsonl").read_text().splitlines())
    return [(s["uid"], s["sample_index"], s["response"]) for s in shown if s["rollout_id"] == 0]


def overlapping(run_dir: Path, name: str) -> int:
    """Rollouts that were still generating when work ``name`` on one of their groups had begun."""
    spans = read_trace(run_dir)
    ends = {span.rollout_id: span.end for span in spans["rollout"] if span.name == "rollout"}
    work = [span for role in spans for span in spans[role] if span.name == name]
    return len({span.rollout_id for span in work if span.start < ends[span.rollout_id]})


@pytest.fixture(scope="module")
def lockstep(run: Run) -> Path:
    """A run in lockstep with KL."""
    return run("lockstep", **KL)


@pytest.mark.slow
def test_with_kl_every_schedule_ends_with_the_parameters_of_lockstep(
    run: Run, lockstep: Path, folder: Path, tmp_path: Path
) -> None:
    assert has_trained(lockstep, folder)
    assert overlapping(lockstep, "ref_log_probs") == 0
    streamed = run("streamed_on_two_ranks", **KL, **STREAMED, **waiting(tmp_path / "streamed"), num_train_ranks=2)
    assert equal(lockstep, streamed)
    assert overlapping(streamed, "train") > 0


@pytest.mark.slow
def test_without_kl_and_with_dropped_groups_too(run: Run, folder: Path, tmp_path: Path) -> None:
    options = {"dynamic_sampling_filter_path": "filter_hub.reward_deviation:nonzero"}
    first = run("filtered", **options)
    assert has_trained(first, folder)
    assert dropped(first) > 0
    two_ranks = {**PIPELINED, **waiting(tmp_path / "pipelined"), "num_train_ranks": 2, "num_actor_fwd_workers": 1}
    pipelined = run("filtered_pipelined_on_two_ranks", **options, **two_ranks)
    streamed = run("filtered_streamed", **options, **STREAMED, **waiting(tmp_path / "streamed"))
    for other in (pipelined, streamed):
        assert equal(first, other)
        assert dropped(other) == dropped(first)
    assert overlapping(pipelined, "actor_fwd") > 0  # old log-probabilities of a pass of their own
    assert overlapping(streamed, "train") > 0


@pytest.mark.slow
def test_a_teacher_without_a_reward_draws_every_schedule_to_the_same_parameters(run: Run, folder: Path) -> None:
    teacher = make_tiny_model(folder / "teacher", init_scale=0.5)
    options = {"use_opd": True, "opd_teacher_load": teacher, "custom_rm_path": None, "use_rollout_logprobs": True}
    lockstep = run("distilled", **options)
    assert has_trained(lockstep, folder)
    divergences = [r["train/opd_reverse_kl"] for r in read_metrics(lockstep) if "train/opd_reverse_kl" in r]
    assert len(divergences) == 5
    assert min(divergences) > 0
    roles = {"num_teacher_workers": 1, "num_advantage_workers": 1}
    streamed = run("distilled_streamed", **options, **STREAMED, **roles)
    assert equal(lockstep, streamed)


ANY_REWARD = """
import zlib


def score(args, sample):
    return float(zlib.crc32(f"{sample.label} {sample.response}".encode()) % 4)
"""


@pytest.mark.slow
def test_remax_has_one_baseline_a_prompt_and_ends_alike_in_every_schedule(
    run: Run, lockstep: Path, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "any.py").write_text(ANY_REWARD)
    options = {"advantage_estimator": "remax", "custom_rm_path": f"{tmp_path / 'any.py'}:score"}
    first = run("remax", **options, save_debug_rollout_data=str(tmp_path / "{rollout_id}"))
    assert has_trained(first, folder)
    assert equal(first, run("remax_pipelined", **options, **PIPELINED, num_advantage_workers=1, num_train_ranks=2))
    assert equal(first, run("remax_streamed", **options, **STREAMED))
    logged = [record["rollout/baseline_reward"] for record in read_metrics(first) if "rollout/raw_reward" in record]
    seen = set()
    for rollout_id, metric in enumerate(logged):
        batch = read_rollout(tmp_path / str(rollout_id))
        baselines = np.asarray(batch.columns["baseline_reward"])
        of_prompt = {row.uid: baselines[i] for i, row in enumerate(batch.row_ids)}
        assert [of_prompt[row.uid] for row in batch.row_ids] == baselines.tolist()
        assert {row.sample_index for row in batch.row_ids} == set(range(len(batch.row_ids) // len(of_prompt)))
        assert metric == np.mean(list(of_prompt.values()))
        seen |= set(baselines.tolist())
    assert len(logged) == 5
    assert len(seen) > 1  # or nothing would be seen of the baselines
    shown = [sampled_at_first(run_dir) for run_dir in (first, lockstep)]
    assert len(shown[0]) > 0
    assert shown[0] == shown[1]  # a run without greedy responses


KILLED = """
import asyncio, os, signal, time
from pathlib import Path

import transformers

HERE = Path(__file__).parent


def first(name):
    try:
        (HERE / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def model(args):
    '''That of the folder; the first process with the reference model ends itself in its second forward pass, while it
    holds a group that it was handed and has not written back. The next one says when it is at work.'''
    model = transformers.AutoModelForCausalLM.from_pretrained(args.hf_checkpoint)
    passes = []

    def die(_model, _args, inputs):
        if inputs["input_ids"].numel() <= 12:  # it is tried whether the model takes packed rows
            return
        passes.append(1)
        if len(passes) == 2 and first("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if (HERE / "killed").exists():
            (HERE / "replaced").touch()

    if args.hf_checkpoint.endswith("reference"):
        model.register_forward_pre_hook(die, with_kwargs=True)
    return model


async def score(args, sample):
    '''The rollout cannot end before the death and the next process' work: the sample that is scored first waits.'''
    if first("waiting"):
        deadline = time.monotonic() + 60
        while not (HERE / "replaced").exists():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
    return float(sample.label[0] in sample.response)
"""


@pytest.mark.slow
def test_a_reference_role_that_is_killed_in_mid_rollout_does_its_work_again(
    run: Run, lockstep: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    disturbed = run(
        "killed",
        **KL,
        **PIPELINED,
        num_ref_workers=1,
        progress="plain",
        custom_model_provider_path=f"{tmp_path / 'killed.py'}:model",
        custom_rm_path=f"{tmp_path / 'killed.py'}:score",
        rm_timeout_s=120.0,
    )
    assert (tmp_path / "replaced").exists()
    said = "".join(capfd.readouterr())
    assert said.count("ref died and is replaced (1 of 2): the process died") == 1
    assert equal(lockstep, disturbed)
    assert overlapping(disturbed, "ref") > 0
