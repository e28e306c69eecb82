"""Tasks whose reward does once what their prompt says: raises, leaves Python, hangs. mark: a file that says it was
done."""

import asyncio
import sys
from pathlib import Path

import verifiers.v1 as vf


class FaultyData(vf.TaskData):
    mark: str = ""


class FaultyTask(vf.Task[FaultyData]):
    @vf.reward(weight=1.0)
    async def faulty(self, trace: vf.Trace) -> float:
        if self._was_done():
            return 0.75
        if self.data.prompt == "raise":
            raise ValueError("no luck")
        if self.data.prompt == "exit":
            sys.exit("out")
        if self.data.prompt == "hang":
            await asyncio.sleep(600)
        return 0.25

    def _was_done(self) -> bool:
        try:
            Path(self.data.mark).touch(exist_ok=False)
        except FileExistsError:
            return True
        return False


class FaultyTaskset(vf.Taskset[FaultyTask, vf.TasksetConfig]):
    def load(self) -> list[FaultyTask]:
        return [FaultyTask(FaultyData(prompt=name), self.config.task) for name in ("raise", "exit", "hang", "well")]


__all__ = ["FaultyTaskset"]
