"""Trackers that write down what they get, and fail where their class says; and a reader of Weights & Biases' files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from buffer_rl_trackers.logger import Start, TrackerLogger


class Recording:
    """Appends what it gets to ``recorded.jsonl`` of the run's folder."""

    def __init__(self, start: Start) -> None:
        self._file = Path(start.run_dir) / "recorded.jsonl"
        self.run_id = start.run_id or "first"
        self.place = "on a file"
        self._write(start=self.run_id, variables=sorted(os.environ), argv=sys.argv)

    def _write(self, **record: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._write(step=step, metrics=dict(metrics))

    def close(self, failed: bool) -> None:
        self._write(failed=failed)


class RaisesAtStart(Recording):
    def __init__(self, start: Start) -> None:
        raise ValueError("no such project at https://me:hidden@example.org")


class ExitsAtStart(Recording):
    def __init__(self, start: Start) -> None:
        sys.exit("not logged in")


class HangsAtStart(Recording):
    def __init__(self, start: Start) -> None:
        time.sleep(600)


class RaisesInLog(Recording):
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        raise KeyboardInterrupt("refused")


class DiesInLog(Recording):
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        os._exit(3)


class HangsInLog(Recording):
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        time.sleep(600)


class RaisesInClose(Recording):
    def close(self, failed: bool) -> None:
        raise OSError("connection lost")


class HangsInClose(Recording):
    def close(self, failed: bool) -> None:
        print("from the library", flush=True)
        time.sleep(600)


class LeavesThreads(Recording):
    """Ends with a thread and a process that would not end."""

    def close(self, failed: bool) -> None:
        import threading

        threading.Thread(target=time.sleep, args=(600,)).start()
        subprocess.Popen(["sleep", "1"])
        super().close(failed)


class TestedLogger(TrackerLogger):
    """Constructs one of the above, by name; the deadlines are for those that hang."""

    name = "tested"
    __test__ = False

    @classmethod
    def of(cls, name: str, **deadlines: float) -> type[TestedLogger]:
        return type(name, (cls,), {"tracker": globals().get(name) or type(name, (Recording,), {}), **deadlines})


def recorded(run_dir: Path) -> list[dict[str, Any]]:
    """What a ``Recording`` got, its start left out."""
    lines = (run_dir / "recorded.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if '"start"' not in line]


def wandb_records(run_dir: Path) -> list[Any]:
    """The records of all files of Weights & Biases below ``run_dir``, in the order of the files' names.

    The format is LevelDB's log: after 7 bytes, blocks of 32 KiB; a piece has a checksum, its length and its kind, which
    is whole, first, middle or last."""
    from wandb.proto.wandb_internal_pb2 import Record

    records = []
    for file in sorted(run_dir.rglob("*.wandb")):
        data, at, text = file.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            text += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):
                records.append(Record.FromString(text))
                text = b""
    return records
