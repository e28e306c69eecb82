from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.cli import add_working_directory, main
from buffer_rl.options.section import flag_of, load_section
from buffer_rl.verbs import eval as eval_verb
from buffer_rl.verbs import generate


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "buffer_rl.cli", *argv], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(autouse=True)
def own_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["trian"], ["there is no verb 'trian'", "did you mean train?"]),
        (["resume"], ["there is no verb 'resume'", "hint: buffer-rl train --load auto"]),
        (["chat"], ["hint: buffer-rl generate --prompt TEXT"]),
        (["options"], ["hint: buffer-rl train --help all"]),
        (["validate"], ["hint: buffer-rl data validate"]),
        (["frobnicate"], ["hint: buffer-rl --help"]),
        (["--load"], ["unknown flag --load", "hint: see buffer-rl --help"]),
        (["ledger", "absent"], ["absent: there is no such folder", "the current folder is"]),
        (["why", "absent", "3"], ["absent: there is no such folder"]),
        (["checkpoint", "list", "absent"], ["absent: there is no such folder"]),
        (["plan", "--trace", "absent", "--gpus", "0"], ["--gpus: 0 are too few", "2 or more"]),
        (["plan", "--trace", "absent", "--cores", "0"], ["--cores: 0.0 are too few", "more than 0"]),
        (["train", "--rolout-batch-size", "3"], ["--rolout-batch-size", "did you mean --rollout-batch-size?"]),
        (["train", "--lr", "fast"], ["--lr: 'fast' is not a number >= 0 (flag --lr)"]),
        (["train", "--json"], ["--dry-run"]),
        (["train"], ["--hf-checkpoint"]),
        (["data", "validat", "x"], ["'validat'", "did you mean validate?"]),
        (["data", "show", "x", "--input-kye", "q"], ["did you mean --input-key?"]),
        (["data"], ["ACTION"]),
    ],
)
def test_mistakes_are_one_message_and_status_2(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: list[str]
) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("buffer-rl: error: ")
    assert "Traceback" not in err
    for word in words:
        assert word in err


@pytest.mark.parametrize("verb", ["data show", "report", "ledger", "checkpoint list"])
def test_a_path_that_the_system_refuses_is_an_error_that_names_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: str
) -> None:
    assert main([*verb.split(), f"{tmp_path}/{'x' * 300}"]) == 2
    err = capsys.readouterr().err
    assert re.fullmatch(r"buffer-rl: error: .*/x{300}: .*File name too long\n  hint: .*\n", err)


def test_the_traceback_is_shown_where_it_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUFFER_RL_TRACEBACK", "1")
    assert main(["trian"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_help_and_version_are_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in ("train", "plugins", "data"))
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("buffer-rl ")
    assert main([]) == 2


def help_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main([*argv]) == 0
    return capsys.readouterr().out


def flags_in(text: str) -> list[str]:
    """The options that a help page explains, without the flags of the command itself."""
    found = re.findall(r"^  (?:-.*, )?--([a-z0-9-]+)", text, flags=re.MULTILINE)
    return [flag for flag in found if flag not in ("help", "config", "dry-run", "all", "json", "prompt")]


def test_the_short_help_has_the_options_of_a_first_run_and_the_names_of_all_sections(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = help_of(capsys, "train", "--help")
    assert text == help_of(capsys, "train", "-h")
    flags = flags_in(text)
    assert 20 <= len(flags) <= 30
    assert {"hf-checkpoint", "prompt-data", "custom-rm-path", "lr", "num-rollout", "save", "load"} <= set(flags)
    assert len(text.splitlines()) < 100
    listed, _, of_plugins = text.partition("all options by section")[2].partition("of plugins: ")
    rows = re.findall(r"^  ([a-z0-9-]+) +(\d+)  ", listed, flags=re.MULTILINE)
    rows += re.findall(r"([a-z0-9-]+) (\d+)(?:,|\s*$)", of_plugins)
    whole = flags_in(help_of(capsys, "train", "--help", "all"))
    core = {name for section in CORE_SECTIONS for name in load_section(section).model_fields}
    assert {flag_of(name)[2:] for name in core} <= set(whole)
    for slug, count in rows:
        assert len(flags_in(help_of(capsys, "train", "--help", slug))) == int(count), slug
    assert sum(int(count) for _, count in rows) == len(whole)
    assert {"megatron", "sglang", "judge"} <= {slug for slug, _ in rows}
    assert "megatron" not in "".join(flags)


def test_a_section_or_an_option_is_shown_by_name_in_any_case_and_a_wrong_name_gets_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = help_of(capsys, "train", "--help", "OPTIMIZER")
    assert shown.startswith("Optimizer:\n  --lr NUM")
    assert shown == help_of(capsys, "train", "--help=optimizer")
    assert help_of(capsys, "train", "--help", "Rollout service").startswith("Rollout service:\n")
    assert flags_in(help_of(capsys, "train", "-h", "n_samples_per_prompt")) == ["n-samples-per-prompt"]
    assert main(["train", "--help", "optmizer"]) == 2
    assert "did you mean optimizer?" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["eval", "generate"])
def test_help_shows_what_acts_there_and_other_flags_change_nothing(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    short, whole = help_of(capsys, verb, "--help"), help_of(capsys, verb, "--help", "all")
    idle = {
        "lr",
        "num-rollout",
        "save-interval",
        "eps-clip",
        "use-kl-loss",
        "n-samples-per-prompt",
        "num-steps-per-rollout",
    }
    for text in (short, whole):
        assert {"hf-checkpoint", "load", "rollout-temperature", "engine-device"} <= set(flags_in(text))
        assert not idle & set(flags_in(text))
    assert len(short.splitlines()) < 80
    main([verb, "--lr", "3"])
    assert f"notice: --lr changes nothing for buffer-rl {verb}\n" in capsys.readouterr().err


def test_the_help_of_generate_says_what_options_mean_there(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(help_of(capsys, "generate", "--help").split())
    assert "--load PATH model to ask: a checkpoint, or a folder or URL of them" in text
    assert "--hf-checkpoint PATH model and tokenizer to ask" in text
    assert "training prompts" not in text
    assert "resume" not in text
    assert "training prompts" in " ".join(help_of(capsys, "train", "--help").split())


def test_what_help_leaves_out_is_an_option() -> None:
    core = {name for section in CORE_SECTIONS for name in load_section(section).model_fields}
    assert {*(eval_verb._IDLE + " " + generate._ACTS).split(), *generate._MEANINGS, *generate._PLAYERS} <= core
    headings = {load_section(section).heading for section in (*CORE_SECTIONS, "buffer_rl_sglang.options:SglangOptions")}
    assert {*eval_verb._IDLE_SECTIONS, *generate._ACTING_SECTIONS} <= headings


def test_the_whole_help_groups_the_options_and_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", "all"]) == 0
    text = capsys.readouterr().out
    run_group, data_group = text.index("\nRun:\n"), text.index("\nData:\n")
    assert run_group < text.index("--run-dir PATH") < data_group < text.index("--prompt-data")
    line = next(line for line in text.splitlines() if "--rollout-batch-size" in line and "INT" in line)
    assert "(default: 32)" in line


def test_help_and_mistakes_import_neither_torch_nor_ray() -> None:
    program = (
        "import sys\nfrom buffer_rl.cli import main\nmain(['train', '--help'])\nmain(['train', '--hepl'])\n"
        "print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "[]"


def test_a_reader_that_has_seen_enough_ends_the_command_quietly(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": "long " * 50}) + "\n" for _ in range(3000)))
    command = [sys.executable, "-m", "buffer_rl.cli", "data", "show", str(path), "-n", "3000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert [line.partition(" FOLDER")[0] for line in process.stderr] == ["buffer-rl: notice: --hf-checkpoint"]
    assert process.wait(timeout=60) == 141


def test_a_table_that_nobody_reads_ends_the_command_as_other_output_does() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "buffer_rl.cli", "plugins", "list"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


ENDS_SLOWLY = """
import atexit, sys, time
from buffer_rl.cli import main
atexit.register(lambda: (print("ending", flush=True), time.sleep(50)))
sys.argv = ["buffer-rl", "--version"]
sys.exit(main())
"""


def test_an_interrupt_while_the_process_ends_shows_no_traceback() -> None:
    command = [sys.executable, "-c", ENDS_SLOWLY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "ending" in (process.stdout.readline(), process.stdout.readline().strip())
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[1] == ""
    assert process.returncode == -signal.SIGINT


OPENED_LATER = """
import os, subprocess, sys
from buffer_rl.cli import main
main(["--version"])
with open(sys.argv[1], "w") as file:
    file.write(f"{file.fileno()} ")
    subprocess.run([sys.executable, "-c", "import os, sys; [os.fstat(fd) for fd in (0, 1, 2)]"], check=True)
    file.write("inherited" if None not in (sys.stdin, sys.stdout, sys.stderr) else "none")
"""


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_streams_that_the_caller_closed_are_those_of_the_null_device(tmp_path: Path, closed: tuple[int, ...]) -> None:
    shell = "".join(f" {stream}>&-" for stream in closed)
    command = shlex.join([sys.executable, "-c", OPENED_LATER, str(tmp_path / "file")]) + shell
    subprocess.run(command, shell=True, capture_output=True, timeout=60, check=True)
    number, inherited = (tmp_path / "file").read_text().split()
    assert int(number) > 2
    assert inherited == "inherited"


def test_the_working_directory_is_appended_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/first", "/second"])
    add_working_directory()
    add_working_directory()
    assert sys.path == ["/first", "/second", str(tmp_path)]


def test_a_working_directory_that_was_removed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["--version"]) == 2
    assert "there is no working directory any more" in capsys.readouterr().err


def test_the_process_ends_with_the_status(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text('{"prompt": "a", "label": "b"}\n')
    bad.write_text('{"prompt": "a"}\n\n{"prompt": ""}\n')
    done = run("data", "validate", str(bad), str(good))
    assert done.returncode == 2
    assert done.stderr == f"{bad}:3: the prompt 'prompt' is empty\n"
    assert done.stdout.startswith(f"{good}: 1 rows, source ")
    assert run("data", "validate", str(good)).returncode == 0
    unknown = run("train", "--no-such-flag")
    assert unknown.returncode == 2
    assert "Traceback" not in unknown.stderr


def test_data_show_prints_rows_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"q": f"ü{row}", "a": row}) + "\n" for row in range(5)), encoding="utf-8")
    assert main(["data", "show", f"{path}@[1:]", "-n", "2", "--input-key", "q", "--label_key=a"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["line"], row["row"], row["prompt"], row["label"]) for row in rows] == [
        (2, 0, "ü1", 1),
        (3, 1, "ü2", 2),
    ]


def test_python_m_is_the_command() -> None:
    command = [sys.executable, "-m", "buffer_rl", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("buffer-rl ")
