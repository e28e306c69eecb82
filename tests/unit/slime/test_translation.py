"""Each flag of slime has its verdict, and the file of options says what the flags said."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import ConfigError
from buffer_rl.options.help import default_text
from buffer_rl.options.section import Section, compose, flag_of, option
from buffer_rl.options.sources import resolve
from buffer_rl.options.values import read_yaml
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl_sglang.options import OWN, SglangOptions
from buffer_rl_slime.scripts import flags as slime_flags
from buffer_rl_slime.scripts.flags import known_flag
from buffer_rl_slime.scripts.meaning import Verdict, reasons
from buffer_rl_slime.scripts.shell_expansion import Argument
from buffer_rl_slime.scripts.shell_script import Launch
from buffer_rl_slime.scripts.shell_values import computed, unset
from buffer_rl_slime.scripts.translation import Line, Translation, _scalar, translate, yaml_text
from buffer_rl_slime.scripts.verdicts import Target
from buffer_rl_trackers.options import TrackerOptions

S, R, N, C, T = Verdict.SAME, Verdict.RENAMED, Verdict.NOT_NEEDED, Verdict.CHANGES, Verdict.NOT_YET
OPTIONS = compose([*CORE_SECTIONS, SglangOptions, TrackerOptions])


class MegatronOptions(Section):
    """Some of what a Megatron trainer has."""

    heading: ClassVar[str] = "Megatron"

    tensor_model_parallel_size: int = option(1, "ranks")
    sequence_parallel: bool = option(False, "norms")
    recompute_method: str | None = option(None, "which layers")
    num_layers: int | None = option(None, "layers")


WITH_MEGATRON = compose([*CORE_SECTIONS, SglangOptions, TrackerOptions, MegatronOptions])


def target(*, megatron: bool = False, torch: bool = False, laptop: bool = False) -> Target:
    return Target(
        options_class=WITH_MEGATRON if megatron else OPTIONS,
        names=PluginRegistry.from_flags([]).names,
        megatron=frozenset(MegatronOptions.model_fields if megatron else ()),
        with_megatron=megatron and not torch,
        laptop=laptop,
    )


def translated(*words: str, program: str = "train.py", of: Target | None = None) -> Translation:
    arguments = tuple(Argument(word, "run.sh:1") for word in words)
    launch = Launch(program=program, arguments=arguments, words=arguments, where="run.sh:1")
    return translate(launch, of or target())


def lines(*words: str, **more: Any) -> dict[str, Line]:
    return {line.flag: line for line in translated(*words, **more).lines if not line.flag.startswith("(")}


VERDICTS: tuple[tuple[str, Verdict, str, Mapping[str, object]], ...] = (
    ("--lr 1e-6", S, "", {"lr": "1e-6"}),
    ("--rollout_batch_size=4", S, "", {"rollout_batch_size": "4"}),
    ("--use-kl-loss", S, "", {"use_kl_loss": "true"}),
    ("--no-rollout-shuffle", S, "", {"rollout_shuffle": "false"}),
    ("--kl-loss-type low_var_kl", S, "", {"kl_loss_type": "low_var_kl"}),
    ("--kl-loss-type k9", T, "one of k1", {}),
    ("--rollout-stop-token-ids 1 2", S, "", {"rollout_stop_token_ids": ["1", "2"]}),
    ("--sglang-mem-fraction-static 0.7", S, "", {"sglang_mem_fraction_static": "0.7"}),
    ("--sglang-dp-size 4", T, "take more engines", {}),
    ("--sglang-max-running-requests 9", R, "--engine-max-running-requests 9", {"engine_max_running_requests": "9"}),
    ("--eval-prompt-data aime /a.jsonl b /b.jsonl", S, "", {"eval_prompt_data": ["aime=/a.jsonl", "b=/b.jsonl"]}),
    ("--eval-prompt-data /a.jsonl", S, "lone path", {"eval_prompt_data": ["aime=/a.jsonl"]}),
    ("--eval-prompt-data a /a.jsonl b", T, "pairs", {}),
    ("--hf-checkpoint /m/ --ref-load /m_torch_dist", N, "reference model is --hf-checkpoint", {}),
    ("--hf-checkpoint /m --ref-load /other_torch_dist", C, "slime starts from these weights", {}),
    ("--save /s --load /s/", S, "or starts", {"load": "/s/"}),
    ("--save /s --load /m", C, "resumes a run of buffer-rl", {}),
    ("--rm-type exact_match", S, "", {"rm_type": "exact_match"}),
    ("--rm-type math", C, "math_boxed is slime's math", {"rm_type": "math_boxed"}),
    ("--rm-type gpqa", C, "gpqa_lenient is slime's gpqa", {"rm_type": "gpqa_lenient"}),
    ("--rm-type deepscaler", C, "rm_hub/README.md", {"rm_type": "deepscaler"}),
    ("--rm-type remote_rm", S, "", {"rm_type": "remote_rm"}),
    ("--custom-config-path absent.yaml", T, "cannot read the file", {}),
    ("--rm-type nothing", T, "no reward of this name", {}),
    ("--custom-rm-path a.b", S, "your function", {"custom_rm_path": "a.b"}),
    ("--group-rm --custom-rm-path a.b", R, "--custom-group-rm-path", {"custom_group_rm_path": "a.b"}),
    ("--custom-rm-path a.b --rm-type math", N, "--custom-rm-path scores every sample", {}),
    ("--eval-input-key question", S, "", {"eval_input_key": "question"}),
    ("--eval-label-key answer", S, "", {"eval_label_key": "answer"}),
    ("--group-rm", N, "by itself", {}),
    ("--advantage-estimator gspo", S, "", {"advantage_estimator": "gspo"}),
    ("--advantage-estimator grop", T, "did you mean grpo?", {}),
    ("--loss-type policy_loss", N, "--advantage-estimator", {}),
    ("--loss-type sft_loss --debug-train-only", N, "starts no engine", {}),
    ("--debug-train-only", T, "--load-debug-rollout-data", {}),
    ("--num-rollout 3 --num-epoch 1", N, "--num-rollout counts", {}),
    ("--num-epoch 1", S, "", {"num_epoch": "1"}),
    (
        "--num-rollout 10 --rollout-batch-size 4 --n-samples-per-prompt 8 --global-batch-size 16 "
        "--lr-warmup-fraction 0.1",
        R, "--lr-warmup-iters 2, of 20 steps", {"lr_warmup_iters": "2"},
    ),
    ("--num-rollout 10 --lr-decay-iters 50 --lr-warmup-fraction 0.1", R, "of 50 steps", {"lr_warmup_iters": "5"}),
    ("--lr-warmup-fraction 0.1", T, "follows from the data", {}),
    ("--calculate-per-token-loss", R, "token-mean", {"loss_agg_mode": "token-mean"}),
    ("--hidden-dropout 0.0", N, "no dropout", {}),
    ("--hidden-dropout 0.1", C, "no dropout", {}),
    ("--optimizer adam", N, "AdamW", {}),
    ("--optimizer sgd", C, "AdamW", {}),
    ("--swiglu", N, "--hf-checkpoint", {}),
    ("--use-wandb", S, "", {"use_wandb": "true"}),
    ("--wandb-team x", S, "", {"wandb_team": "x"}),
    ("--wandb-entity x", R, "--wandb-team x", {"wandb_team": "x"}),
    ("--wandb-key x", N, "WANDB_API_KEY", {}),
    ("--disable-wandb-random-suffix", N, "the name of the run folder", {}),
    ("--wandb-anything x", T, "no flag of slime or Megatron", {}),
    ("--tensor-model-parallel-size 1", N, "nothing is split", {}),
    ("--tensor-model-parallel-size 2 --sequence-parallel", T, "not split", {}),
    ("--sequence-parallel", N, "nothing is split", {}),
    ("--moe-aux-loss-coeff 0 --moe-router-load-balancing-type seq_aux_loss", N, "weight 0", {}),
    ("--moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type seq_aux_loss", C, "balances", {}),
    ("--rollout-num-gpus-per-engine 8", S, "", {"rollout_num_gpus_per_engine": "8"}),
    ("--rollout-num-gpus-per-engine 16", T, "one node", {}),
    ("--update-weight-transport nccl", R, "distributed", {"weight_sync_mode": "distributed"}),
    ("--update-weight-mode delta", T, "whole", {}),
    ("--custom-loss-function-path a.b", T, "TokenLoss", {}),
    ("--train-backend megatron", T, "torch", {}),
    (
        "--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
        R, "nonzero_std", {"dynamic_sampling_filter_path": "nonzero_std"},
    ),
    ("--data-source-path slime.rollout.data_source.RolloutDataSource", N, "by itself", {}),
    ("--no-such-flag 1", T, "no flag of slime or Megatron", {}),
)  # fmt: skip


def test_a_custom_config_file_stays(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("max_turns: 3\n")
    line = lines("--custom-config-path", str(file))["--custom-config-path"]
    assert (line.verdict, line.options) == (Verdict.SAME, {"custom_config_path": str(file)})


@pytest.mark.parametrize(("command", "verdict", "why", "options"), VERDICTS, ids=lambda each: str(each)[:60])
def test_the_verdict_of_a_flag(command: str, verdict: Verdict, why: str, options: Mapping[str, object]) -> None:
    found = lines(*command.split())
    last = next(word for word in reversed(command.split()) if word.startswith("--")).partition("=")[0].replace("_", "-")
    line = found[last]
    assert (line.verdict, dict(line.options)) == (verdict, dict(options))
    assert why in line.why


def test_the_last_of_a_flag_that_comes_twice_counts() -> None:
    line = lines("--lr", "1", "--seed", "3", "--lr=2")["--lr"]
    assert line.options == {"lr": "2"}
    assert "last one counts" in line.why


def test_values_without_a_flag_are_an_error() -> None:
    with pytest.raises(ConfigError, match="'x' belongs to no flag"):
        translated("x", "--lr", "1")
    assert translated(unset("EXTRA"), "--lr", "1").lines[0].flag == "--lr"


def test_megatrons_flags_are_the_same_where_its_trainer_is() -> None:
    words = (
        "--tensor-model-parallel-size",
        "2",
        "--sequence-parallel",
        "--num-layers",
        "3",
        "--recompute-method",
        "uniform",
    )
    found = lines(*words, of=target(megatron=True))
    assert [line.verdict for line in found.values()] == [S, S, N, S]
    assert found["--tensor-model-parallel-size"].why == "with --train-backend megatron"
    assert found["--tensor-model-parallel-size"].left_out == ""
    added = {line.flag: line.value for line in translated(*words, of=target(megatron=True)).added}
    assert (added["--train-backend"], added["--bf16"]) == ("megatron", "true")
    other = lines(*words, of=target(megatron=True, torch=True))
    assert [line.verdict for line in other.values()] == [S, S, N, N]
    assert other["--sequence-parallel"].left_out == "with train_backend: megatron"


def test_what_slime_does_by_itself_is_added_where_a_run_does_otherwise() -> None:
    added = {name: raw for line in translated("--use-kl-loss").added for name, raw in line.options.items()}
    assert added == {
        "rollout_engine": "sglang",
        "rollout_shuffle": "false",
        "rollout_skip_special_tokens": "false",
        "input_key": "input",
        "label_key": "none",
        "n_samples_per_prompt": "1",
        "kl_loss_type": "k1",
        "loss_agg_mode": "seq-mean-token-mean",
        "lr_decay_style": "linear",
        "weight_decay": "0.01",
        "adam_beta2": "0.999",
        "actor_num_gpus_per_node": "8",
        "grpo_std_normalization": "false",
    }
    given = ("--n-samples-per-prompt", "8", "--calculate-per-token-loss", "--adam-beta2", "0.98")
    names = {name for line in translated(*given).added for name in line.options}
    assert not names & {"loss_agg_mode", "adam_beta2", "kl_loss_type", "grpo_std_normalization"}
    gspo = {name for line in translated("--advantage-estimator", "gspo").added for name in line.options}
    assert "loss_agg_mode" not in gspo
    sft = {name for line in translated("--loss-type", "sft_loss").added for name in line.options}
    assert not sft & {"rollout_engine", "label_key", "grpo_std_normalization"}


def test_a_program_that_generates_ahead_is_said() -> None:
    line = lines("--lr", "1", program="/x/train_async.py")["train_async.py"]
    assert (line.verdict, line.options) == (R, {"schedule": "one-step-off"})
    assert lines("--loss-type", "sft_loss", program="train_async.py")["train_async.py"].verdict is N


def test_a_default_of_megatron_that_a_run_cannot_have_is_said() -> None:
    absent = [line for line in translated("--hidden-dropout", "0").lines if line.flag.startswith("(")]
    assert [(line.flag, line.verdict) for line in absent] == [("(no --attention-dropout)", C)]


def test_colocated_sides_take_turns_with_their_memory_unless_a_flag_says_otherwise() -> None:
    def offloaded(*words: str) -> dict[str, Any]:
        found = translated(*words)
        options = [line.options for line in [*found.lines, *found.added]]
        return {name: raw for own in options for name, raw in own.items() if name.startswith("offload")}

    assert offloaded() == {}
    both = {"offload_train": "true", "offload_rollout": "true"}
    assert offloaded("--colocate") == offloaded("--offload") == offloaded("--colocate", "--offload") == both
    assert offloaded("--colocate", "--no-offload-train") == {**both, "offload_train": "false"}
    assert offloaded("--offload-rollout") == {"offload_rollout": "true"}


def test_the_file_says_what_the_flags_say(tmp_path: Path) -> None:
    found = translated(
        "--hf-checkpoint", f"{unset('BASE')}/m", "--num-rollout", computed("STEPS"), "--lr", "1e-6", "--use-kl-loss",
        "--rollout-stop", "a b", "#x", "--apply-chat-template-kwargs", '{"enable_thinking": false}',
        "--eval-prompt-data", "aime", f"{unset('BASE')}/a.jsonl", "--sglang-cuda-graph-bs", "1", "2",
        "--prompt-data", "C: d", "--reward-key", "${literal}", "--release-train", "--rollout-num-gpus", "4",
    )  # fmt: skip
    file = tmp_path / "train.yaml"
    file.write_text(yaml_text(found, target(), title="t", run_dir="runs/x"))
    args: Any = resolve(OPTIONS, flags={}, environ={"BASE": "/d"}, config_paths=[str(file)]).args
    assert (args.hf_checkpoint, args.num_rollout, args.lr, args.use_kl_loss) == ("/d/m", None, 1e-6, True)
    assert (args.rollout_stop, args.apply_chat_template_kwargs) == (["a b", "#x"], {"enable_thinking": False})
    assert (args.eval_prompt_data, args.sglang_args) == (["aime=/d/a.jsonl"], {"cuda_graph_bs": [1, 2]})
    assert (args.prompt_data, args.reward_key, args.rollout_num_gpus) == (["C: d"], "${literal}", 4)
    assert (args.run_dir, args.loss_agg_mode) == ("runs/x", "seq-mean-token-mean")
    text = file.read_text()
    assert '# num_rollout: "${STEPS}"  # only a run of the script knows STEPS' in text
    assert "#   --release-train: models and Adam's moments are moved to the CPU's memory" in text
    assert found.unknown_values() == ["STEPS"]


def test_on_a_laptop_gpus_and_servers_are_comments(tmp_path: Path) -> None:
    words = ("--rollout-num-gpus", "4", "--sglang-mem-fraction-static", "0.7", "--colocate", "--lr", "1")
    laptop = target(laptop=True)
    file = tmp_path / "train.yaml"
    file.write_text(yaml_text(translated(*words, of=laptop), laptop, title="t", run_dir="r"))
    args: Any = resolve(OPTIONS, flags={}, environ={}, config_paths=[str(file)]).args
    assert (args.rollout_num_gpus, args.sglang_args, args.colocate, args.rollout_engine, args.lr) == (
        None, {}, False, "embedded", 1.0,
    )  # fmt: skip
    assert "# rollout_num_gpus: 4  # for GPUs and SGLang" in file.read_text()


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12), st.booleans())
def test_every_text_is_read_back_as_it_was(text: str, inside: bool) -> None:
    scalar = _scalar(text, inside=inside)
    node = yaml.compose(f"[{scalar}]" if inside else f"key: {scalar}  # {text}")
    value = node.value[0] if inside else node.value[0][1]
    assert (value.value, value.tag == "tag:yaml.org,2002:null") == (text, False)


def test_the_tables_agree_with_the_options() -> None:
    names = [name for each in reasons() for name in each.flags]
    assert sorted(names) == sorted(set(names))
    core = {flag_of(name)[2:] for name in compose(CORE_SECTIONS).model_fields}
    assert not core & {*names, *slime_flags.RENAMED}, "an option of the same name answers by itself"
    assert set(slime_flags.REMARKS) <= core
    assert {option for pairs in slime_flags.RENAMED.values() for option, _ in pairs} <= set(OPTIONS.model_fields)
    for flag, name, value, _ in slime_flags.DEFAULTS:
        assert default_text(OPTIONS.model_fields[name]) != value, f"{flag}: the default is slime's, and needs no line"
    for name, (values, _) in slime_flags.NEUTRAL.items():
        known = known_flag(name, [values[0]])
        assert known is not None
        assert known.verdict is N


def test_what_sglang_servers_get_from_the_run_is_known() -> None:
    unsaid = {name for name in OWN if known_flag(f"sglang-{name.replace('_', '-')}", ["1"]) is None}
    never_in_slime = {"model", "model_path", "host", "port", "api_key", "admin_api_key", "weight_version"}
    assert unsaid <= never_in_slime


def test_a_file_is_read_as_yaml(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(yaml_text(translated("--lr", "1"), target(), title="t", run_dir="r"))
    assert read_yaml(str(tmp_path / "t.yaml"), known=OPTIONS.model_fields, environ={})[0]["lr"].raw == "1"
