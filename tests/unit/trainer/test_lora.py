"""Adapters beside the base that they are made for, in float32 and bfloat16."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import CheckpointError, ConfigError
from buffer_rl.options.checks import notices
from buffer_rl.options.section import compose
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.trainer.forward import batch_outputs
from buffer_rl.trainer.lora import layers_with_adapter
from buffer_rl.trainer.objective import Objective
from buffer_rl.trainer.options import LoraOptions
from buffer_rl.trainer.packing import is_packed
from buffer_rl.trainer.pretrained import load_model
from buffer_rl.trainer.rank import build_trainer
from buffer_rl.trainer.torch_trainer import TorchTrainer
from harness.backend_ranks import groups_of, largest_difference, run_ranks
from harness.recorded_rows import recorded_rows
from harness.trainers import LARGE_EPS, make_trainer, step

CPU = torch.device("cpu")
Rows = list[np.ndarray]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tied embeddings."""
    folder = tmp_path_factory.mktemp("lora")
    return make_tiny_model(folder / "model", architecture="qwen2", characters="abcd=", init_scale=0.2)


def options(model: str, **changes: Any) -> Any:
    given = {"lr": 1e-3, "weight_decay": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.1, "lora_rank": 4}
    return compose(CORE_SECTIONS)(hf_checkpoint=model, train_device="cpu", **{**given, **changes})


def after(steps: int, args: Any) -> TorchTrainer:
    trainer = make_trainer(args)
    for number in range(steps):
        rows = recorded_rows(number, 3)
        rows.columns["ref_log_probs"] = trainer.log_probs("ref", rows)
        step(trainer, rows)
    return trainer


def equal(a: Rows, b: Rows) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def apart(a: Rows, b: Rows) -> float:
    return float(max(np.abs(x - y).max(initial=0) for x, y in zip(a, b, strict=True)))


@pytest.mark.parametrize("half", [False, True])
def test_the_reference_is_the_base_bit_for_bit_and_the_policy_begins_there(model: str, half: bool) -> None:
    rows = recorded_rows(0, 3)
    base = make_trainer(options(model, lora_rank=0, bf16=half)).log_probs("ref", rows)
    trainer = after(0, options(model, bf16=half))
    assert is_packed(trainer._actor)
    assert equal(trainer.log_probs("actor", rows), base)
    trainer = after(3, options(model, bf16=half))
    assert equal(trainer.log_probs("ref", rows), base)
    assert apart(trainer.log_probs("actor", rows), base) > 1e-2
    assert not trainer._frozen, "a second model is in memory"
    dtypes = {"lora" in name: weight.dtype for name, weight in trainer._actor.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16 if half else torch.float32}
    if half:  # the trainer without adapters has one
        torch.distributed.destroy_process_group()


def test_what_is_published_and_saved_is_base_and_adapters_in_one(model: str, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM

    trainer, rows = after(3, options(model)), recorded_rows(0, 3)
    trainer.save_hf(str(tmp_path))
    published = dict(trainer._model.weights())
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in published.items())
    original = dict(make_trainer(options(model, lora_rank=0))._model.weights())
    assert published.keys() == original.keys()
    own = trainer.log_probs("actor", rows)
    whole = load_model(str(tmp_path), CPU, "--hf-checkpoint")
    assert apart(batch_outputs(trainer._args, whole, rows, CPU, trainer._objective), own) <= 1e-5
    # And peft, given the base and the folder of the adapter.
    theirs = PeftModel.from_pretrained(load_model(model, CPU, "--hf-checkpoint"), str(tmp_path / "adapter"))
    found = batch_outputs(trainer._args, theirs.get_base_model(), rows, CPU, trainer._objective)  # type: ignore[arg-type]
    assert equal(found, own)
    # And peft and transformers, given the folder of the adapter alone.
    by_peft = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "adapter")).get_base_model()
    for alone in (by_peft, AutoModelForCausalLM.from_pretrained(str(tmp_path / "adapter"))):
        assert apart(batch_outputs(trainer._args, alone.eval(), rows, CPU, trainer._objective), own) <= 1e-5


def test_a_run_begins_with_an_adapter_and_its_reference_stays_there(model: str, tmp_path: Path) -> None:
    before, rows = after(3, options(model)), recorded_rows(0, 3)
    before.save_hf(str(tmp_path))
    args = options(model, lora_adapter_path=str(tmp_path / "adapter"))
    trainer, own = after(2, args), before.log_probs("actor", rows)
    assert equal(make_trainer(args).log_probs("actor", rows), own)
    assert equal(trainer.log_probs("ref", rows), own)
    assert apart(trainer.log_probs("actor", rows), own) > 1e-3
    gradients = [weight.grad for weight in trainer._actor.parameters() if weight.requires_grad]
    assert len(gradients) == 28
    for changes, words in (
        ({"lora_rank": 8}, r"rank and alpha are 4 and 32, not 8 and 32\n  hint: --lora-rank 4 --lora-alpha 32"),
        ({"lora_adapter_path": str(tmp_path)}, r"--lora-adapter-path .*: not readable"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_trainer(args.model_copy(update=changes))
    with pytest.raises(ConfigError, match=r"--lora-adapter-path: all weights would be trained"):
        LoraOptions.check(args.model_copy(update={"lora_rank": 0}))


def test_a_checkpoint_has_the_adapters_alone_and_belongs_to_its_base(model: str, tmp_path: Path) -> None:
    trainer, rows = after(2, options(model)), recorded_rows(0, 3)
    trainer.save(str(tmp_path / "saved"))
    names = load_file(tmp_path / "saved" / "weights.safetensors").keys()
    assert names == {name for name, weight in trainer._actor.named_parameters() if weight.requires_grad}
    assert len(names) == 2 * 2 * 7  # A and B of seven matrices in each of two layers
    resumed = make_trainer(options(model))
    resumed.load(str(tmp_path / "saved"))
    assert equal(resumed.log_probs("actor", rows), trainer.log_probs("actor", rows))
    other = make_tiny_model(tmp_path / "other", architecture="qwen2", characters="abcd=", init_scale=0.2, seed=1)
    for args, words in (
        (options(other), "a checkpoint of adapters of another base"),
        (options(model, lora_rank=0), "a checkpoint of adapters\n"),
    ):
        with pytest.raises(CheckpointError, match=words):
            make_trainer(args).load(str(tmp_path / "saved"))
    make_trainer(options(model, lora_rank=0)).save(str(tmp_path / "full"))
    with pytest.raises(CheckpointError, match="a checkpoint of all weights"):
        resumed.load(str(tmp_path / "full"))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_processes")
def test_ranks_have_the_adapters_of_one_whether_their_base_is_split_or_not(model: str, tmp_path: Path) -> None:
    """Four ranks have two copies of the base."""
    args = options(model, **LARGE_EPS)
    split = args.model_copy(update={"fsdp_size": 2})
    half = [each.model_copy(update={"bf16": True}) for each in (args, split)]
    found: dict[int, list[list[Any]]] = {}
    two, four = ([(0, 1), (2,)], [args, split, half[1]]), ([(0,), (1,), (2,), ()], [split])
    for deals, jobs in ([(0, 1, 2)], [args, half[0]]), two, four:
        steps = [[[groups_of(recorded_rows(number, 3), *ranks) for ranks in deals]] for number in range(4)]
        job = tmp_path / f"job_{len(deals)}"
        job.write_bytes(pickle.dumps([("torch", each, steps) for each in jobs]))
        found[len(deals)] = [list(ranks) for ranks in zip(*run_ranks(len(deals), job), strict=True)]
    ((alone,), (half_alone,)), several = found[1], [*found[2], *found[4]]
    limits = 1e-6, 1e-6, 1e-3, 1e-6
    for ranks, expected, limit in zip(several, (alone, alone, half_alone, alone), limits, strict=True):
        for rank in ranks:
            assert largest_difference(rank["weights"], ranks[0]["weights"]) == 0
            assert largest_difference(rank["resumed"], rank["weights"]) == 0
        assert largest_difference(ranks[0]["weights"], expected["weights"]) <= limit


def test_experts_and_tied_embeddings_have_no_adapters(model: str, tmp_path: Path) -> None:
    mixture = make_tiny_model(tmp_path / "mixture", architecture="qwen3_moe", characters="abcd=")
    with pytest.raises(ConfigError, match=r"--target-modules: experts such as .* would have no adapter"):
        make_trainer(options(mixture))
    attention = make_trainer(options(mixture, target_modules=["q_proj", "v_proj"]))
    names = [name for name, weight in attention._actor.named_parameters() if weight.requires_grad]
    assert len(names) == 2 * 2 * 2
    untied = make_tiny_model(tmp_path / "untied", architecture="llama", characters="abcd=")
    refused = (
        (model, "embed_tokens", "embed_tokens is tied"),
        (untied, "embed_tokens", r"embed_tokens.lora_embedding_A.* is not of a linear layer"),
        (model, "nowhere", "(?i)target"),
    )
    for folder, target, words in refused:
        with pytest.raises(ConfigError, match=words):
            make_trainer(options(folder, target_modules=[target]))


def whole_trainer(args: Any, rank: int, world_size: int, objective: Objective) -> TorchTrainer:
    """A backend that knows nothing of adapters."""
    return TorchTrainer(args.model_copy(update={"lora_rank": 0}), rank, world_size, objective)


def test_a_run_that_asks_for_adapters_never_trains_all_weights(model: str) -> None:
    args = options(model, train_backend=f"{__file__}:whole_trainer")
    registry = PluginRegistry()
    with pytest.raises(ConfigError, match=r"--lora-rank: the trainer .*whole_trainer' trains all weights"):
        build_trainer(args, registry, 0, 1, Objective(args, registry))
    refused = (
        ({"model_converter_path": "a:b"}, "do not go with --model-converter-path"),
        ({"lora_dropout": 0.1}, "no ratio begins at 1"),
    )
    for changes, words in refused:
        with pytest.raises(ConfigError, match=words):
            LoraOptions.check(options(model, **changes))


def test_a_quantized_base_is_refused(model: str, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"--hf-checkpoint: the weights in .* are quantized \(bitsandbytes\)"):
        make_trainer(options(str(tmp_path / "base")))


def test_a_learning_rate_of_full_training_is_said() -> None:
    told = [text for text in notices(options("m", lr=1e-6, num_rollout=1)) if "adapters learn" in text]
    assert len(told) == 1
    assert not [text for text in notices(options("m", lr=1e-4, num_rollout=1)) if "adapters learn" in text]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora_rank": 0}, "no adapter\n  hint: add --lora-rank"),
        ({"weight_sync_mode": "tensor"}, "a folder: it does not go with --weight-sync-mode tensor"),
        ({"weight_sync_mode": "distributed"}, "a folder: it does not go with --weight-sync-mode distributed"),
        ({"offload_rollout": True}, "goes with its memory: it does not go with --offload-rollout"),
        ({"check_weight_update_equal": True}, "the base is not sent: it does not go with --check-weight-update-equal"),
    ],
)
def test_what_does_not_go_with_adapters_alone_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"--lora-publish adapter: .*{words}"):
        LoraOptions.check(options("m", lora_publish="adapter", **changes))
    LoraOptions.check(options("m", lora_publish="adapter"))


def test_adapters_alone_are_written_and_the_policy_without_them_is_the_base(model: str, tmp_path: Path) -> None:
    trainer, rows = after(2, options(model)), recorded_rows(0, 3)
    trainer.write_adapter(str(tmp_path / "alone"))
    trainer.save_hf(str(tmp_path / "whole"))
    alone, saved = (
        load_file(at / "adapter_model.safetensors") for at in (tmp_path / "alone", tmp_path / "whole/adapter")
    )
    assert alone.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in alone.items())
    base = make_trainer(options(model, lora_rank=0)).log_probs("actor", rows)
    begun = after(0, options(model, lora_adapter_path=str(tmp_path / "alone")))
    for each in (trainer, begun):
        own = each.log_probs("actor", rows)
        assert equal(each.log_probs("base", rows), base)
        assert equal(each.log_probs("actor", rows), own)
        assert apart(own, base) > 1e-3


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float32, "qwen2"), (torch.bfloat16, "qwen2"), (torch.float32, "gpt2")]
)
def test_the_share_that_rounding_leaves_unchanged_is_that_of_the_merged_weights(
    tmp_path: Path, dtype: torch.dtype, kind: str
) -> None:
    """The matrices of a GPT-2 have a row an input."""
    model = make_tiny_model(tmp_path / "model", "qwen2", characters="abcd=", init_scale=0.2, model_type=kind)
    trainer = after(0, options(model, lr=1e-4, engine_dtype=str(dtype).removeprefix("torch.")))

    def merged() -> dict[str, torch.Tensor]:
        names = layers_with_adapter(trainer._actor)
        return {name: tensor.to(dtype).clone() for name, tensor in trainer._model.weights() if name in names}

    before, shares = merged(), []
    assert trainer.unchanged_share() == 1.0  # new adapters are 0
    for number in range(3):
        rows = recorded_rows(number, 3)
        rows.columns["ref_log_probs"] = trainer.log_probs("ref", rows)
        step(trainer, rows)
        now = merged()
        expected = sum(int((now[name] == before[name]).sum()) for name in now) / sum(map(torch.numel, now.values()))
        shares.append(trainer.unchanged_share())
        assert shares[-1] == pytest.approx(expected, abs=0.01)  # B A is summed in another order
        before = now
    assert (shares[-1] > 0.5) is (dtype is torch.bfloat16)
