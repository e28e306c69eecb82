"""Environments of runs: one that misbehaves as its row says, in one sample of its group, and one that behaves."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

LEFT = "86399"
"""Seconds that a process sleeps which was left behind: so it can be told from others."""
DEADLINE_S = 3.0


class Behaves:
    """Two steps; a digit in an answer is worth a half."""

    def __init__(self, args: Any) -> None:
        self._folder = Path(args.run_dir)

    def reset(self, **row: Any) -> str:
        self._steps = 0
        self._row = row
        return str(row["seed"] % 10)

    def step(self, action: str) -> tuple[str, float, bool]:
        self._steps += 1
        return "<", 0.5 * any(letter.isdigit() for letter in action), self._steps == 2

    def reward(self) -> dict[str, float]:
        return {"score": 0.0, "steps": float(self._steps)}


class Dies(Behaves):
    """The first play of the run kills its rollout worker in the second step."""

    def step(self, action: str) -> tuple[str, float, bool]:
        answer = super().step(action)
        if self._steps == 2:
            try:
                (self._folder / "killed").touch(exist_ok=False)
            except FileExistsError:
                return answer
            os.kill(os.getpid(), signal.SIGKILL)
        return answer


class Misbehaves(Behaves):
    """``how`` of the row's metadata: in the second step of the play of one sample."""

    def step(self, action: str) -> tuple[str, float, bool]:
        answer = super().step(action)
        how = self._row["how"]
        if self._steps == 2 and self._is_first():
            if how in ("leak", "hang"):
                subprocess.Popen(f"sleep {LEFT} & (setsid sleep {LEFT} &); sleep {LEFT}", shell=True)
            if how == "raise":
                raise ValueError("it is broken")
            if how == "exit":
                raise SystemExit("it left")
            if how == "hang":
                time.sleep(600)
            if how == "late":
                time.sleep(DEADLINE_S + 1)
                (self._folder / f"answered_{self._row['seed']}").touch()
        return answer

    def close(self) -> None:
        with (self._folder / "closed.txt").open("a", encoding="utf-8") as file:
            file.write(f"{self._row['seed']}\n")

    def _is_first(self) -> bool:
        try:
            (self._folder / f"bad_{self._row['seed']}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
