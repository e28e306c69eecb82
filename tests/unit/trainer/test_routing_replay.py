"""Tokens go to the engine's experts in the torch trainer: against a replay that is written down in float64."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import ConfigError, DataError
from buffer_rl.options.section import compose
from buffer_rl.records.groups import TrainBatch
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.trainer.collate import collate, routed_experts, row_blocks
from buffer_rl.trainer.forward import passes
from buffer_rl.trainer.rank import build_trainer
from buffer_rl.trainer.routing_replay import RoutingReplay
from harness.backend_ranks import run_ranks
from harness.replayed_experts import MUTANTS, SIZES, rows_with_experts, written_gradients, written_log_probs
from harness.trainers import make_trainer

CPU = torch.device("cpu")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz="


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("mixture")
    return make_tiny_model(folder, "qwen3_moe", characters=CHARACTERS, init_scale=0.3, **SIZES)


@pytest.fixture
def make_replaying(make_args: Callable[..., Any], mixture: str) -> Callable[..., Any]:
    def make(**overrides: Any) -> Any:
        own = {"hf_checkpoint": mixture, "replay_routed_experts": True, "loss_type": "policy_loss", **overrides}
        return make_trainer(make_args(**own))

    return make


@pytest.fixture(scope="module")
def batch() -> TrainBatch:
    return rows_with_experts()


@pytest.fixture(scope="module")
def expected(mixture: str, batch: TrainBatch) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    return written_gradients(dict(model.named_parameters()), model.config, batch)


def gradients(trainer: Any, batch: TrainBatch) -> dict[str, torch.Tensor]:
    trainer.zero_grad()
    trainer.accumulate(batch)
    found = {n: p.grad.double().clone() for n, p in trainer._actor.named_parameters() if p.grad is not None}
    trainer.zero_grad()
    return found


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest of all weights, relative to the weight's own gradient."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - expected[n]).norm() / expected[n].norm()) for n in expected)


def with_column(batch: TrainBatch, column: Any) -> TrainBatch:
    return replace(batch, columns={**batch.columns, "routed_experts": column})


LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {},
    "several micro-batches": {"max_tokens_per_gpu": 16},
    "padded": {},
    "recomputed": {"recompute_granularity": "full"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_equal_those_of_a_replay_that_is_written_down(
    layout: str, make_replaying: Any, batch: TrainBatch, expected: Any
) -> None:
    trainer = make_replaying(**LAYOUTS[layout])
    if layout == "padded":
        trainer._actor.set_attn_implementation("sdpa")
    assert distance(gradients(trainer, batch), expected) < 1e-5


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_replay_of_other_experts_has_other_gradients(
    mutant: str, make_replaying: Any, batch: TrainBatch, expected: Any
) -> None:
    trainer = make_replaying()
    column = MUTANTS[mutant](batch.columns["routed_experts"])
    assert distance(gradients(trainer, with_column(batch, column)), expected) > 0.5


def test_the_written_replay_is_what_transformers_computes_if_experts_are_its_own(
    mixture: str, batch: TrainBatch
) -> None:
    """So the reference is no replay of a mistake."""
    from transformers import AutoModelForCausalLM

    from buffer_rl.embedded.routers import find_routers, recorded_experts

    model: Any = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float64, experts_implementation="eager")
    tokens = batch.columns["tokens"][0].tolist()
    with torch.no_grad(), recorded_experts(model, find_routers(model)) as chosen:
        found = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    own = torch.stack(chosen, 1).numpy()
    weights = dict(model.named_parameters())
    with torch.no_grad():
        written = [written_log_probs(weights, model.config, tokens, given) for given in (own, own[:0])]
    for log_probs in written:
        expected = found[:-1].gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
        torch.testing.assert_close(log_probs, expected, atol=2e-5, rtol=0)  # transformers takes softmax in float32


def test_passes_of_the_policy_are_replayed_and_those_of_the_reference_are_not(
    make_replaying: Any, batch: TrainBatch
) -> None:
    trainer = make_replaying(use_kl_loss=True)
    weights = {name: p.detach().double() for name, p in trainer._actor.named_parameters()}
    config = trainer._actor.config
    tokens, length = batch.columns["tokens"][0].tolist(), int(batch.columns["response_length"][0])
    for model, experts in (("actor", batch.columns["routed_experts"][0]), ("ref", np.zeros((0, 4, 2), dtype=np.uint8))):
        expected = written_log_probs(weights, config, tokens, experts)[-length:]
        found = trainer.log_probs(model, batch)[0]
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)


def test_the_share_of_other_experts_counts_tokens_and_layers_that_have_given_ones(
    make_replaying: Any, batch: TrainBatch
) -> None:
    trainer = make_replaying()
    replay = RoutingReplay.of(trainer._args, trainer._actor)
    assert replay is not None
    one = batch.select([0])
    ids = torch.from_numpy(one.columns["tokens"][0].astype(np.int64))[None]
    from buffer_rl.embedded.routers import recorded_experts

    with torch.no_grad(), recorded_experts(trainer._actor, replay._names) as chosen:
        trainer._actor(input_ids=ids)
    own = torch.stack(chosen, 1).numpy().astype(np.uint8)[:-1]
    sums = trainer.accumulate(with_column(one, [own[:, :, ::-1].copy()]))  # the order is nothing
    assert sums.means()["routed_experts_differ"] == 0
    # The last layer of the last token with experts: what it chooses there has no influence on other routers.
    changed = own.copy()
    changed[-1, -1] = [expert for expert in range(8) if expert not in own[-1, -1]][:2]
    sums = trainer.accumulate(with_column(one, [changed]))
    assert sums.metrics["routed_experts_differ"].value == 1
    assert sums.metrics["routed_experts_differ"].weight == 4 * len(own)
    nothing = with_column(one, [own[:0]])
    assert trainer.accumulate(nothing).metrics["routed_experts_differ"].weight == 0
    plain = replace(one, columns={name: c for name, c in one.columns.items() if name != "routed_experts"})
    assert "routed_experts_differ" not in trainer.accumulate(plain).metrics


def test_prompts_are_shared_where_their_experts_are_equal(batch: TrainBatch, make_replaying: Any) -> None:
    lengths, responses = np.array(batch.lengths), batch.columns["response_length"]
    prompts = lengths - responses
    micro = collate(batch, CPU, packed=True)
    assert micro.packing is not None
    # Samples 0 and 1 of each group share theirs; sample 2 has the same prompt with other experts. Nothing is predicted
    # from the last token of a response.
    num_tokens = (lengths - 1).sum()
    assert len(micro.packing.token_m) == num_tokens - prompts[0] - prompts[3]
    without = collate(with_column(batch, [own[:0] for own in batch.columns["routed_experts"]]), CPU, packed=True)
    assert without.packing is not None
    assert len(without.packing.token_m) == num_tokens - 2 * prompts[0] - 2 * prompts[3]
    # The limit of a micro-batch counts prompts as they are packed, and responses as a whole.
    trainer = make_replaying(max_tokens_per_gpu=int(lengths[:3].sum() - prompts[0]))
    args = trainer._args
    assert row_blocks(args, batch.select([0, 1, 2]), packed=True) == [[0, 1, 2]]
    args = args.model_copy(update={"max_tokens_per_gpu": args.max_tokens_per_gpu - 1})
    assert len(row_blocks(args, batch.select([0, 1, 2]), packed=True)) == 2
    # A pass without replay shares all: what its tokens go to is the router's choice.
    own = (args, trainer._actor, batch, CPU, trainer._objective)
    assert all(micro.experts is None for _, micro in passes(*own))


def test_tokens_behind_the_column_have_none(batch: TrainBatch) -> None:
    whole = routed_experts(batch)
    assert whole is not None
    for row, (length, given) in enumerate(zip(batch.lengths, batch.columns["routed_experts"], strict=True)):
        assert whole[row].shape == (length, 4, 2)
        assert whole[row].dtype == np.int16
        assert np.array_equal(whole[row][: len(given)], given)
        assert (whole[row][len(given) :] == -1).all()
        assert len(given) == length - (3 if row % 3 == 2 else 1)
    micro = collate(batch, CPU)
    assert micro.experts is not None
    assert micro.experts.shape == (micro.tokens_bl.numel(), 4, 2)
    assert (micro.experts[:, 0, 0] >= 0).sum() == sum(map(len, batch.columns["routed_experts"]))
    assert routed_experts(batch.select([])) is None


@pytest.mark.parametrize(
    "wrong",
    [
        lambda own: np.concatenate([own, own]),  # of more tokens than there are
        lambda own: own[:, :3],
        lambda own: own[:, 0],
        lambda own: own.astype(np.float32),
    ],
)
def test_experts_of_another_row_or_model_are_an_error_that_names_the_row(wrong: Any, batch: TrainBatch) -> None:
    column = list(batch.columns["routed_experts"])
    column[1] = wrong(column[1])
    with pytest.raises(DataError, match="its experts have the shape") as caught:
        collate(with_column(batch, column), CPU)
    assert caught.value.where == str(batch.row_ids[1])


@pytest.mark.parametrize("wrong", [lambda own: own + 6, lambda own: np.concatenate([own, own], axis=1)])
def test_experts_that_the_model_does_not_have_are_refused_before_a_pass(
    wrong: Any, make_replaying: Any, batch: TrainBatch
) -> None:
    column = [wrong(own) for own in batch.columns["routed_experts"]]
    with pytest.raises(DataError, match="its experts have the shape"):
        make_replaying().accumulate(with_column(batch, column))


def test_models_without_known_routers_and_trainers_without_replay_are_refused(
    make_args: Callable[..., Any], mixture: str
) -> None:
    with pytest.raises(ConfigError, match=r"routers of Qwen3ForCausalLM cannot be given experts: .*no experts"):
        make_trainer(make_args(replay_routed_experts=True))

    class Other:
        resolve = staticmethod(lambda kind, name: lambda *given: make_trainer(make_args(hf_checkpoint=mixture)))

    trainer = make_trainer(make_args(hf_checkpoint=mixture))
    assert not trainer.replays_experts
    args = make_args(hf_checkpoint=mixture, replay_routed_experts=True)
    with pytest.raises(ConfigError, match="sends tokens to the experts that its own routers choose"):
        build_trainer(args, Other(), 0, 1, trainer._objective)  # type: ignore[arg-type]


ROUTERS: dict[str, dict[str, Any]] = {
    "Qwen2Moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1]},
    "Mixtral": {"num_local_experts": 8},
    "GptOss": {"num_local_experts": 8, "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default"}},
    "Glm4Moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_of_other_architectures_take_given_experts(name: str, make_args: Callable[..., Any]) -> None:
    """Sigmoid scores, groups of experts, softmax over the chosen ones alone, dense layers between."""
    model = other_model(name)
    replay = RoutingReplay.of(make_args(replay_routed_experts=True), model)
    assert replay is not None
    assert len(replay._names) == (2 if name in ("Qwen2Moe", "Glm4Moe") else 3)


def test_a_model_whose_routers_choose_in_another_way_is_refused(make_args: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="PhimoeTopKRouter chose 0 times"):
        RoutingReplay.of(make_args(replay_routed_experts=True), other_model("Phimoe", num_local_experts=8))


def other_model(name: str, **settings: Any) -> Any:
    import transformers

    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512}
    config = getattr(transformers, f"{name}Config")(**{**sizes, **ROUTERS.get(name, {}), **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, 0.3)
    return model


@pytest.fixture(scope="module")
def split_ranks(mixture: str, batch: TrainBatch, forked_processes: None, tmp_path_factory: Any) -> list[Any]:
    """What two ranks that split the model found: in float32 with recomputed layers, and in bfloat16."""
    common = {"hf_checkpoint": mixture, "train_device": "cpu", "fsdp_size": 2, "max_tokens_per_gpu": 24}
    args = compose(CORE_SECTIONS)(**common, replay_routed_experts=True)
    folder = tmp_path_factory.mktemp("ranks")
    job = []
    for changes in ({"recompute_granularity": "full"}, {"bf16": True}):
        deal = [copy.deepcopy(batch.select(rows)) for rows in ([0, 1, 2, 3], [4, 5])]
        job.append(("torch", args.model_copy(update=changes), [[deal]]))
    file = folder / "job"
    file.write_bytes(pickle.dumps(job))
    return [[found["steps"][0] for found in ranks] for ranks in zip(*run_ranks(2, file), strict=True)]


@pytest.mark.slow
def test_a_model_that_is_split_over_ranks_replays_too(split_ranks: list[Any], batch: TrainBatch, expected: Any) -> None:
    exact, coarse = split_ranks
    for rank in exact:
        assert distance({n: g.double() * rank["divisor"] for n, g in rank["gradient"].items()}, expected) < 1e-5
    for rank in coarse:
        found = {n: g.double() * rank["divisor"] for n, g in rank["gradient"].items()}
        assert distance(found, expected) < 0.35  # a mutant is further away than 0.5
    rounded, right = (
        np.concatenate([row for rank in ranks for deal in rank["actor"] for row in deal]) for ranks in split_ranks[::-1]
    )
    # By rounding 0.05 nats on three kinds of processors; 2.5 if the routers choose for themselves.
    assert np.abs(rounded - right).mean() < 0.25
