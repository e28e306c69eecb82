"""What is looked at before Ray or an engine starts; each mistake is one error that names flag and file."""

from __future__ import annotations

import json
import re
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.cluster.requirements import check_devices
from buffer_rl.driver.folders import make_folders
from buffer_rl.driver.provenance import check_checkpoint, with_special_tokens
from buffer_rl.errors import CheckpointError, ConfigError
from buffer_rl.options.section import compose
from buffer_rl.options.sources import Resolved, resolve
from buffer_rl.testing.tiny import make_char_tokenizer, make_tiny_model
from buffer_rl.verbs.preflight import check_folders, check_limits, check_row_lengths
from harness.checkpoints import write_checkpoint

HEADER = json.dumps({"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})
WEIGHTS = struct.pack("<Q", len(HEADER)) + HEADER.encode() + bytes(8)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 30}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    return folder


def options(model: Path, **changes: Any) -> Any:
    chosen = {"hf_checkpoint": str(model), "run_dir": str(model.parent / "run"), **changes}
    return compose(CORE_SECTIONS)(**chosen)


def test_a_whole_model_folder_is_accepted_and_nothing_is_made(model: Path) -> None:
    check_folders(options(model, save=str(model.parent / "saves")))
    assert sorted(path.name for path in model.parent.iterdir()) == ["model"]


@pytest.mark.parametrize(("name", "flag"), [("run_dir", "--run-dir"), ("save", "--save")])
@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no /proc, the folder that takes no files")
def test_a_folder_in_which_nothing_can_be_made_is_refused(model: Path, name: str, flag: str) -> None:
    for folder in ("/proc", "/proc/of/a/run"):
        with pytest.raises(ConfigError, match=f"{flag}: .*'{folder}'"):
            check_folders(options(model, **{name: folder}))


@pytest.mark.parametrize(
    ("number", "limit", "message"),
    [
        (
            resource.RLIMIT_NOFILE,
            127,
            r"ulimit -n(.|\n)*may have 127 open files(.|\n)*at least 128(.|\n)*ulimit -n 4096",
        ),
        (resource.RLIMIT_AS, 2**32 - 1, r"ulimit -v(.|\n)*4194303 KiB of address(.|\n)*ulimit -v unlimited"),
    ],
)
def test_a_limit_with_which_no_run_starts_is_refused(
    monkeypatch: pytest.MonkeyPatch, number: int, limit: int, message: str
) -> None:
    limits = dict.fromkeys(range(16), (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    check_limits()
    limits[number] = (limit + 1, limit + 1)
    check_limits()
    limits[number] = (limit, limit)
    with pytest.raises(ConfigError, match=message):
        check_limits()


def test_a_python_without_docstrings_is_refused() -> None:
    code = "from buffer_rl.verbs.preflight import check_limits; check_limits()"
    ended = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "ConfigError: PYTHONOPTIMIZE: Python drops docstrings" in ended.stderr


@pytest.mark.parametrize(("name", "flag"), [("run_dir", "--run-dir"), ("save", "--save")])
def test_a_folder_with_too_long_a_name_is_refused_and_nothing_stays(model: Path, name: str, flag: str) -> None:
    folder = model.parent / "made" / ("x" * 300)
    with pytest.raises(ConfigError, match=f"{flag}: .*too long(.|\\n)*hint: {flag} PATH"):
        check_folders(options(model, **{name: str(folder)}))
    assert not folder.parent.exists()


def test_a_folder_that_is_there_already_stays_as_it_is(model: Path) -> None:
    (model.parent / "run").mkdir()
    check_folders(options(model, save=str(model.parent / "run" / "a" / "b")))
    assert list((model.parent / "run").iterdir()) == []


def test_checkpoints_of_another_run_are_refused_and_gone_on_from(model: Path) -> None:
    for step in (2, 3):
        write_checkpoint(model.parent / "saves", step)
    saves = str(model.parent / "saves")
    wanted = {"save": saves, "num_rollout": 10}
    check_folders(options(model, **wanted, load=saves))
    for load, begins in ((None, 0), (f"{saves}/step_000002", 2)):
        with pytest.raises(ConfigError, match=f"--save .*a checkpoint of step 3, and this run begins at step {begins}"):
            check_folders(options(model, **wanted, load=load))
    check_folders(options(model, num_rollout=10, load=f"{saves}/step_000002"))
    check_folders(options(model, num_rollout=10, load=f"{saves}/step_000002", save=str(model.parent / "branch")))


def test_a_folder_in_shards_is_accepted_and_a_missing_shard_is_named(model: Path) -> None:
    (model / "model.safetensors").rename(model / "a.safetensors")
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}})
    )
    with pytest.raises(ConfigError, match=r"--hf-checkpoint .*b\.safetensors: the weights cannot be read"):
        check_folders(options(model))
    (model / "b.safetensors").write_bytes(WEIGHTS)
    check_folders(options(model))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", None, "there is no config.json"),
        ("config.json", b"{", "is no JSON"),
        ("config.json", b"[]", "holds no JSON object"),
        ("model.safetensors", None, "there are no weights"),
        ("model.safetensors", b"", "the file is empty"),
        (
            "model.safetensors",
            WEIGHTS[:-1],
            f"damaged: {len(WEIGHTS) - 1} bytes; .*not fully covered(?s:.*)hint: copy or download the file again",
        ),
        ("model.safetensors", WEIGHTS[:20], "no safetensors file, or it is damaged: 20 bytes"),
        ("model.safetensors", b"\xff" * 64, "no safetensors file, or it is damaged: 64 bytes"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "pointer of Git LFS"),
        ("tokenizer.json", None, "there is no tokenizer"),
    ],
)
def test_a_model_folder_that_will_not_load_is_refused(
    model: Path, name: str, content: bytes | None, words: str
) -> None:
    (model / name).unlink()
    if content is not None:
        (model / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        check_folders(options(model))
    assert "--hf-checkpoint" in str(caught.value)


@pytest.mark.parametrize("name", ["ref_load", "opd_teacher_load", "critic_load"])
def test_another_model_is_looked_at_under_its_own_flag(model: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}"):
        check_folders(options(model, **{name: str(tmp_path / "other")}))


def test_a_reward_model_is_a_sequence_classifier_with_one_label_and_a_tokenizer(model: Path, tmp_path: Path) -> None:
    kind = "AutoModelForSequenceClassification"
    good = make_tiny_model(tmp_path / "good", auto_class=kind, num_labels=1)
    check_folders(options(model, rm_model=good))
    three = make_tiny_model(tmp_path / "three", auto_class=kind, num_labels=3)
    two = make_tiny_model(tmp_path / "two", auto_class=kind)  # as a configuration that says nothing
    language = make_tiny_model(tmp_path / "language", num_labels=1)
    silent = Path(make_tiny_model(tmp_path / "silent", auto_class=kind, num_labels=1))
    for file in silent.glob("tokenizer*"):
        file.unlink()
    small = make_tiny_model(tmp_path / "small", auto_class=kind, num_labels=1, characters="ab")
    make_char_tokenizer("abcd").save_pretrained(small)
    for folder, message in (
        (str(tmp_path / "absent"), "absent: there is no such folder"),
        (language, "is no sequence classifier: its architecture is Qwen3ForCausalLM"),
        (three, "config.json: the classifier has 3 labels"),
        (two, "config.json: the classifier has 2 labels"),
        (str(silent), "there is no tokenizer"),
        (small, "the tokenizer has 7 tokens, and the model 5"),
    ):
        with pytest.raises(ConfigError, match=f"--rm-model.*{re.escape(message)}"):
            check_folders(options(model, rm_model=folder))
    check_folders(options(model, rm_model=language, debug_train_only=True))  # nothing is scored


def test_a_teacher_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    student, same, larger, other = (
        Path(make_tiny_model(tmp_path / name, characters=characters))
        for name, characters in (("student", "abc"), ("same", "abc"), ("larger", "abcd"), ("other", "bac"))
    )
    for teacher in (same, larger):
        check_folders(options(student, use_opd=True, opd_teacher_load=str(teacher)))
    with pytest.raises(ConfigError, match=r"--opd-teacher-load .*other: 2 tokens have other ids .* such as '[ab]'"):
        check_folders(options(student, use_opd=True, opd_teacher_load=str(other)))
    for file in other.glob("tokenizer*"):
        file.unlink()
    check_folders(options(student, use_opd=True, opd_teacher_load=str(other)))


def test_saves_may_be_urls_and_the_run_folder_may_not(model: Path) -> None:
    args = options(model, save="memory://saves/run")
    check_folders(args)
    make_folders(args)
    with pytest.raises(ConfigError, match=r"--run-dir: 's3://\*\*\*@bucket/run' is no local folder"):
        check_folders(options(model, run_dir="s3://key:secret@bucket/run"))
    with pytest.raises(ConfigError, match="nonsense"):
        check_folders(options(model, save="nonsense://x"))
    with pytest.raises(CheckpointError, match="memory://no_such_folder"):
        check_folders(options(model, load="memory://no_such_folder"))


ROPE = {"rope_type": "longrope", "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    "config",
    [
        {"max_position_embeddings": 30, "rope_scaling": ROPE},
        {"model_type": "gemma3", "text_config": {"max_position_embeddings": 30, "rope_parameters": {"full": ROPE}}},
    ],
)
def test_sequences_beyond_a_changing_rope_are_refused_and_the_limit_is_named(model: Path, config: Any) -> None:
    (model / "config.json").write_text(json.dumps(config))
    check_row_lengths(options(model, engine_context_length=16))
    other: dict[str, Any] = {"router_url": "http://127.0.0.1:1"}
    with pytest.raises(ConfigError, match=r"'longrope'(.|\n)*may have 30(.|\n)*add --rollout-max-context-len 16"):
        check_row_lengths(options(model, **other))
    check_row_lengths(options(model, **other, rollout_max_context_len=16))
    check_row_lengths(options(model, **other, rollout_max_prompt_len=10, rollout_max_response_len=6))
    with pytest.raises(ConfigError, match="may have 17"):
        check_row_lengths(options(model, **other, rollout_max_prompt_len=10, rollout_max_response_len=7))


def test_the_reference_model_limits_the_rows_too(model: Path, tmp_path: Path) -> None:
    (tmp_path / "ref").mkdir()
    (tmp_path / "ref" / "config.json").write_text(json.dumps({"max_position_embeddings": 30, "rope_scaling": ROPE}))
    with pytest.raises(ConfigError, match=r"--ref-load(.|\n)*beyond 16 tokens"):
        check_row_lengths(options(model, ref_load=str(tmp_path / "ref")))


@pytest.mark.parametrize("name", ["engine_device", "train_device"])
def test_a_gpu_that_is_not_there_is_said_before_anything_starts(model: Path, name: str) -> None:
    import torch

    args = options(model, **{name: "cuda"})
    if torch.cuda.is_available():
        check_devices(args)
    else:
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} cuda: there is no CUDA device"):
            check_devices(args)
    check_devices(options(model, **{name: "cuda"}, ray_address="10.0.0.1:6379"))  # ranks and engines run elsewhere


def test_gpus_that_are_counted_and_not_there_are_said_before_anything_starts(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    asked = {"actor_num_gpus_per_node": 2, "num_train_ranks": 2, "rollout_num_gpus": 1}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        ConfigError, match=r"2 trainer ranks \(1 node x 2 GPUs\) and 1 engine need 3 GPUs; this machine"
    ):
        check_devices(options(model, **asked))
    check_devices(options(model, **asked, colocate=True))
    check_devices(options(model, **asked, debug_train_only=True))
    check_devices(options(model, **asked, ray_address="10.0.0.1:6379"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    check_devices(options(model, **asked))  # on the CPU


def source(source_hash: str, use: str = "train") -> dict[str, Any]:
    return {"use": use, "path": f"{source_hash}.jsonl", "source_hash": source_hash, "num_rows": 3}


def saved(folder: Path, *data: dict[str, Any], **changed: Any) -> str:
    facts = {"options": {"rollout_seed": 42, "rollout_shuffle": True, **changed}, "data": list(data)}
    write_checkpoint(folder, 1, facts=facts)
    return str(folder)


def test_a_checkpoint_of_the_same_data_is_accepted_whatever_is_evaluated(model: Path) -> None:
    args = options(model, load=saved(model.parent / "saves", source("aaa"), source("eee", "eval/dev")))
    check_checkpoint(args, [source("aaa"), source("fff", "eval/other")])


def test_a_checkpoint_of_other_data_or_of_another_order_is_refused(model: Path) -> None:
    folder = saved(model.parent / "saves", source("aaa"), source("bbb"))
    for now in (["aaa"], ["bbb", "aaa"], ["aaa", "ccc"]):
        with pytest.raises(CheckpointError, match=r"other training data: aaa\.jsonl") as caught:
            check_checkpoint(options(model, load=folder), [source(name) for name in now])
        assert f"--load {folder}" in str(caught.value)
    hint = "(?s)--rollout-seed 42, now 43: another order.*resume with --rollout-seed as it was"
    with pytest.raises(CheckpointError, match=hint):
        check_checkpoint(options(model, load=folder, rollout_seed=43), [source("aaa"), source("bbb")])


def test_other_data_of_as_many_rows_is_accepted_where_the_user_says_that_rows_were_mended(model: Path) -> None:
    folder = saved(model.parent / "saves", source("aaa"), source("bbb"))
    args = options(model, load=folder, accept_changed_rows=True)
    check_checkpoint(args, [source("aaa"), source("ccc")])
    for now in ([source("aaa")], [source("aaa"), source("ccc") | {"num_rows": 4}]):
        with pytest.raises(CheckpointError, match="as many rows in each source"):
            check_checkpoint(args, now)


def resolved(model: Path, **flags: Any) -> Resolved:
    """Options that were given as flags."""
    given = {"hf_checkpoint": str(model), **flags}
    return resolve(compose(CORE_SECTIONS), flags=given, environ={})


def test_a_resumed_run_adds_special_tokens_to_prompts_as_the_run_before_or_as_it_is_told(model: Path) -> None:
    before = {"--load of an earlier version": {}, "--load": {"add_special_tokens": False}}
    for number, options_before in enumerate(before.values()):
        folder = saved(model.parent / f"saves{number}", source("aaa"), **options_before)
        kept, notice = with_special_tokens(resolved(model, load=folder))
        assert not kept.args.add_special_tokens  # type: ignore[attr-defined]
        assert f"--load {folder}" in notice
        assert "--add-special-tokens" in notice
        for told in ("true", "false"):
            chosen, notice = with_special_tokens(resolved(model, load=folder, add_special_tokens=told))
            assert (chosen.args.add_special_tokens, notice) == (told == "true", "")  # type: ignore[attr-defined]
    folder = saved(model.parent / "new", source("aaa"), add_special_tokens=True)
    for run in (resolved(model, load=folder), resolved(model)):
        assert with_special_tokens(run) == (run, "")
        assert run.args.add_special_tokens  # type: ignore[attr-defined]


def test_a_critic_does_not_go_on_from_a_checkpoint_that_has_none(model: Path) -> None:
    folder = saved(model.parent / "saves", source("aaa"))
    ppo = {"load": folder, "advantage_estimator": "ppo"}
    for changes in ({}, {"load_debug_rollout_data": "{rollout_id}"}, {"data_source_path": "mine:Source"}):
        with pytest.raises(CheckpointError, match="without a critic, and this run has one") as caught:
            check_checkpoint(options(model, **ppo, **changes), [source("aaa")])
        assert f"--load {folder}" in str(caught.value)
    check_checkpoint(options(model, **ppo, num_rollout=0), [source("aaa")])  # an evaluation has no critic

    def with_critic(folder: Path) -> None:
        (folder / "critic").mkdir()
        (folder / "critic" / "trainer.json").write_text("{}")

    write_checkpoint(model.parent / "saves", 2, with_critic, {})
    check_checkpoint(options(model, **ppo), [source("aaa")])
    check_checkpoint(options(model, load=folder), [source("aaa")])


def test_an_evaluation_of_a_checkpoint_needs_no_training_data(model: Path) -> None:
    folder = saved(model.parent / "saves", source("aaa"))
    check_checkpoint(options(model, load=folder, num_rollout=0), [source("bbb")])


def test_a_checkpoint_that_says_nothing_of_its_data_is_left_to_the_buffer(model: Path) -> None:
    write_checkpoint(model.parent / "saves", 1)
    check_checkpoint(options(model, load=str(model.parent / "saves")), [source("aaa")])


def test_adapters_of_another_rank_do_not_go_on_from_a_checkpoint(model: Path) -> None:
    """Else the ranks would find it, once all processes are there."""
    for then, now in ((0, 4), (4, 0), (4, 8)):
        folder = saved(model.parent / f"saves{then}{now}", source("aaa"), lora_rank=then)
        with pytest.raises(CheckpointError, match=f"with --lora-rank {then}, now {now}"):
            check_checkpoint(options(model, load=folder, lora_rank=now), [source("aaa")])
        check_checkpoint(options(model, load=folder, lora_rank=then), [source("aaa")])
    of_an_earlier_version = saved(model.parent / "saves", source("aaa"))
    check_checkpoint(options(model, load=of_an_earlier_version, lora_rank=4), [source("aaa")])


def test_adapters_of_another_scale_or_of_other_layers_do_not_go_on_from_a_checkpoint(model: Path) -> None:
    """Saved are A and B, and the policy is W + alpha / rank B A: under another alpha it would be another policy."""
    then = {"lora_rank": 4, "lora_alpha": 32.0, "target_modules": ["all-linear"]}
    folder = saved(model.parent / "saves", source("aaa"), **then)
    for changed, text in (({"lora_alpha": 64.0}, "alpha 32.0, now 64.0"), ({"target_modules": ["q_proj"]}, "q_proj")):
        with pytest.raises(CheckpointError, match=f"{text}.*: other weights"):
            check_checkpoint(options(model, **{**then, **changed}, load=folder), [source("aaa")])
        with pytest.raises(CheckpointError, match=text):  # nor are they evaluated
            check_checkpoint(options(model, **{**then, **changed}, load=folder, num_rollout=0), [source("aaa")])
    without = saved(model.parent / "without", source("aaa"), lora_rank=0, lora_alpha=32.0)
    check_checkpoint(options(model, load=without, lora_alpha=64.0), [source("aaa")])  # there are no adapters


def test_groups_of_another_data_source_are_refused_before_anything_starts(model: Path) -> None:
    for then, now in (("mine:Rows", None), (None, "mine:Rows"), ("mine:Rows", "mine:Others")):
        folder = saved(model.parent / f"saves{then}{now}", source("aaa"), data_source_path=then)
        check_checkpoint(options(model, load=folder, data_source_path=then), [source("aaa")])
        with pytest.raises(CheckpointError, match=r"(?s)--data-source-path .*, now .*: other groups.*as it was"):
            check_checkpoint(options(model, load=folder, data_source_path=now), [source("aaa")])
