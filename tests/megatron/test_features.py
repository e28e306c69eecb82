"""What a Megatron trainer does beside two steps of a policy: values, halves, parts of a step, experts, hooks, sleep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from buffer_rl.buffer.readers import balanced_partition
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.trainer.collate import collate, row_blocks
from buffer_rl.trainer.forward import response_log_probs
from buffer_rl.trainer.objective import Objective
from buffer_rl.trainer.torch_trainer import TorchTrainer
from harness.megatron_ranks import RankError, RankPool
from harness.megatron_rows import SEEDS, make_args, make_rows
from harness.megatron_steps import Case, Found, beyond, differences, run_case
from harness.trainers import make_trainer, step

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(300)]

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
CONTEXT = {"context_parallel_size": 2, "num_train_ranks": 2, "max_tokens_per_gpu": 32}
SEQUENCE = {TP: 2, "sequence_parallel": True, "num_train_ranks": 2}
EXPERTS = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5, "deterministic": True}

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

ModelOf = Callable[[str], str]
ByTransformers = Callable[[str], Found]


def rows(num_rows: int = 12) -> list[Any]:
    return [make_rows(num_rows, seed) for seed in SEEDS]


def with_values(batch: Any) -> Any:
    """The rows with what a critic reads."""
    generator = np.random.default_rng(7)
    lengths = batch.columns["response_length"]
    for name in ("old_log_probs", "ref_log_probs", "values"):
        batch.columns[name] = [generator.normal(size=length).astype(np.float32) for length in lengths]
    return batch


VALUE_LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "TP2": SEQUENCE,
    "PP2": {PP: 2, "num_train_ranks": 2},
    "CP2": {**CONTEXT, "qkv_format": "bshd"},
    "CP2, TP2": {**CONTEXT, **SEQUENCE, "num_train_ranks": 4},
}


@pytest.mark.parametrize("changes", VALUE_LAYOUTS.values(), ids=VALUE_LAYOUTS)
def test_a_value_model_is_that_of_transformers(changes: dict[str, Any], ranks: RankPool, model_of: ModelOf) -> None:
    args = make_args(model_of("untied"), advantage_estimator="ppo", use_critic=True)
    objective = Objective(args, PluginRegistry.from_flags([]), "critic")
    trainer = TorchTrainer(args, 0, 1, objective)
    expected = Found(outputs=dict.fromkeys(make_rows().row_ids, np.zeros(0)))
    expected.steps = [step(trainer, with_values(batch)) for batch in rows()]
    later = make_rows(12, 5)
    expected.outputs = dict(zip(later.row_ids, trainer.values(later), strict=True))
    expected.weights = {
        name: tensor.clone()
        for bucket in trainer.export()
        for name, tensor in bucket.items()
        if name != "lm_head.weight"  # the value head
    }
    case = Case(args=args.model_copy(update=changes), batches=[with_values(batch) for batch in rows()], critic=True)
    found = run_case(ranks, replace(case, last=later))
    assert beyond(found, expected) == {}
    assert max(float(np.abs(values).max(initial=0)) for values in found.outputs.values()) > 1e-3


def with_kept_tokens(batch: Any) -> Any:
    """Half of the response tokens were drawn from two to four tokens, the others from the whole vocabulary."""
    generator = np.random.default_rng(batch.rollout_id)
    counts, kept = [], []
    for tokens, length in zip(batch.columns["tokens"], batch.columns["response_length"], strict=True):
        sets = [
            {int(token), *generator.integers(3, 30, 3).tolist()} if generator.random() < 0.5 else set()
            for token in tokens[len(tokens) - length :]
        ]
        counts.append(np.array([len(each) for each in sets], dtype=np.int32))
        kept.append(np.array([token for each in sets for token in sorted(each)], dtype=np.int32))
    batch.columns |= {"kept_counts": counts, "kept_tokens": kept}
    return batch


def test_kept_tokens_are_those_of_each_ranks_response_tokens(ranks: RankPool, model_of: ModelOf) -> None:
    args = make_args(model_of("qwen3"))
    trainer = make_trainer(args)
    first = with_kept_tokens(make_rows(12, SEEDS[0]))
    expected = Found(outputs=dict(zip(first.row_ids, trainer.log_probs("actor", first), strict=True)))
    expected.steps = [step(trainer, with_kept_tokens(batch)) for batch in rows()]
    expected.weights = {name: tensor.clone() for bucket in trainer.export() for name, tensor in bucket.items()}
    for changes in (SEQUENCE, CONTEXT):
        case = Case(args=args.model_copy(update=changes), batches=[with_kept_tokens(batch) for batch in rows()])
        assert beyond(run_case(ranks, case), expected) == {}


def test_parts_of_a_step_add_up(ranks: RankPool, model_of: ModelOf, by_transformers: ByTransformers) -> None:
    for changes in ({"num_train_ranks": 2, PP: 2}, {"num_train_ranks": 2, "overlap_grad_reduce": True}, CONTEXT):
        case = Case(args=make_args(model_of("qwen3"), **changes), batches=rows(), parts=3)
        assert beyond(run_case(ranks, case), by_transformers("qwen3")) == {}


def test_a_trainer_that_slept_goes_on_as_it_was(
    ranks: RankPool, model_of: ModelOf, by_transformers: ByTransformers
) -> None:
    case = Case(args=make_args(model_of("qwen3"), num_train_ranks=2), batches=rows(), sleeps=True)
    assert beyond(run_case(ranks, case), by_transformers("qwen3")) == {}


SCHEDULE = {"lr_warmup_iters": 1, "lr_decay_style": "cosine", "lr_decay_iters": 3, "min_lr": 1e-3}


def by_the_default_backend(args: Any) -> Found:
    trainer = make_trainer(args)
    found = Found(outputs=dict.fromkeys(make_rows().row_ids, np.zeros(0)))
    found.steps = [step(trainer, batch) for batch in rows()]
    found.weights = {name: tensor.clone() for bucket in trainer.export() for name, tensor in bucket.items()}
    return found


@pytest.mark.parametrize("clip", [0.0, 0.5], ids=["no clipping", "clipping"])
def test_the_learning_rate_and_clipping_are_those_of_the_default_backend(
    ranks: RankPool, model_of: ModelOf, clip: float
) -> None:
    args = make_args(model_of("qwen3"), **{**SCHEDULE, "clip_grad": clip}, num_train_ranks=2)
    expected = by_the_default_backend(args.model_copy(update={"num_train_ranks": 1}))
    found = run_case(ranks, Case(args=args, batches=rows()))
    found.outputs = expected.outputs
    assert beyond(found, expected) == {}
    assert [each["lr"] for each in found.steps] == [each["lr"] for each in expected.steps]
    assert len({each["lr"] for each in found.steps}) == 2
    assert min(each["grad_norm"] for each in found.steps) > 0.5, "nothing is clipped"


CONTINUED = {"a value model": ("untied", True), "GLM-4": ("glm4", False), "experts": ("qwen3_moe", False)}


@pytest.mark.parametrize("kind", CONTINUED)
def test_a_trainer_goes_on_from_a_checkpoint_in_another_layout(
    ranks: RankPool, model_of: ModelOf, tmp_path: Path, kind: str
) -> None:
    architecture, critic = CONTINUED[kind]
    ppo = {"advantage_estimator": "ppo", "use_critic": True} if critic else {}
    args = make_args(model_of(architecture), **ppo)
    batches = [with_values(batch) if critic else batch for batch in rows()]
    saved = args.model_copy(update=SEQUENCE)
    spread = {"expert_model_parallel_size": 2} if kind == "experts" else {PP: 2}
    loaded = args.model_copy(update={**spread, "num_train_ranks": 2})
    whole = run_case(ranks, Case(args=args, batches=batches, critic=critic))
    run_case(ranks, Case(args=saved, batches=batches[:1], critic=critic, save=str(tmp_path)))
    found = run_case(ranks, Case(args=loaded, batches=batches[1:], critic=critic, load=str(tmp_path)))
    whole.steps, found.outputs = whole.steps[1:], whole.outputs
    assert beyond(found, whole) == {}


def test_bfloat16_has_float32_master_weights(
    ranks: RankPool, model_of: ModelOf, by_transformers: ByTransformers
) -> None:
    """Fifty steps of a learning rate that is a hundredth of a weight's spacing in bfloat16 move the weights together,
    not one by one."""
    case = Case(args=make_args(model_of("qwen3"), num_train_ranks=2, bf16=True), batches=rows())
    found = differences(run_case(ranks, case), by_transformers("qwen3"))
    assert 1e-4 < found["outputs"] < 0.2
    assert found["grad_norm"] < 0.05
    small = {"lr": 2e-5, "adam_eps": 1e-8, "weight_decay": 0.0, "num_train_ranks": 1, "bf16": True}
    same = [make_rows(12, 0)] * 50
    moved = run_case(ranks, Case(args=make_args(model_of("qwen3"), **small), batches=same)).weights
    start = run_case(ranks, Case(args=make_args(model_of("qwen3"), **small), batches=[])).weights
    name = "model.layers.0.mlp.down_proj.weight"
    changed = (moved[name] != start[name]) & (start[name].abs() > 0.1)
    assert changed.sum() > 0.5 * (start[name].abs() > 0.1).sum()


def test_the_auxiliary_loss_of_experts_has_equal_weights_in_any_layout(ranks: RankPool, model_of: ModelOf) -> None:
    """Micro-batches are those of a prompt group, as the loss is a mean over each."""
    model = model_of("qwen3_moe")
    alone = run_case(ranks, Case(args=make_args(model, **EXPERTS), batches=rows()))
    without = run_case(ranks, Case(args=make_args(model, deterministic=True), batches=rows()))
    assert differences(without, alone)["grad_norm"] > 1e-3
    stages = {PP: 2, "num_train_ranks": 2}
    for layout in (SEQUENCE, CONTEXT, stages, {**stages, **FULL}, {**SEQUENCE, **stages, "num_train_ranks": 4}):
        split = run_case(ranks, Case(args=make_args(model, **EXPERTS, **layout), batches=rows()))
        assert beyond(split, alone) == {}
    replicas = [
        run_case(
            ranks,
            Case(args=make_args(model, num_train_ranks=2, expert_model_parallel_size=size, **EXPERTS), batches=rows()),
        )
        for size in (1, 2)
    ]
    assert beyond(*replicas) == {}


def test_replicas_with_other_numbers_of_micro_batches_count_the_tokens_of_experts_together(
    ranks: RankPool, model_of: ModelOf
) -> None:
    """A forward pass has a sum over replicas, so one with fewer micro-batches makes passes without rows."""
    whole = make_rows(7, 0)
    groups = [{row // 2 for row in share} for share in balanced_partition(whole.lengths, 2)]
    assert [len(each) for each in groups] == [2, 3]  # under --deterministic a micro-batch has one
    args = make_args(model_of("qwen3_moe"), num_train_ranks=2, **EXPERTS)
    kinds = [args.model_copy(update={"moe_router_load_balancing_type": kind}) for kind in ("none", "global_aux_loss")]
    plain, balanced = (run_case(ranks, Case(args=kind, batches=[whole])) for kind in kinds)
    assert differences(balanced, plain)["grad_norm"] > 1e-3


WEIGHTED = """
from buffer_rl.kinds.token_loss import TokenLoss


def by_rewards(args, inputs):
    weights = inputs.loss_mask * (1 + inputs["reward"].abs())[:, None]
    return TokenLoss(-inputs.advantages * inputs.log_probs, weights=weights)

"""


def test_earlier_stages_weight_the_auxiliary_loss_by_what_the_rows_decide(
    ranks: RankPool, model_of: ModelOf, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(WEIGHTED)
    args = make_args(model_of("qwen3_moe"), custom_loss_function_path=f"{tmp_path / 'own.py'}:by_rewards", **EXPERTS)
    found = [
        run_case(ranks, Case(args=args.model_copy(update=changes), batches=rows()))
        for changes in ({}, {PP: 2, "num_train_ranks": 2})
    ]
    assert beyond(*found) == {}


def test_the_weight_of_the_auxiliary_loss_is_the_divisor(ranks: RankPool, model_of: ModelOf) -> None:
    """The first gradient is that of the objective's sum and of D times the loss of each layer, of each micro-batch
    (Fedus et al. 2022, arXiv:2101.03961, equation 4), by transformers' router logits."""
    args = make_args(model_of("qwen3_moe"), **EXPERTS)
    objective = Objective(args, PluginRegistry.from_flags([]))
    model = TorchTrainer(args, 0, 1, objective)._actor
    batch = make_rows(12, SEEDS[0])
    objective.compute_advantages(batch)
    divisor = 0.0
    for block in row_blocks(args, batch, packed=True, shares_prompts=False):
        rows = batch.select(block)
        loss, sums = objective(*response_log_probs(model, collate(rows, torch.device("cpu")), 1.0), rows)
        each = [torch.from_numpy(tokens).long()[None] for tokens in rows.columns["tokens"]]
        routed = [model(input_ids=ids, output_router_logits=True, use_cache=False).router_logits for ids in each]
        for layer in zip(*routed, strict=True):
            scores = torch.cat(layer).softmax(-1)
            chosen = torch.zeros_like(scores).scatter(1, scores.topk(2).indices, 1.0)
            balance = 4 * (chosen.mean(0) / 2 * scores.mean(0)).sum()
            loss = loss + args.moe_aux_loss_coeff * float(sums.divisor) * balance
        loss.backward()
        divisor += float(sums.divisor)
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    expected = float(torch.nn.utils.get_total_norm(gradients)) / divisor
    found = run_case(ranks, Case(args=args, batches=[make_rows(12, SEEDS[0])])).steps[0]["grad_norm"]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("size", [1, 2])
def test_the_auxiliary_loss_of_all_replicas_counts_the_tokens_of_the_passes_so_far(
    ranks: RankPool, model_of: ModelOf, size: int
) -> None:
    """An expert's share is that of all tokens until then (Qiu et al. 2025, arXiv:2501.11873), however many of them a
    pass has; the first gradient is computed by transformers' router logits."""
    args = make_args(model_of("qwen3_moe"), **EXPERTS, num_train_ranks=size)
    args = args.model_copy(update={"moe_router_load_balancing_type": "global_aux_loss"})
    objective = Objective(args, PluginRegistry.from_flags([]))
    model = TorchTrainer(args.model_copy(update={"num_train_ranks": 1}), 0, 1, objective)._actor
    whole = make_rows(7, SEEDS[0])
    shares = [whole.select(each) for each in balanced_partition(whole.lengths, size)]
    blocks = [row_blocks(args, share, packed=True, shares_prompts=False) for share in shares]
    for share in shares:
        objective.compute_advantages(share)
    counts, num_tokens, divisor = torch.zeros(2, 4), 0, 0.0  # of each layer's experts
    for number in range(max(map(len, blocks))):
        total, of_replicas = torch.zeros(()), []
        for share, own in zip(shares, blocks, strict=True):
            rows = share.select(own[number] if number < len(own) else [])
            tokens = [torch.from_numpy(each).long()[None] for each in rows.columns["tokens"]] or [
                torch.zeros(1, 1).long()
            ]
            routed = [model(input_ids=ids, output_router_logits=True, use_cache=False).router_logits for ids in tokens]
            scores = [torch.cat(layer).softmax(-1) for layer in zip(*routed, strict=True)]
            counts += torch.stack([torch.bincount(each.topk(2).indices.flatten(), minlength=4) for each in scores])
            num_tokens += len(scores[0])
            if len(rows):
                micro = collate(rows, torch.device("cpu"))
                loss, sums = objective(*response_log_probs(model, micro, 1.0), rows)
                of_replicas.append((float(sums.divisor), scores))
                total, divisor = total + loss, divisor + float(sums.divisor)
        for weight, scores in of_replicas:
            means = torch.stack([each.mean(0) for each in scores])
            total = total + args.moe_aux_loss_coeff * weight * 4 * (counts / (2 * num_tokens) * means).sum()
        total.backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    expected = float(torch.nn.utils.get_total_norm(gradients)) / divisor
    for abandoned in (None, make_rows(12, SEEDS[1])):  # of a step that is not taken nothing is counted
        case = Case(args=args, batches=[make_rows(7, SEEDS[0])], abandoned=abandoned)
        assert run_case(ranks, case).steps[0]["grad_norm"] == pytest.approx(expected, rel=1e-5)


def test_a_gradient_that_is_not_finite_is_seen_on_all_ranks(ranks: RankPool, model_of: ModelOf) -> None:
    case = Case(args=make_args(model_of("qwen3"), num_train_ranks=2), batches=rows(), scale=float("inf"))
    with pytest.raises(RankError, match="NonFiniteError"):
        run_case(ranks, case)


HOOKS = """
calls = open({path!r}, "a", buffering=1)


def init(args):
    print("init", file=calls)


def before_log_prob(args, model, store_prefix):
    print(f"log_prob {{len(model)}} {{store_prefix!r}}", file=calls)


def before_train_step(args, rollout_id, step_id, model, optimizer, scheduler):
    print(f"step {{rollout_id}} {{step_id}} {{optimizer is not None}} {{scheduler}}", file=calls)
"""


def test_hooks_are_called(ranks: RankPool, model_of: ModelOf, tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text(HOOKS.format(path=str(tmp_path / "calls")))
    names = {"init_path": "init", "before_log_prob_hook_path": "before_log_prob"}
    names["before_train_step_hook_path"] = "before_train_step"
    changes = {f"custom_megatron_{flag}": f"{tmp_path / 'hooks.py'}:{name}" for flag, name in names.items()}
    batches = rows()
    many = 2 * max(len(batch) for batch in batches)  # so that a step has parts without rows, the first one among them
    run_case(ranks, Case(args=make_args(model_of("qwen3"), **changes), batches=batches, parts=many))
    expected = ["init", "log_prob 1 ''", "step 0 0 True None", "step 1 0 True None"]
    assert (tmp_path / "calls").read_text().splitlines() == expected


PROVIDER = """
from megatron.core.models.gpt.gpt_model import GPTModel


def provider(pre_process, post_process, vp_stage=None, build=None, config=None, args=None):
    with open(args.run_dir, "a") as file:
        print(pre_process, post_process, vp_stage, file=file)
    assert config.num_layers == 4
    return build()


def frozen(pre_process, post_process, vp_stage=None, build=None):
    model = build()
    if post_process:
        model.decoder.final_layernorm.weight.requires_grad_(False)
    return model


def without_embeddings(pre_process, post_process, vp_stage=None, build=None):
    model = build()
    if pre_process:
        model.embedding.requires_grad_(False)
    return model


def without_first_layers(pre_process, post_process, vp_stage=None, build=None):
    model = build()
    for layer in model.decoder.layers:
        layer.requires_grad_(layer.layer_number > 2)
    return model


def tied(pre_process, post_process, vp_stage=None, build=None):
    model = build()
    model.share_embeddings_and_output_weights = True
    return model


def as_in_slime(pre_process: bool = True, post_process: bool = True) -> GPTModel:
    return None


def whole(args):
    raise AssertionError("it is not called")


def with_more(pre_process, post_process, build):
    import torch

    model = build()
    model.adapter = torch.nn.Linear(2, 2)
    return model
"""


def test_a_model_provider_makes_each_part_of_the_model(
    ranks: RankPool, model_of: ModelOf, by_transformers: ByTransformers, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(PROVIDER)
    calls = tmp_path / "calls"
    changes = {PP: 2, "num_train_ranks": 2, "virtual_pipeline_model_parallel_size": 2, "run_dir": str(calls)}
    own = {"custom_model_provider_path": f"{tmp_path / 'own.py'}:provider"}
    case = Case(args=make_args(model_of("qwen3"), **changes, **own), batches=rows())
    assert beyond(run_case(ranks, case), by_transformers("qwen3")) == {}
    parts = ["False False 0", "False False 1", "False True 1", "True False 0"]
    assert sorted(calls.read_text().splitlines()) == parts


def test_what_a_model_provider_freezes_stays(ranks: RankPool, model_of: ModelOf, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(PROVIDER)
    own = {"custom_model_provider_path": f"{tmp_path / 'own.py'}:frozen"}
    args = make_args(model_of("qwen3"), **own)
    start, found = (run_case(ranks, Case(args=args, batches=batches)).weights for batches in ([], rows()))
    assert [name for name in start if torch.equal(start[name], found[name])] == ["model.norm.weight"]


def test_a_trainer_with_frozen_layers_goes_on_from_a_checkpoint_in_another_layout(
    ranks: RankPool, model_of: ModelOf, tmp_path: Path
) -> None:
    """Of these the optimizer has no state, and Megatron would write that of all layers as one tensor."""
    (tmp_path / "own.py").write_text(PROVIDER)
    own = {"custom_model_provider_path": f"{tmp_path / 'own.py'}:without_first_layers"}
    args, batches = make_args(model_of("untied"), **own), rows()
    whole = run_case(ranks, Case(args=args, batches=batches))
    saved = args.model_copy(update=SEQUENCE)
    run_case(ranks, Case(args=saved, batches=batches[:1], save=str(tmp_path)))
    loaded = args.model_copy(update={PP: 2, "num_train_ranks": 2})
    found = run_case(ranks, Case(args=loaded, batches=batches[1:], load=str(tmp_path)))
    whole.steps, found.outputs = whole.steps[1:], whole.outputs
    assert beyond(found, whole) == {}
    start = run_case(ranks, Case(args=args, batches=[])).weights
    layers = {
        name.split(".")[2] for name in start if ".layers." in name and torch.equal(start[name], found.weights[name])
    }
    assert layers == {"0", "1"}


def test_a_value_model_of_a_provider_that_ties_embeddings_has_none_to_tie_on_any_stage(
    ranks: RankPool, model_of: ModelOf, tmp_path: Path
) -> None:
    """A stage that thought so would wait for the other one's gradient."""
    (tmp_path / "own.py").write_text(PROVIDER)
    own = {"custom_model_provider_path": f"{tmp_path / 'own.py'}:tied"}
    args = make_args(model_of("qwen3"), advantage_estimator="ppo", use_critic=True, **{PP: 2, "num_train_ranks": 2})
    plain, tied = (
        run_case(
            ranks,
            Case(args=args.model_copy(update=given), batches=[with_values(batch) for batch in rows()], critic=True),
        )
        for given in ({}, own)
    )
    assert beyond(tied, plain) == {}


@pytest.mark.parametrize("how", [FULL, {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}])
def test_recomputed_layers_behind_frozen_embeddings_have_their_gradients(
    ranks: RankPool, model_of: ModelOf, tmp_path: Path, how: dict[str, Any]
) -> None:
    (tmp_path / "own.py").write_text(PROVIDER)
    own = {"custom_model_provider_path": f"{tmp_path / 'own.py'}:without_embeddings"}
    args = make_args(model_of("untied"), **own)
    kept = run_case(ranks, Case(args=args, batches=rows()))
    assert beyond(run_case(ranks, Case(args=args.model_copy(update=how), batches=rows())), kept) == {}
    start = run_case(ranks, Case(args=args, batches=[])).weights
    assert [name for name in start if torch.equal(start[name], kept.weights[name])] == ["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("as_in_slime", "it returned None"),
        ("whole", r"each rank has a part; found whole\(args\)"),
        ("with_more", "no tensor of it belongs to the parameter adapter.weight"),
    ],
)
def test_a_model_provider_that_makes_something_else_is_refused(
    ranks: RankPool, model_of: ModelOf, tmp_path: Path, name: str, said: str
) -> None:
    (tmp_path / "own.py").write_text(PROVIDER)
    own = {"custom_model_provider_path": f"{tmp_path / 'own.py'}:{name}"}
    with pytest.raises(RankError, match=said):
        run_case(ranks, Case(args=make_args(model_of("qwen3"), **own), batches=[]))
