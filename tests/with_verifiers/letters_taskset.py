"""A taskset in the form that verifiers documents: a reply is worth its share of the task's letter."""

from collections.abc import Iterator

import verifiers.v1 as vf


class LettersData(vf.TaskData):
    letter: str


class LettersTask(vf.Task[LettersData]):
    @vf.reward(weight=1.0)
    async def share(self, trace: vf.Trace) -> float:
        reply = trace.last_reply
        return reply.count(self.data.letter) / max(1, len(reply))

    @vf.reward(weight=0.5)
    async def begins(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.startswith(self.data.letter))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class LettersConfig(vf.TasksetConfig):
    letters: str = "abc"


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    INFINITE = True

    def load(self) -> Iterator[LettersTask]:
        number = 0
        while True:
            letter = self.config.letters[number % len(self.config.letters)]
            yield LettersTask(LettersData(prompt=f"{letter * (1 + number % 4)}=", letter=letter), self.config.task)
            number += 1


__all__ = ["LettersTaskset"]
