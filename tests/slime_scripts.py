"""Reads slime's own launch scripts with ``import slime``: ``python tests/slime_scripts.py PATH`` of a slime checkout.

Prints a table in Markdown, one row a script, with the number of flags of each verdict and whether a dry run of the file
for a laptop succeeds, on a tiny model and tiny data; with ``--sglang-python FILE`` also of the file for SGLang engines
and the Megatron trainer on 8 GPUs, which shows what is refused and why; with ``--all`` for every script there, without
dry runs. Exits with 1 where a flag is not known, or the first dry run fails. Nothing of the checkout is copied, and
nothing of it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from buffer_rl.cli import main
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl_slime.scripts.meaning import Verdict

TITLES = {verdict: f"{verdict[:1].upper()}{verdict[1:]} (" for verdict in Verdict}
UNKNOWN = "no flag of slime or Megatron"
HERE = ("--transformer-impl", "local", "--no-moe-grouped-gemm")  # TransformerEngine is installed where GPUs are

# Scripts, and what their dry run needs besides model and data: of data of their own, and functions of their own folder.
SCRIPTS = {
    "scripts/run-qwen3-4B.sh": ("--eval-prompt-data", "aime", "data.jsonl@[:2]"),
    "scripts/run-qwen3-30B-A3B.sh": ("--eval-prompt-data", "aime", "data.jsonl@[:2]"),
    "scripts/run-glm4.7-355B-A32B.sh": ("--eval-prompt-data", "aime", "data.jsonl@[:2]"),
    "scripts/run-qwen3-235B-A22B.sh": ("--eval-prompt-data", "aime", "data.jsonl@[:2]"),
    "scripts/run-qwen3-4B-base-sft.sh": (),
    "tests/test_gspo.sh": (),
    "examples/fully_async/run-qwen2.5-0.5B-fully_async.sh": (),
    "examples/search-r1/run_qwen2.5_3B.sh": (
        "--custom-generate-function-path", "none", "--custom-rm-path", "none", "--rm-type", "exact_match",
    ),
}  # fmt: skip


def quiet_main(*argv: str) -> tuple[int, str]:
    """The exit status and the output of a command."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = main(argv)
    return status, output.getvalue()


def make_inputs(folder: Path) -> None:
    """A tiny model with a chat template, and rows that every script's field names fit."""
    make_tiny_model(folder / "model", max_position_embeddings=65536)
    config = folder / "model" / "tokenizer_config.json"
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
    (folder / "model" / "chat_template.jinja").write_text(template)
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    row = {"prompt": "1+1=", "label": "2", "reward_model": "2", "messages": turns}
    (folder / "data.jsonl").write_text(f"{json.dumps(row)}\n" * 200)


def dry_run(*flags: str) -> str:
    """What ``train --dry-run`` with ``train.yaml``, the inputs and ``flags`` says: yes, or its error."""
    has_save = "\nsave: " in Path("train.yaml").read_text()
    saves = ("--save", "saves", "--load", "saves") if has_save else ()
    inputs = ("--hf-checkpoint", "model", "--prompt-data", "data.jsonl")
    status, shown = quiet_main("train", "--config", "train.yaml", "--dry-run", *inputs, *saves, *flags)
    if status == 0:
        return "yes"
    return next(line for line in shown.splitlines() if "error: " in line).partition("error: ")[2]


def row_of(script: Path, name: str, extra: tuple[str, ...] | None, sglang: str | None) -> tuple[str, bool]:
    """One row of the table, and whether all is well. extra: flags of the dry run; None: there is none. sglang: the
    Python of the server; None: there is no dry run with it."""
    status, report = quiet_main("import", "slime", str(script), "--laptop", "--output", "train.yaml", "--force")
    if status:
        return f"| `{name}` | {report.strip().splitlines()[0]} |", False
    counts = [
        next((line[len(title) : -1] for line in report.splitlines() if line.startswith(title)), "0")
        for title in TITLES.values()
    ]
    good, outcomes = UNKNOWN not in report, []
    if extra is not None:
        outcomes.append(dry_run(*extra))
        good = good and outcomes == ["yes"]
        if sglang is not None:
            quiet_main("import", "slime", str(script), "--set", "NUM_GPUS=8", "--output", "train.yaml", "--force")
            engines = (
                ("--sglang-python", sglang) if "\nrollout_engine: sglang" in Path("train.yaml").read_text() else ()
            )
            outcomes.append(dry_run(*extra, *HERE, *engines))
    return f"| `{name}` | {' | '.join([*counts, *outcomes])} |", good


def run(checkout: Path, every: bool, sglang: str | None) -> int:
    """Print the table. Returns the exit status."""
    commit = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    print(f"slime {commit or '(no commit)'}\n")
    titles = [
        "script",
        *TITLES,
        *([] if every else ["dry run"]),
        *(["with SGLang, Megatron"] if sglang and not every else []),
    ]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    names: dict[str, tuple[str, ...] | None] = dict(SCRIPTS)
    if every:
        found = sorted(str(path.relative_to(checkout)) for path in checkout.rglob("*.sh"))
        names = {name: None for name in found if "train" in (checkout / name).read_text() and "/models/" not in name}
    good = True
    for name, extra in names.items():
        row, well = row_of(checkout / name, name, extra, sglang)
        good = good and well
        print(row, flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--sglang-python", help="a Python whose environment has the server")
    namespace = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        where = namespace.checkout.resolve()
        os.chdir(temporary)
        for variable in ("BASE_DIR", "BASE_FOLDER"):
            os.environ.setdefault(variable, temporary)
        if not namespace.all:
            make_inputs(Path(temporary))
        sys.exit(run(where, namespace.all, namespace.sglang_python))
