from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.cli import main
from buffer_rl.driver.folders import folder_lock
from harness.checkpoints import write_checkpoint

REWARD = "def score(args, sample):\n    return 1.0\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that a user stands in, with data, a model folder, a reward and options."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("my_reward", None)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "label": "b"}\n{"prompt": "c", "label": "d"}\n')
    (tmp_path / "my_reward.py").write_text(REWARD)
    (tmp_path / "run.yaml").write_text(
        "prompt_data: ${here}/train.jsonl\nhf_checkpoint: ${here}/model\nnum_rollout: 3\nlogger: []\ntrial: false\n"
        'eval_prompt_data: ["dev=${here}/train.jsonl@[:1]"]\n'
    )
    yield tmp_path
    sys.modules.pop("my_reward", None)


def train(*argv: str) -> int:
    return main(["train", "--config", "run.yaml", "--dry-run", *argv])


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert train(*argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("buffer-rl: error: ")
    assert "Traceback" not in err
    return err


def test_a_dry_run_prints_options_with_their_origins_plugins_and_data(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUFFER_RL_SEED", "5")
    assert train("--json", "--custom-rm-path", "my_reward:score") == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert shown["options"]["num_rollout"] == {"value": 3, "source": "file", "where": "run.yaml:3"}
    assert shown["options"]["seed"] == {"value": 5, "source": "environment", "where": "BUFFER_RL_SEED"}
    assert shown["options"]["custom_rm_path"]["where"] == "--custom-rm-path"
    assert shown["options"]["lr"]["source"] == "default"
    uses = {use["option"]: use for use in shown["plugins"]}
    assert uses["custom_rm_path"]["kind"] == "reward"
    assert uses["custom_rm_path"]["place"].endswith("my_reward.py:1")
    assert {"rollout_function_path", "rollout_engine", "train_backend", "weight_sync_mode"} <= set(uses)
    assert [(file["use"], file["num_rows"]) for file in shown["data"]] == [("train", 2), ("eval/dev", 1)]


def test_a_dry_run_of_a_resume_shows_what_differs_from_the_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ("--rm-type", "f1", "--lr", "1e-3", "--lr-decay-style", "cosine")
    monkeypatch.setenv("BUFFER_RL_RM_URL", "http://u:hunter2@h")
    assert train("--json", *argv) == 0
    options = {name: shown["value"] for name, shown in json.loads(capsys.readouterr().out)["options"].items()}
    write_checkpoint(folder / "saves", 2, facts={"options": options | {"engine_api_key": "***"}})
    assert train("--json", *argv, "--load", "saves", "--num-rollout", "6", "--seed", "9") == 0
    assert json.loads(capsys.readouterr().out)["changed"] == [
        {"option": "num_rollout", "then": 3, "now": 6},
        {"option": "seed", "then": options["seed"], "now": 9},
    ]
    monkeypatch.setenv("BUFFER_RL_RM_URL", "http://u:hunter3@i")
    assert train(*argv, "--load", "saves", "--num-rollout", "6") == 0
    shown = capsys.readouterr().out
    assert "--num-rollout 3, now 6" in shown
    assert '--rm-url "http://***@h", now "http://***@i"' in shown
    assert "--lr-decay-iters 3 keeps the curve" in shown
    assert "hunter" not in shown
    monkeypatch.setenv("BUFFER_RL_RM_URL", "http://u:hunter2@h")
    assert train(*argv, "--load", "saves") == 0
    assert "the checkpoint of step 2\n  none\n" in capsys.readouterr().out


@pytest.mark.parametrize("used", ["run", "saves"])
def test_a_folder_that_another_run_uses_is_refused_before_ray_starts_on_a_line_of_its_own(
    folder: Path, capsys: pytest.CaptureFixture[str], used: str
) -> None:
    argv = ["train", "--config", "run.yaml", "--rm-type", "f1", "--run-dir", "run", "--save", "saves"]
    with folder_lock(folder / used):
        assert main(argv) == 2
    out, err = capsys.readouterr()
    assert re.fullmatch(r"buffer-rl · run  checks [0-9.]+ s\n", out)
    assert f"another run is at work in '{used}'" in err


def test_steps_that_follow_from_the_batch_size_are_shown_with_its_origin(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--rollout-batch-size", "6", "--n-samples-per-prompt", "4", "--global-batch-size")
    assert train("--json", "--rm-type", "f1", *sizes, "8") == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert shown["options"]["num_steps_per_rollout"] == {"value": 3, "source": "flag", "where": "--global-batch-size"}
    assert train("--json", "--rm-type", "f1", *sizes, "8", "--num-steps-per-rollout", "3") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["options"]["num_steps_per_rollout"]["where"] == "--num-steps-per-rollout"
    assert "one of 4, 8, 12, 24" in refusal(capsys, "--rm-type", "f1", *sizes, "9")


def test_processes_that_follow_from_devices_are_shown_with_their_origin(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    devices = ("--actor-num-gpus-per-node", "2", "--resource", '{"rollout": [1, 3]}')
    assert train("--json", "--rm-type", "f1", "--rollout-batch-size", "2", *devices) == 0
    shown = json.loads(capsys.readouterr().out)["options"]
    assert shown["num_train_ranks"] == {"value": 2, "source": "flag", "where": "--actor-num-gpus-per-node"}
    assert shown["rollout_num_engines"] == {"value": 3, "source": "flag", "where": "--resource"}
    assert shown["num_ref_workers"]["source"] == "default"


def test_a_dry_run_shows_changed_options_and_all_of_them_on_request(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def options(*argv: str) -> tuple[list[str], str]:
        assert train("--rm-type", "f1", "--lr", "1e-6", "--seed", "5", *argv) == 0
        text = capsys.readouterr().out
        return re.findall(r"^  ([a-z_0-9]+) +\S.*$", text.partition("\nPlugins")[0], flags=re.MULTILINE), text

    few, text = options()
    given = {"prompt_data", "hf_checkpoint", "num_rollout", "logger", "trial", "eval_prompt_data", "rm_type", "seed"}
    assert set(few) == given
    every, whole = options("--all")
    assert len(every) > 250
    assert given | {"lr"} <= set(every)
    assert f"{len(every) - len(few)} other options have their defaults (--all shows them)" in text
    assert "given with the value of the default: lr" in text
    assert "other options" not in whole
    assert ("  trainer " in text, "  trainer " in whole) == (False, True)  # plugins that nobody chose


def test_a_dry_run_for_people_shows_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--custom-rm-path", "./my_reward.py:score") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["num_rollout", "3", "file", "run.yaml:3"] for line in lines)
    assert any("./my_reward.py:score" in line and line.startswith("  reward") for line in lines)
    assert any("train.jsonl@[:1]" in line and "1 rows" in line for line in lines)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("def score(args, sample:\n", ["my_reward.py:1", "SyntaxError"]),
        ("def scroe(args, sample):\n    return 1\n", ["'score'", "my_reward:scroe"]),
        ("def score(sample):\n    return 1\n", ["my_reward:score", "(args, sample)"]),
        ("import no_such_module_at_all\n" + REWARD, ["no_such_module_at_all"]),
    ],
)
def test_a_broken_reward_module_is_told_before_anything_starts(
    folder: Path, capsys: pytest.CaptureFixture[str], content: str, words: list[str]
) -> None:
    (folder / "my_reward.py").write_text(content)
    message = refusal(capsys, "--custom-rm-path", "my_reward:score")
    for word in words:
        assert word in message


def test_a_reference_that_does_not_exist_is_told_without_importing_torch(folder: Path) -> None:
    program = (
        "import sys\nfrom buffer_rl.cli import main\n"
        "status = main(['train', '--config', 'run.yaml', '--custom-rm-path', 'my_rewrad:score'])\n"
        "print(status, 'torch' in sys.modules, 'ray' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60, cwd=folder
    )
    assert done.stdout.strip() == "2 False False"
    assert "my_reward:score" in done.stderr


def test_a_bad_data_line_is_told_before_plugins_are_imported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "my_reward.py").write_text("raise RuntimeError('imported')\n" + REWARD)
    (folder / "train.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    message = refusal(capsys, "--custom-rm-path", "my_reward:score")
    assert "train.jsonl:2: invalid JSON" in message
    assert "imported" not in message


def test_a_flag_replaces_the_option_of_the_file_that_it_excludes_with_a_notice(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run.yaml").write_text((folder / "run.yaml").read_text() + "custom_rm_path: my_reward:score\n")
    (folder / "longer.yaml").write_text("num_epoch: 2\n")
    assert train("--config", "longer.yaml", "--rm-type", "exact_match", "--json") == 0
    out, err = capsys.readouterr()
    options = {name: option["value"] for name, option in json.loads(out)["options"].items()}
    assert [options[name] for name in ("rm_type", "custom_rm_path", "num_rollout", "num_epoch")] == [
        *("exact_match", None),
        *(None, 2),
    ]
    assert err.splitlines() == [
        "buffer-rl: notice: --rm-type exact_match (flag --rm-type) replaces --custom-rm-path my_reward:score "
        "(file run.yaml:7)",
        "buffer-rl: notice: --num-epoch 2 (file longer.yaml:1) replaces --num-rollout 3 (file run.yaml:3)",
    ]


def test_rows_without_labels_that_may_have_them_in_another_field_are_a_notice(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    notice = "no row has a label, which --rm-type exact_match may compare with"
    assert train("--rm-type", "exact_match", "--eval-label-key", "answer") == 0
    assert capsys.readouterr().err == f"buffer-rl: notice: {folder}/train.jsonl: {notice} (--label-key answer?)\n"
    for argv in (["--label-key", "answer"], ["--label-key", "none"]):
        assert train("--rm-type", "exact_match", *argv) == 0
        assert "notice" not in capsys.readouterr().err
    assert train("--custom-rm-path", "my_reward:score") == 0
    assert "notice" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--hf-checkpoint", "absent"], ["--hf-checkpoint", "--hf-checkpoint absent: there is no such folder"]),
        (
            ["--hf-checkpoint", "absent", "--prompt-data", "no.jsonl"],
            ["--hf-checkpoint absent: there is no such folder", "no.jsonl", "no such file"],
        ),
        (["--ref-load", "."], ["--ref-load", "config.json"]),
        (["--load", "absent"], ["--load absent", "no such folder"]),
        (["--load", "model"], ["--load", "no checkpoint"]),
        (["--eval-prompt-data", "dev=absent.jsonl"], ["absent.jsonl", "no such file"]),
        (["--rm-type", "exact_mach"], ["exact_mach", "exact_match"]),
        (["--num-epoch", "1", "--num-rollout", "2"], ["exclude each other", "--num-rollout 2 (flag --num-rollout)"]),
    ],
)
def test_what_is_absent_or_contradictory_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], argv: list[str], words: list[str]
) -> None:
    message = refusal(capsys, *([] if "--rm-type" in argv else ["--custom-rm-path", "my_reward:score"]), *argv)
    for word in words:
        assert word in message


def test_a_model_folder_without_tokenizer_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model" / "tokenizer.json").unlink()
    assert "no tokenizer in" in refusal(capsys, "--custom-rm-path", "my_reward:score")


def test_rows_beyond_a_rope_whose_frequencies_change_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4096}
    (folder / "model" / "config.json").write_text(json.dumps({"rope_scaling": rope}))
    assert "add --engine-context-length 4096" in refusal(capsys, "--custom-rm-path", "my_reward:score")
    external = ["--custom-rm-path", "my_reward:score", "--router-url", "http://127.0.0.1:1"]
    assert "add --rollout-max-context-len 4096" in refusal(capsys, *external)
    assert train(*external, "--rollout-max-context-len", "4096") == 0


@pytest.mark.parametrize("flag", ["--run-dir", "--save"])
def test_a_folder_that_cannot_be_written_is_told_before_anything_starts(
    folder: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    message = refusal(capsys, "--custom-rm-path", "my_reward:score", flag, "train.jsonl/run")
    assert f"{flag}: " in message
    assert "train.jsonl' is a file" in message


def test_a_save_folder_of_another_run_is_told_before_anything_starts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(folder / "saves", 2)
    argv = ["--custom-rm-path", "my_reward:score", "--save", "saves"]
    message = refusal(capsys, *argv)
    for word in ("--save saves: ", "step 2", "begins at step 0", "--load saves"):
        assert word in message
    assert main(["train", "--config", "run.yaml", *argv]) == 2
    assert sorted(path.name for path in (folder / "saves").iterdir()) == ["step_000002"]
    assert train(*argv, "--load", "saves") == 0
    assert train(*argv[:2]) == 0


def test_a_run_dir_that_cannot_be_made_is_one_message(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["train", "--config", "run.yaml", "--custom-rm-path", "my_reward:score", "--run-dir", "/proc/run"]
    assert main(argv) == 2
    assert "buffer-rl: error: --run-dir: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words"), [("exact_mach", ["did you mean 'exact_match'?"]), ("my_reward:score", ["registered names"])]
)
def test_a_reward_that_a_row_chooses_and_nobody_offers_is_told_with_its_line(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, words: list[str]
) -> None:
    row = json.dumps({"prompt": "x", "metadata": {"rm_type": name}})
    with (folder / "train.jsonl").open("a") as file:
        file.write(row + "\n")
    message = refusal(capsys, "--rm-type", "exact_match")
    for word in ["train.jsonl:3: ", repr(name), *words]:
        assert word in message
    assert "write module:function" not in message
    assert train("--custom-rm-path", "my_reward:score") == 0  # one's own function comes before what rows choose


@pytest.mark.parametrize("reward", ["reasoning_gym", "reasoning_gym_partial", "remote", "math"])
def test_a_file_of_hostile_rows_is_refused_with_its_line(
    folder: Path, capsys: pytest.CaptureFixture[str], reward: str
) -> None:
    program = f"__import__('pathlib').Path({str(folder / 'ran')!r}).touch()"
    entry = {"question": "?", "answer": program, "metadata": {"problem": program, "direction": "ascending"}}
    metadata = {"rm_type": reward, "source_dataset": "bitwise_arithmetic", "entry": entry}
    rows = [{"prompt": "a", "label": "b"}, {"prompt": "x", "label": program, "metadata": metadata}]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    message = refusal(capsys, "--rm-type", "exact_match")
    for word in ("train.jsonl:2: ", repr(reward), "does not let rows choose", f"--row-rm-types {reward}"):
        assert word in message
    assert "train.jsonl:2: " in refusal(capsys, "--rm-type", "exact_match", "--row-rm-types", "f1", "gpqa")
    held_out = ["--prompt-data", "train.jsonl@[:1]", "--eval-prompt-data", "dev=train.jsonl"]
    assert "train.jsonl:2: " in refusal(capsys, "--rm-type", "exact_match", *held_out)
    assert not (folder / "ran").exists()


def test_rows_choose_a_reward_that_is_listed_and_marked_as_safe_for_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.jsonl").write_text(json.dumps({"prompt": "x", "label": "1", "metadata": {"rm_type": "f1"}}) + "\n")
    assert train("--rm-type", "exact_match", "--row-rm-types", "numeric", "f1") == 0
    assert train("--rm-type", "f1") == 0  # the user's own choice
    assert train("--custom-group-rm-path", "rm_hub.remote:score_group", "--rm-url", "http://127.0.0.1/x") == 0
    no_evaluation = ["--eval-prompt-data", "--eval-interval", "none"]
    assert train("--rollout-function-path", "sft", "--loss-type", "sft_loss", *no_evaluation) == 0  # scores no row
    capsys.readouterr()
    for name, words in (
        ("reasoning_gym_partial", "not marked as safe"),
        ("reasoning_gym", "@rows_may_choose"),
        ("f2", "f1"),
    ):
        message = refusal(capsys, "--rm-type", "f1", "--row-rm-types", name)
        assert "--row-rm-types" in message
        assert words in message
    (folder / "my_plugin.py").write_text(
        "from buffer_rl.kinds.marks import rows_may_choose\nfrom buffer_rl.plugin.hookspecs import hookimpl\n"
        "async def unmarked(args, sample): return 1.0\n"
        "@rows_may_choose\nasync def marked(args, sample): return 1.0\n"
        "@rows_may_choose\nclass Marked:\n    def __call__(self, args, sample): return 1.0\n"
        "@hookimpl\ndef buffer_rl_provide(kind):\n"
        "    both = {'marked': marked, 'unmarked': unmarked, 'instance': Marked()}\n"
        "    return both if kind == 'reward' else {}\n"
    )
    flags = ["-p", "my_plugin", "--rm-type", "f1", "--row-rm-types"]
    assert train(*flags, "marked", "instance") == 0
    capsys.readouterr()
    assert "'unmarked' is not marked as safe" in refusal(capsys, *flags, "marked", "unmarked")


def test_an_evaluation_sets_own_configuration_may_name_any_registered_reward(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = json.dumps({"prompt": "x", "label": "1", "metadata": {"rm_type": "remote", "dataset": "chain_sum"}})
    (folder / "own.jsonl").write_text(row + "\n")
    for options in ("rm_type: reasoning_gym", "metadata_overrides: {rm_type: reasoning_gym}"):
        (folder / "eval.yaml").write_text(f"datasets: [{{name: own, path: '${{here}}/own.jsonl', {options}}}]\n")
        assert train("--rm-type", "exact_match", "--eval-config", "eval.yaml") == 0
        alone = ["--hf-checkpoint", "model", "--rm-type", "f1", "--eval-config", "eval.yaml", "--logger", "--dry-run"]
        assert main(["eval", *alone, "--no-trial"]) == 0
    capsys.readouterr()
    (folder / "eval.yaml").write_text("datasets: [{name: own, path: '${here}/own.jsonl'}]\n")
    assert "own.jsonl:1: " in refusal(capsys, "--rm-type", "exact_match", "--eval-config", "eval.yaml")


def test_a_blocked_plugin_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "blocked" in refusal(capsys, "--rm-type", "exact_match", "-p", "no:exact_match")


PLUGIN = """
from typing import ClassVar

from buffer_rl.options.section import Section, option
from buffer_rl.errors import ConfigError
from buffer_rl.plugin.hookspecs import hookimpl


class PaceOptions(Section):
    heading: ClassVar[str] = "Pace"

    pace_limit: int = option(7, "an option of this plugin", ge=1)


@hookimpl
def buffer_rl_add_options():
    return [PaceOptions]


@hookimpl
def buffer_rl_configure(config):
    if config.pace_limit > 100:
        raise ConfigError("too fast", where="--pace-limit")
"""


def test_a_plugin_named_with_p_adds_options_of_its_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "pace_plugin.py").write_text(PLUGIN)
    flags = ("--json", "--custom-rm-path", "my_reward:score")
    assert train("-p", "pace_plugin", "--pace-limit", "3", *flags) == 0
    assert json.loads(capsys.readouterr().out)["options"]["pace_limit"]["value"] == 3
    err = refusal(capsys, "-p", "pace_plugin", "--pace-limit", "0", *flags)
    assert "--pace-limit" in err
    assert "--pace-limit" in refusal(capsys, "--pace-limit", "3", *flags)


def test_a_dry_run_makes_the_checks_of_plugins_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "pace_plugin.py").write_text(PLUGIN)
    err = refusal(capsys, "-p", "pace_plugin", "--pace-limit", "101", "--custom-rm-path", "my_reward:score")
    assert "--pace-limit: too fast" in err


def test_several_sources_and_an_eval_config_are_validated_before_anything_starts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "more.jsonl").write_text('{"prompt": "e"}\n')
    (folder / "eval.yaml").write_text(
        'datasets: [{name: own, path: "${here}/more.jsonl", rm_type: exact_match, temperature: 0}]\n'
    )
    flags = ["--prompt-data", "train.jsonl", "more.jsonl", "--eval-config", "eval.yaml", "--rm-type", "exact_match"]
    assert train("--json", *flags, "--prompt-data-weights", "3", "1") == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    files = [(file["use"], file["path"].rpartition("/")[2], file["num_rows"]) for file in shown["data"]]
    assert files == [
        ("train", "train.jsonl", 2),
        ("train", "more.jsonl", 1),
        ("eval/dev", "train.jsonl@[:1]", 1),
        ("eval/own", "more.jsonl", 1),
    ]
    assert "--prompt-data-weights" in refusal(capsys, *flags, "--prompt-data-weights", "1")
    assert "the same rows come twice" in refusal(
        capsys, "--rm-type", "exact_match", "--prompt-data", *["more.jsonl"] * 2
    )
    score = ["--custom-rm-path", "my_reward:score"]
    assert "'own' names an rm_type" in refusal(capsys, *score, "--eval-config", "eval.yaml")
    (folder / "eval.yaml").write_text("datasets:\n- name: own\n  path: more.jsonl\n  rm_type: exact_mach\n")
    message = refusal(capsys, *flags)
    assert "eval.yaml" in message
    assert "'exact_mach'" in message
    (folder / "eval.yaml").write_text("datasets:\n- name: own\n  pth: more.jsonl\n")
    assert "eval.yaml:3: unknown option 'pth'" in refusal(capsys, *flags)


def test_a_row_that_chooses_an_unknown_reward_is_named_in_the_second_source(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "more.jsonl").write_text('{"prompt": "e"}\n{"prompt": "f", "metadata": {"rm_type": "nobody"}}\n')
    message = refusal(capsys, "--prompt-data", "train.jsonl", "more.jsonl", "--rm-type", "exact_match")
    assert "more.jsonl:2" in message
    assert "'nobody'" in message
