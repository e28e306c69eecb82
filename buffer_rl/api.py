"""``buffer_rl.train``: a run from Python, as ``buffer-rl train`` runs it, with functions passed as objects.

The run has a process of its own, so that a notebook keeps its event loop, its signals and its memory. What the run
prints is printed here; an error of the run is raised here; Ctrl-C ends the run as it ends the command.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from buffer_rl.cluster.process import PARENT_FD_FLAG, exit_with_parent
from buffer_rl.errors import BufferRLError, ConfigError, WorkerError
from buffer_rl.observe.curve import CURVE_FILE
from buffer_rl.observe.gains import EvalGain, eval_gains
from buffer_rl.observe.metrics import read_metrics, steps_of
from buffer_rl.observe.report import run_files
from buffer_rl.options.section import compose, plugin_kind_of
from buffer_rl.options.sources import resolve
from buffer_rl.verbs.train import sections_of

SHORT_NAMES: Mapping[str, str] = {
    "reward": "custom_rm_path",
    "group_reward": "custom_group_rm_path",
    "generate": "custom_generate_function_path",
    "rollout": "rollout_function_path",
    "filter": "dynamic_sampling_filter_path",
    "loss": "custom_loss_function_path",
}
FUNCTIONS = "functions"
"""The folder of a run's folder with the functions that were passed by value."""
_STUB = '''"""Passed to buffer_rl.train as {name}, by value."""

from pathlib import Path

import cloudpickle

{name} = cloudpickle.loads(Path(__file__).with_suffix(".pickle").read_bytes())
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a run has measured and where its files are.

    metrics: of each training step, by name, see docs/metrics.md. evaluation: first and last mean reward, by evaluation
    set. paths: what the run wrote, by a short name such as ``report`` or ``metrics``.
    """

    run_dir: Path
    metrics: Mapping[int, Mapping[str, float]]
    evaluation: Mapping[str, EvalGain]
    paths: Mapping[str, Path]

    @classmethod
    def of(cls, run_dir: str | Path) -> TrainResult:
        """Read the folder of a run, finished or not. Raises DataError if it has no metrics."""
        records = read_metrics(run_dir)
        gains = {gain.name: gain for gain in eval_gains(records)}
        return cls(run_dir=Path(run_dir), metrics=steps_of(records), evaluation=gains, paths=run_files(run_dir))

    def _repr_png_(self) -> bytes | None:
        """The learning curve, which a notebook shows."""
        picture = self.run_dir / CURVE_FILE
        return picture.read_bytes() if picture.exists() else None


def train(config: str | Path | Sequence[str | Path] | Mapping[str, Any] = (), **options: Any) -> TrainResult:
    """Train as ``buffer-rl train`` does, and return what the run measured.

    config: a YAML file, several, of which later ones win, or options by name. options: those of ``docs/options.md``,
    with underscores; they win. Where an option takes the reference of a plugin, the function or class itself may be
    passed; ``reward``, ``group_reward``, ``generate``, ``rollout``, ``filter`` and ``loss`` are short names of such
    options. What a module defines is passed by its name; what a notebook or a script defines, by value.

    Raises what ended the run, ConfigError first of all: nothing is started then. KeyboardInterrupt ends the run well.
    """
    given = dict(config) if isinstance(config, Mapping) else {}
    paths = [] if given else [config] if isinstance(config, str | Path) else list(config)
    given |= options
    for short in SHORT_NAMES.keys() & given.keys():
        given[SHORT_NAMES[short]] = given.pop(short)
    with tempfile.TemporaryDirectory(prefix="buffer_rl_train_") as name:
        file = Path(name, "options.yaml")
        files = [*map(str, paths), str(file)]
        plain = {key: _text_of(value) for key, value in given.items() if not _is_by_value(value)}
        file.write_text(_as_yaml(plain), encoding="utf-8")
        found = resolve(
            compose(sections_of(given.get("plugin") or ())), flags={}, environ=os.environ, config_paths=files
        ).args
        for key in given.keys() - plain.keys():
            if not plugin_kind_of(type(found), key):
                raise ConfigError("this option takes no function", where=f"train({key}=)", expected="a plugin's option")
            plain[key] = _written(Path(found.run_dir, FUNCTIONS), key, given[key])
        file.write_text(_as_yaml(plain), encoding="utf-8")
        _run(Path(name), [part for path in files for part in ("--config", path)])
    return TrainResult.of(found.run_dir)


def _as_yaml(options: Mapping[str, Any]) -> str:
    """One option a line, so that an error names it by its line; JSON is YAML."""
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in options.items())


def _text_of(value: Any) -> Any:
    """A path as text, and a function or class of a module as the reference that names it; other values as they are."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_text_of(item) for item in value]
    if callable(value):
        return f"{value.__module__}:{value.__qualname__}"
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _is_by_value(value: Any) -> bool:
    """Whether it is a function or a class that another process cannot import by its name."""
    module, name = getattr(value, "__module__", "__main__"), getattr(value, "__qualname__", "")
    return callable(value) and (module == "__main__" or getattr(sys.modules.get(module), name, None) is not value)


def _written(folder: Path, name: str, value: Any) -> str:
    """Write ``value`` to ``folder``; returns the reference that reads it there."""
    try:
        data = cloudpickle.dumps(value)
    except Exception as error:  # what objects of the user raise
        hint = "open files, locks and connections in the function, or define it in a module"
        raise ConfigError(f"it cannot be passed on: {error}", where=f"train({name}=)", hint=hint) from error
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.py"
    file.with_suffix(".pickle").write_bytes(data)
    file.write_text(_STUB.format(name=name), encoding="utf-8")
    return f"{file.absolute()}:{name}"


def _run(folder: Path, arguments: Sequence[str]) -> None:
    """Run the command in a process that ends with this one, and raise what ended it."""
    answer = folder / "answer"
    read_end, lifeline = os.pipe()
    shown = sys.stdout.isatty()
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if not shown:
        environ.pop("FORCE_COLOR", None)  # notebooks set it; their cells show no progress bar that is drawn again
    command = [sys.executable, "-m", "buffer_rl.api", str(answer), *arguments, PARENT_FD_FLAG, str(read_end)]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=None if shown else subprocess.PIPE,
            stderr=None if shown else subprocess.STDOUT,
            env=environ,
            pass_fds=[read_end],
            start_new_session=True,  # Ctrl-C is passed on, once
            text=True,
            errors="replace",
        )
        os.close(read_end)
        try:
            for line in process.stdout or ():
                print(line, end="")
            status = process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.communicate()
            raise
    finally:
        os.close(lifeline)
    if answer.exists():
        error = pickle.loads(answer.read_bytes())
        assert isinstance(error, BufferRLError)
        raise error
    if status != 0:
        raise WorkerError(f"the run ended with exit status {status}", where="train", hint="its output says why")


def main(arguments: Sequence[str]) -> int:
    """The process of a run: like the command; an error is written to the first of ``arguments`` in place of printed."""
    from buffer_rl.cli import main as command

    answer, *rest, _, fd = arguments
    exit_with_parent(int(fd))
    return command(["train", *rest], lambda error: Path(answer).write_bytes(pickle.dumps(error)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
