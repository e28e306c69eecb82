"""Files of a run's folder: JSONL files in general, the sample dump, and ``run.json``, what the run was started with.

A JSONL file has one object a line; readers see complete lines only. A new run keeps an earlier run's file under another
name. ``run.json`` has no secrets.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import jsonlines
from pydantic import TypeAdapter

from buffer_rl import __version__
from buffer_rl.args import Args
from buffer_rl.errors import DataError
from buffer_rl.options.redaction import mask_command, mask_secrets
from buffer_rl.options.section import flag_of
from buffer_rl.plan.algorithm import loss_of
from buffer_rl.plan.schedule import Schedule
from buffer_rl.records.groups import Sample

SAMPLES_FILE = "samples.jsonl"
RUN_FILE = "run.json"
QUARANTINE_FILE = "quarantine.jsonl"
MAX_MESSAGE, MAX_MESSAGES = 2000, 40
"""Of an agent's transcript in a sample's record: characters of a message, and messages."""
SURROGATES = "backslashreplace"
"""How files of JSON are written: a lone surrogate in a text becomes its escape, from which it is read again."""


def set_aside(path: Path) -> Path | None:
    """Rename ``path`` (a file or a folder) to the first free ``NAME.N.SUFFIX``, N from 1, where it exists.

    A new run in a folder that was used before thus neither mixes its records with the old ones nor deletes
    them. Returns the new path, or None if there was nothing to move.
    """
    if not path.exists():
        return None
    number = 1
    while (target := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(target)
    return target


class JsonlWriter:
    """Appends records to a file; every line is flushed, so that a reader never waits for a buffer.

    resume_step: go on with the file that is there, as in ``went_back``; a last line that a killed run left unfinished
    goes too. Where it is None, an existing file is set aside. step_field: of a record, what has its step. Safe to use
    from several threads.
    """

    def __init__(self, path: Path, step_field: str, resume_step: int | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._step_field, self._lock = path, step_field, threading.Lock()
        self._open(resume_step)

    def _open(self, resume_step: int | None) -> None:
        if resume_step is None:
            set_aside(self._path)
        elif self._path.exists():
            self._cut(resume_step)
        self._file: TextIO = self._path.open("a", encoding="utf-8", errors=SURROGATES)
        self._has_links = os.fstat(self._file.fileno()).st_nlink > 0  # some file systems count none
        dumps = partial(json.dumps, ensure_ascii=False, allow_nan=False)
        self._writer = jsonlines.Writer(self._file, dumps=dumps, flush=True)

    def _cut(self, resume_step: int) -> None:
        """Rewrite the file with the records to keep; it is replaced in one go."""
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        with temporary.open("w", encoding="utf-8", errors=SURROGATES) as file:
            for record in read_jsonl(self._path):
                if record[self._step_field] < resume_step + (record.get("kind") == "eval"):
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
        temporary.replace(self._path)

    def went_back(self, step: int) -> None:
        """The run goes on after ``step`` steps (-1: before everything), and what came later is done again: remove it.

        Step ``r`` of training is the work of rollout ``r``, so it stays if it is below; an evaluation at step ``r`` is
        of the weights after ``r`` steps, so the one at ``step`` itself stays as well."""
        self.close()
        self._open(step)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one line. Raises ``ValueError`` for NaN or infinity, ``TypeError`` for what JSON cannot hold, and
        DataError if the file was removed: what is written is then lost, and so may be the run's other files."""
        with self._lock:
            if self._has_links and not os.fstat(self._file.fileno()).st_nlink:
                hint = "start the run again, in another --run-dir or from a checkpoint in --save"
                raise DataError("the file was removed while the run writes to it", where=str(self._path), hint=hint)
            self._writer.write(record)

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        with self._lock:
            self._file.close()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All complete records of ``path``; an unfinished last line (a run still writing, or killed) is left out.

    Raises DataError naming file and line for a line that is not a JSON object, or if there is no such file.
    """
    if not path.is_file():
        raise DataError("there is no such file", where=str(path), expected="the metrics or samples of a run")
    records: list[dict[str, Any]] = []
    lines = path.read_bytes().split(b"\n")  # str.splitlines would also split at U+2028, which a text may hold
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
        except ValueError as error:  # also of what is not UTF-8
            raise DataError(f"not JSON: {error}", where=f"{path}:{number}", expected="one object a line") from error
        if not isinstance(record, dict):
            what = f"a {type(record).__name__}, not an object"
            raise DataError(what, where=f"{path}:{number}", expected="one object a line")
        records.append(record)
    return records


def records_in(folder: str | Path, name: str) -> list[dict[str, Any]]:
    """``read_jsonl`` of the file ``name`` in a run's folder; empty if there is none."""
    path = Path(folder, name)
    return read_jsonl(path) if path.is_file() else []


def sample_record(sample: Sample) -> dict[str, Any]:
    """The readable part of a sample, as JSON values.

    ``versions`` lists ``[version, start, end]``: response tokens start to end were sampled by that version. ``masked``
    is there for a sample that is not trained on, ``transcript`` for one that an agent played: ``[role, text]`` of each
    message (``transcript_of``).
    """
    record = {
        "uid": None if sample.uid is None else str(sample.uid),
        "sample_index": sample.sample_index,
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "reward": sample.reward,
        "status": str(sample.status),
        "versions": [[span.version, span.start, span.end] for span in sample.weight_versions],
    }
    if sample.remove_sample:
        record["masked"] = True
    if messages := sample.__dict__.get("messages"):
        record["transcript"] = transcript_of(messages)
    return record


def transcript_of(messages: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """``[role, text]`` of each message, calls of tools as JSON below its text. Of a longer text than
    ``MAX_MESSAGE`` characters the rest is left out, and of more than ``MAX_MESSAGES`` the middle ones."""
    head, tail = messages[: MAX_MESSAGES // 2], messages[max(MAX_MESSAGES // 2, len(messages) - MAX_MESSAGES // 2) :]
    shown = [[str(message.get("role", "")), cut_text(_text_of(message), MAX_MESSAGE)] for message in [*head, *tail]]
    if left_out := len(messages) - len(shown):
        shown.insert(len(head), ["", f"… {left_out} more messages"])
    return shown


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    texts = [content if isinstance(content, str) else "" if content is None else _as_json(content)]
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list | tuple) else ():
        texts.append(_as_json(call.get("function", call) if isinstance(call, Mapping) else call))
    return "\n".join(filter(None, texts))


def _as_json(value: Any) -> str:
    return json.dumps(_plain(value), ensure_ascii=False)


def cut_text(text: str, limit: int) -> str:
    """``text``, or its first ``limit`` characters and the number of those that were left out."""
    more = len(text) - limit
    return text[:limit] + (f" … {more} more characters" if more > 0 else "")


class SampleDump(JsonlWriter):
    """Writes ``samples.jsonl`` in a run's folder. ``resume_step`` as in ``MetricsFile``."""

    def __init__(self, run_dir: str | Path, *, resume_step: int | None = None) -> None:
        super().__init__(Path(run_dir) / SAMPLES_FILE, "rollout_id", resume_step)

    def write(self, rollout_id: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Append one line a sample (see ``sample_record``), each with its ``rollout_id``."""
        for sample in samples:
            self.append({"rollout_id": rollout_id, **{name: _plain(value) for name, value in sample.items()}})


def _plain(value: Any) -> Any:
    """``value`` as JSON can hold it: labels and rewards come from user code and may be of any type."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return _plain(value.item()) if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts of a run, as in ``run.json``; all empty where there is no such file.

    started: UTC, ISO 8601. start: seconds from the command until each part was ready. command: the words that started
    it, without secrets. changed: the options that differ from their defaults, by flag; options: all of them, empty if
    the run did not note them. data: use, path, number of rows and source hash of each data source. cores: that the
    driver's processes may use; None if the run did not note it. end: ``how`` the run ended, ``why``, and ``at`` which
    time; empty while it is at work, and after a kill. loss: its name or path. max_staleness: the schedule's bound; None
    if it was not noted. packages: versions by name. parts: of a run that was resumed in its folder each part, the last
    one too: ``from_step``, ``started``, ``command`` and ``changed``. lineage: that of its checkpoints.
    """

    started: str = ""
    command: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    end: Mapping[str, str] = field(default_factory=dict)
    loss: str = ""
    max_staleness: int | None = None
    start: Mapping[str, Any] = field(default_factory=dict)
    version: str = ""
    changed: Mapping[str, Any] = field(default_factory=dict)
    data: Sequence[Mapping[str, Any]] = ()
    cores: int | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    parts: Sequence[Mapping[str, Any]] = ()
    lineage: str = ""

    @property
    def is_supervised(self) -> bool:
        """Whether responses are the data's own."""
        return "sft_loss" in (self.loss, self.option("--loss-type"))

    def option(self, flag: str, default: Any = None) -> Any:
        """An option's value, or ``default`` if the run noted neither it nor all options."""
        return self.options.get(flag, self.changed.get(flag, default))


def changed_options(args: Args) -> dict[str, Any]:
    """The options that are not at their default, by flag, as JSON values without secrets."""
    values = args.model_dump(mode="json")
    fields = type(args).model_fields
    return {
        flag_of(name): mask_secrets(value, name)
        for name, value in values.items()
        if getattr(args, name) != fields[name].get_default(call_default_factory=True, validated_data={})
    }


def write_facts(
    run_dir: str | Path,
    args: Args,
    provenance: Mapping[str, Any] | None = None,
    command: Sequence[str] = (),
    resume_step: int | None = None,
) -> Path:
    """Write ``run_dir/run.json`` in place of an earlier one, of which the parts before ``resume_step`` are kept. Raises
    ``OSError``.

    provenance: what code and data the run is made of, as JSON values. command: the words that started the run."""
    path = Path(run_dir) / RUN_FILE
    facts: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "command": mask_command(command),
        "cores": len(os.sched_getaffinity(0)),
        "loss": loss_of(args),
        "max_staleness": Schedule.of(args).max_staleness,
        "changed": changed_options(args),
        "options": {flag_of(name): mask_secrets(v, name) for name, v in args.model_dump(mode="json").items()},
        **(provenance or {}),
    }
    part = {"from_step": resume_step or 0, **{name: facts[name] for name in ("started", "command", "changed")}}
    before = [each for each in read_facts(run_dir).parts if each.get("from_step", 0) < part["from_step"]]
    facts["parts"] = [*before, part]
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, facts)
    return path


def add_facts(run_dir: str | Path, **more: Any) -> None:
    """Add JSON values to ``run_dir/run.json``, if it is there. Raises ``OSError``."""
    path = Path(run_dir) / RUN_FILE
    if path.exists():
        _write(path, json.loads(path.read_text(encoding="utf-8")) | more)


def _write(path: Path, facts: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(facts, ensure_ascii=False, indent=2) + "\n", encoding="utf-8", errors=SURROGATES)


def read_facts(run_dir: str | Path) -> RunFacts:
    """The facts of the run in ``run_dir``; empty where the file is missing or has another format."""
    try:
        found = json.loads((Path(run_dir) / RUN_FILE).read_text(encoding="utf-8"))
        return TypeAdapter(RunFacts).validate_python(found)  # pydantic's own reader takes no lone surrogates
    except (OSError, ValueError):  # of pydantic too
        return RunFacts()
