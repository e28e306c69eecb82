"""The page on plugins says what the code does."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.data.custom import CustomSource, DeliveryRequest
from buffer_rl.errors import PluginError
from buffer_rl.kinds.marks import Scope, is_for_rows, scope_of
from buffer_rl.kinds.table import KINDS
from buffer_rl.options.section import compose, flag_of, plugin_kind_of
from buffer_rl.plan.roles import Role
from buffer_rl.plugin.hookspecs import Hooks
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import Sample, TrainBatch
from buffer_rl.testing.lint import failures
from buffer_rl.train.role_worker import own_stage
from harness.losses import objective_of, outcome, rows_of
from harness.streams import Store, dataset_of

PAGE = Path(__file__).parents[3] / "docs" / "plugins.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_every_kind_has_a_row_with_its_flags_and_arguments() -> None:
    rows = {row.split("|")[1].strip(" `"): row for row in PAGE.read_text(encoding="utf-8").splitlines() if "|" in row}
    for kind in KINDS.values():
        for flag in kind.flags:
            assert f"`{flag}`" in rows[kind.name], kind.name
        for argument in (*kind.positional, *(kind.methods if kind.name != "trainer" else ())):
            assert re.search(rf"\b{argument}\b", rows[kind.name]), (kind.name, argument)


HOOKS = [name for name in dir(Hooks) if name.startswith("buffer_rl_")]


def test_every_hook_has_a_row_with_its_arguments() -> None:
    rows = {row.split("|")[1].strip(" `"): row for row in PAGE.read_text(encoding="utf-8").splitlines() if "|" in row}
    for name in HOOKS:
        arguments = list(inspect.signature(getattr(Hooks, name)).parameters)[1:]
        assert re.findall(r"`(\w+)`", rows[name].split("|")[2]) == arguments, name


def test_every_hook_is_called_by_the_project_and_in_a_run_of_the_tests() -> None:
    root = PAGE.parents[1]
    sources = [path.read_text(encoding="utf-8") for path in (root / "buffer_rl").rglob("*.py")]
    runs = (root / "tests" / "integration" / "test_training.py").read_text(encoding="utf-8")
    for name in HOOKS:
        assert any(f'"{name}"' in source for source in sources), name
        assert f"def {name}(" in runs, name


def test_every_flag_of_a_kind_is_an_option_of_that_kind() -> None:
    args = compose(CORE_SECTIONS)
    kinds = {flag_of(name): plugin_kind_of(args, name) for name in args.model_fields}
    for kind in KINDS.values():
        for flag in kind.flags:
            assert kinds[flag] == kind.name


def attention(**rows: int) -> Any:
    """A module with a matrix ``a.NAME_proj.weight`` for each name."""
    matrices = {f"{name}_proj": torch.nn.Linear(4, size, bias=False) for name, size in rows.items()}
    return torch.nn.ModuleDict({"a": torch.nn.ModuleDict(matrices)})


def test_the_examples_of_converters_load_a_folder_and_export_it_bit_equal(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    for block in blocks("python"):
        if "folder_tensors" in block or "NameMap" in block:
            exec(block, names)
    prefixed = torch.nn.ModuleDict({"inner": attention(q=4, k=2, v=2, o=3)})
    weights = {name: torch.randn_like(weight) for name, weight in prefixed.inner.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    fused = attention(qkv=8, o=3)
    fused.qkv_rows = (4, 2, 2)
    for converter, model in ((names["FusedAttention"](None), fused), (names["Prefixed"](None), prefixed)):
        converter.load(model, str(tmp_path))
        exported = dict(converter.export(model))
        assert exported.keys() == weights.keys()
        assert all(torch.equal(exported[name], weight) for name, weight in weights.items())


def test_the_examples_of_losses_give_hand_computed_numbers() -> None:
    names: dict[str, Any] = {}
    for block in blocks("python"):
        if "TokenLoss" in block:
            exec(block, names)
    log_2 = math.log(2)
    batch = rows_of(
        loss_mask=[[1, 1], [1, 0]],
        advantages=[[1, 1], [-3, 9]],
        old_log_probs=[[-1, -1], [-1, -1]],
        difficulty=[0.5, 1],
    )
    log_probs = [[log_2 - 1, -1], [-1, 9]]  # ratios 2, 1 and 1

    def means(name: str) -> dict[str, float]:
        objective = objective_of(custom_loss_function_path=names[name], loss_agg_mode="seq-mean-token-sum")
        return outcome(objective, batch, log_probs).means

    clipped, ratio, weighted = (means(name) for name in ("clipped", "sequence_ratio", "weighted"))
    assert clipped["loss"] == pytest.approx((-1.2 - 1 + 3) / 2)
    assert clipped["clipped"] == pytest.approx(1 / 3)
    assert ratio["loss"] == pytest.approx((-(2**0.5) + 3) / 2)
    assert weighted["loss"] == pytest.approx((0.5 * (1 - log_2 + 1) + -3) / (2 * 0.5 + 1))
    assert (weighted["surprise"], weighted["difficulty"]) == (1, 0.75)


def test_the_examples_of_losses_hold_what_they_declare_as_the_example_of_a_test_checks() -> None:
    names: dict[str, Any] = {}
    for block in blocks("python"):
        if "TokenLoss" in block or "lint_loss" in block:
            exec(block, names)
    names["test_my_loss_holds_what_it_declares"]()
    for name in ("sequence_ratio", "weighted"):
        assert not failures(names["lint_loss"](names[name], compose(CORE_SECTIONS)())), name


def test_the_examples_work_and_the_error_reads_as_shown(place: Any) -> None:
    elsewhere = ("TokenLoss", "lint_loss", "WorkerGroup")  # the last needs Ray
    others = (b for b in blocks("python") if not any(name in b for name in elsewhere))
    reward, marked, scope, role, relative, stream, renamed, fused, source, hooks = others
    names: dict[str, Any] = {}
    exec(scope, names)
    assert scope_of(names["centred"]) is Scope.GROUP
    exec(role, names)
    columns = {"tokens": [np.array([7, 5, 6, 5])], "response_length": np.array([3])}
    batch = TrainBatch(rollout_id=0, task="train_0", row_ids=[], columns=columns)
    assert names["Novelty"](None).compute(batch)["novelty"][0].tolist() == [1, 1, 0]
    place.write("my_relative.py", relative)
    store, sizes = Store(num_selections=2), Store()
    for number, used in ((0, store), (1, store), (0, sizes)):
        used.pools[f"train_{number}"].select([used.add(10 * number + row, number) for row in (1, 2, 6)])
    row = Role(name="relative", fields=("relative",))
    stage = own_stage("my_relative:Relative", row, compose(CORE_SECTIONS)(), PluginRegistry())
    for number in range(2):
        stage.run(dataset_of(stage, store, 2), number)
        means = [float(value) for value in store.fields("relative", number)]
        assert means == [sign * (10 * number + row) for row in (1, 2, 6) for sign in (1, -1)]
    exec(stream, {"client": sizes, "num_rollout": 1})
    assert sizes.fields("size") == [4, 4, 5, 5, 9, 9]
    assert "NameMap" in renamed
    assert "folder_tensors" in fused
    place.write("my_reward.py", reward)
    place.write("my_source.py", source)
    place.write("my_hooks.py", hooks)
    registry = PluginRegistry.from_flags(["my_hooks"])
    score = registry.resolve("reward", "my_reward:score")
    assert score(None, Sample(response=" yes", label="yes")) == 1.0
    place.write("my_marked_reward.py", marked)
    assert is_for_rows(registry.resolve("reward", "my_marked_reward:score"))
    assert not is_for_rows(score)
    options: Any = compose(CORE_SECTIONS)(data_source_path="my_source:Sums", n_samples_per_prompt=2)
    delivery = CustomSource(options, registry).take(DeliveryRequest(number=0, num_groups=2, first_group=0))
    assert [[sample.prompt for sample in group] for group in delivery.groups] == [["1+1="] * 2, ["2+1="] * 2]
    with pytest.raises(PluginError) as caught:
        registry.locate("reward", "my_reward:scroe")
    assert f"buffer-rl: error: {caught.value}\n" in PAGE.read_text(encoding="utf-8")
