"""Options of verifiers, and ``verifiers://TASKSET`` as a path of data: the tasks of a taskset, listed at start.

A name of a taskset becomes the path of a file with its rows, which is named by its contents. So a run resumes as with
any data set: with the same rows, or with an error if the taskset has changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from buffer_rl.errors import ConfigError
from buffer_rl.observe.terminal import say
from buffer_rl.options.checks import refuse
from buffer_rl.options.section import Section, flag_of, option
from buffer_rl.plugin.hookspecs import hookimpl
from buffer_rl.plugin.shipping import search_folders

if TYPE_CHECKING:
    from buffer_rl.args import Args

PROGRAM = Path(__file__).with_name("program.py")
SCHEME = "verifiers://"
ARGS_VARIABLE = "BUFFER_RL_VERIFIERS_ARGS"
DATA_OPTIONS = ("prompt_data", "eval_prompt_data")
LIST_S = 3600.0
"""For a taskset to list its tasks, downloads included."""
SHOWN_LINES = 20
_PATH = re.compile(r"([^=@]+=)?verifiers://([\w./@-]*[\w/-])(@\[(-?\d*):(-?\d*)\])?")


class VerifiersOptions(Section):
    """Environments of verifiers."""

    heading: ClassVar[str] = "verifiers"

    verifiers_python: str = option(
        sys.executable, "Python interpreter that has verifiers, in a separate environment", metavar="FILE"
    )
    verifiers_args: dict[str, Any] = option(
        {},
        "the environment's configuration, as verifiers has it in its [env] block, but for the taskset's id: for "
        'example {"taskset": {"split": "train"}, "agent": {"max_turns": 8}}',
        metavar="JSON",
    )
    verifiers_programs: int = option(
        1, "number of processes per rollout worker that play episodes (--agent-path verifiers)", ge=1
    )
    verifiers_episodes: int | None = option(
        None,
        "maximum number of episodes at a time in each of these processes; if not set: --agent-max-processes, shared by "
        "--verifiers-programs",
        ge=1,
    )


if TYPE_CHECKING:

    class VerifiersArgs(Args, VerifiersOptions):
        """The options of a run with those of this plugin, for a type checker."""


@hookimpl
def buffer_rl_add_options() -> list[str]:
    """The section above, by reference."""
    return [f"{__name__}:VerifiersOptions"]


@hookimpl
def buffer_rl_local_paths(config: Any, facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """The paths of files with the rows of tasksets, in place of their names. Raises ConfigError for a name that is
    none, and if the tasks cannot be listed, with the end of what that has printed."""
    changed = {name: list(getattr(config, name) or ()) for name in DATA_OPTIONS}
    meant = {
        (name, place): _parsed(path, flag_of(name))
        for name, paths in changed.items()
        for place, path in enumerate(paths)
        if SCHEME in path
    }
    files: dict[str, Path] = {}
    for (name, place), (label, taskset, rows, _) in meant.items():
        if taskset not in files:
            limit = _limit(end for _, other, _, end in meant.values() if other == taskset)
            files[taskset] = _listed(config, taskset, limit, f"{flag_of(name)} {SCHEME}{taskset}")
        changed[name][place] = f"{label}{files[taskset]}{rows}"
    return {name: changed[name] for name in dict.fromkeys(name for name, _ in meant)}


def command(config: VerifiersArgs) -> list[str]:
    """The program in the environment of verifiers, but for its verb. Its own folder is not on its path."""
    return [config.verifiers_python, "-P", str(PROGRAM)]


def environ(config: VerifiersArgs) -> dict[str, str]:
    """Variables of its process: its environment is its own, and tasksets may be in the run's folder. The arguments may
    have keys in them, which a command line would show."""
    folders = os.pathsep.join(search_folders())
    return {"PYTHONPATH": folders, "PYTHONUNBUFFERED": "1", ARGS_VARIABLE: json.dumps(config.verifiers_args)}


def _parsed(path: str, flag: str) -> tuple[str, str, str, str | None]:
    """Label, taskset, slice, and its end: empty if it has none; None without a slice, or if it starts from the end."""
    expected = "verifiers://TASKSET, or verifiers://TASKSET@[start:end]"
    if (match := _PATH.fullmatch(path)) is None:
        raise ConfigError(f"{path!r} names no taskset", where=flag, expected=expected)
    from_last = (match[4] or "").startswith("-")
    return match[1] or "", match[2], match[3] or "", None if from_last else match[5]


def _limit(ends: Iterable[str | None]) -> int | None:
    """How many tasks are read, if each slice has an end that is counted from the first one."""
    found = [int(end) if end and not end.startswith("-") else None for end in ends]
    return None if None in found else max(end for end in found if end is not None)


def _listed(config: VerifiersArgs, taskset: str, limit: int | None, where: str) -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "buffer_rl" / "verifiers"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        rows = Path(temporary, "rows.jsonl")
        words = [*command(config), "rows", taskset, str(rows), *([] if limit is None else ["--limit", str(limit)])]
        variables = {**os.environ, **environ(config)}
        try:
            done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=LIST_S)
        except OSError as error:
            raise ConfigError(f"it cannot be run: {error}", where=f"--verifiers-python {words[0]}") from error
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"its tasks were not listed within {LIST_S:g} s", where=where) from error
        if done.returncode:
            _refuse(done.stderr, words[0], where)
        name = f"{re.sub(r'[^A-Za-z0-9_-]+', '_', taskset)}-{hashlib.sha256(rows.read_bytes()).hexdigest()[:12]}.jsonl"
        path = rows.replace(folder / name)
    say(f"buffer-rl: notice: {where}: {path}", file=sys.stderr)
    return path


def _refuse(printed: str, python: str, where: str) -> None:
    tail = "\n".join(printed.strip().splitlines()[-SHOWN_LINES:]) or "it printed nothing"
    absent = "No module named 'verifiers'" in tail or "No module named 'aiohttp'" in tail
    hint = "make verifiers-env installs one: --verifiers-python .venv-verifiers/bin/python"
    expected = "a Python whose environment has verifiers"
    refuse(absent, f"--verifiers-python {python}: {tail.splitlines()[-1]}", hint, expected)
    raise ConfigError(f"its tasks cannot be listed:\n{tail}", where=where, hint="--verifiers-args configures it")
