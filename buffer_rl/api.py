"""``buffer_rl.train``: a run from Python, as ``buffer-rl train`` runs it, with functions passed as objects.

The run has a process of its own, so that a notebook keeps its event loop, its signals and its memory. What the run
prints is printed here; an error of the run is raised here; Ctrl-C ends the run as it ends the command.
"""

from __future__ import annotations

import base64
import hashlib
import os
import pickle
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import yaml

from buffer_rl.cluster.process import PARENT_FD_FLAG
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
FOLDER = "from_python"
"""The folder of a run's folder with the options and the functions that were passed by value."""
_STUB = '''"""Passed to buffer_rl.train as {name}, by value."""

import base64

import cloudpickle

{name} = cloudpickle.loads(base64.b64decode("{data}"))
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a run has measured and where its files are.

    metrics: of each training step, by name, see docs/metrics.md. evaluation: first and last mean reward, by evaluation
    set. paths: what the run wrote, by a short name such as ``report`` or ``metrics``.
    """

    run_dir: Path
    metrics: Mapping[int, Mapping[str, float]] = field(repr=False)
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

    Raises what ended the run, ConfigError first of all: nothing is started then. KeyboardInterrupt ends the run well;
    ``TrainResult.of(run_dir)`` then returns what it has measured.
    """
    given = _named(config) if isinstance(config, Mapping) else {}
    paths = [] if given else [config] if isinstance(config, str | Path) else list(config)
    given |= _named(options)
    if isinstance(given.get("plugin"), str):
        given["plugin"] = [given["plugin"]]
    plugins = list(given.get("plugin") or ())
    plain = {key: _text_of(value) for key, value in given.items() if not _is_by_value(value)}
    with tempfile.TemporaryDirectory(prefix="buffer_rl_train_") as name:
        file = Path(name, "options.yaml")
        options_class = compose(sections_of(plugins))
        unknown = given.keys() - plain.keys() - options_class.model_fields.keys()
        file.write_text(_as_yaml(plain | dict.fromkeys(unknown)), encoding="utf-8")
        configs = [*map(str, paths), str(file)]
        with _of_caller(file):
            run_dir = Path(resolve(options_class, flags={}, environ=os.environ, config_paths=configs).args.run_dir)
        for key in given.keys() - plain.keys():
            if not plugin_kind_of(options_class, key):
                raise ConfigError("this option takes no function", where=f"train({key}=)", expected="a plugin's option")
            plain[key] = f"{_written(run_dir, key, 'py', _stub_of(key, given[key]))}:{key}"
        configs[-1] = str(_written(run_dir, "options", "yaml", _as_yaml(plain)))
        arguments = [part for path in configs for part in ("--config", path)]
        _run(Path(name, "answer"), [*(part for plugin in plugins for part in ("-p", plugin)), *arguments])
    return TrainResult.of(run_dir)


@contextmanager
def _of_caller(file: Path) -> Iterator[None]:
    """An error at a line of ``file``, which the caller has never seen, names the argument that stands there."""
    root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    names = {key.start_mark.line + 1: key.value for key, _ in root.value} if root is not None else {}

    def named(text: str) -> str:
        return re.sub(rf"(?:file )?{re.escape(str(file))}:(\d+)", lambda m: f"train({names.get(int(m[1]), '')}=)", text)

    try:
        yield
    except ConfigError as error:
        where, expected, hint = named(error.where), named(error.expected), named(error.hint)
        raise ConfigError(named(error.what), where=where, expected=expected, hint=hint, see=error.see) from error


def _named(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options by their names. Raises ConfigError for one that is given twice."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        own = SHORT_NAMES.get(name, name.replace("-", "_"))
        if own in found:
            raise ConfigError("this option is given twice", where=f"train({name}=)", hint=f"it is {own}: give it once")
        found[own] = value
    return found


def _as_yaml(options: Mapping[str, Any]) -> str:
    text = yaml.safe_dump(dict(options), allow_unicode=True, sort_keys=False, width=1 << 20)
    return text.replace("${", "$${")  # a value is no template


def _text_of(value: Any) -> Any:
    """What YAML holds: a path as text, a function or class of a module as the reference that names it, a number of
    numpy as one of Python, lists and mappings of these. Raises ConfigError for anything else."""
    if isinstance(value, Mapping):
        return {str(key): _text_of(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_text_of(item) for item in value]
    if _is_by_value(value):
        what, hint = f"{value!r:.80} is of no module", "in a list, name it as module:fn or ./file.py:fn"
        raise ConfigError(what, where="train", expected="one that can be imported by its name", hint=hint)
    if callable(value):
        return f"{value.__module__}:{value.__qualname__}"
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    value = value.item() if hasattr(value, "dtype") else value
    if not isinstance(value, str | int | float | None):
        raise ConfigError(f"{value!r:.80} is no value of an option", where="train", expected="text, numbers, lists …")
    return value


def _is_by_value(value: Any) -> bool:
    """Whether it is a function or a class that another process cannot import by its name."""
    module, name = getattr(value, "__module__", "__main__"), getattr(value, "__qualname__", "")
    return callable(value) and (module == "__main__" or getattr(sys.modules.get(module), name, None) is not value)


def _stub_of(name: str, value: Any) -> str:
    """A module whose ``name`` is the function or class ``value``."""
    try:
        data = cloudpickle.dumps(value)
    except Exception as error:  # what objects of the user raise
        hint = "open files, locks and connections in the function, or define it in a module"
        raise ConfigError(f"it cannot be passed on: {error}", where=f"train({name}=)", hint=hint) from error
    return _STUB.format(name=name, data=base64.b64encode(data).decode())


def _written(run_dir: Path, name: str, suffix: str, text: str) -> Path:
    """Write ``text`` to a file of the run that its content names, so that no file of an earlier run changes."""
    file = run_dir / FOLDER / f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:8]}.{suffix}"
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as out:
        out.write(text)  # options may hold keys
    return temporary.replace(file).absolute()


def _run(answer: Path, arguments: Sequence[str]) -> None:
    """Run the command in a process that ends with this one, and raise what ended it."""
    read_end, lifeline = os.pipe()
    shown = sys.stdout.isatty()
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(_own_folders())}
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
            status = _followed(process)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            _followed(process)
            raise
    finally:
        os.close(lifeline)
    if answer.exists():
        error = pickle.loads(answer.read_bytes())
        assert isinstance(error, BufferRLError)
        raise error
    if status != 0:
        raise WorkerError(f"the run ended with exit status {status}", where="train", hint="its output says why")


def _own_folders() -> list[str]:
    """The folders of ``sys.path`` that another interpreter of this environment has not: the user's own."""
    environment = {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, *sysconfig.get_paths().values())}

    def is_own(path: str) -> bool:
        parents = {path, *map(str, Path(path).parents)}
        return not parents & environment and not {"site-packages", "dist-packages"} & set(Path(path).parts)

    known = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    paths = [os.path.realpath(path) for path in known if isinstance(path, str) and path]
    return [path for path in dict.fromkeys(paths) if is_own(path)]


def _followed(process: subprocess.Popen[str]) -> int:
    """Print what the process prints until it ends; returns its exit status."""
    for line in process.stdout or ():
        print(line, end="", flush=True)
    return process.wait()


def main(arguments: Sequence[str]) -> int:
    """The process of a run: like the command; an error is written to the first of ``arguments`` in place of printed."""
    from buffer_rl.cli import main as command

    answer, *rest, _, fd = arguments
    threading.Thread(target=_end_with_parent, args=(int(fd),), daemon=True).start()
    return command(["train", *rest], lambda error: Path(answer).write_bytes(pickle.dumps(error)))


def _end_with_parent(fd: int) -> None:
    """End the run well, with its last checkpoint, once the other end of the pipe is closed: nobody reads its output."""
    while os.read(fd, 1):
        pass
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
