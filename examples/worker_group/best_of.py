"""Two groups of workers, called as if each were one object: one writes answers, the other keeps the best of them.

python examples/worker_group/best_of.py
"""

from __future__ import annotations

import random
from functools import partial

from buffer_rl.cluster.session import ray_session
from buffer_rl.cluster.worker_group import ClassWithArgs, ResourcePool, To, WorkerGroup, register

WORDS = ["buffer", "rollout", "trainer", "policy", "reward"]


class Writer:
    def __init__(self, tries: int, seed: int) -> None:
        self.tries, self.seed = tries, seed

    @register(dispatch=To.SCATTER)  # each worker gets its share of the words; the answers come back in their order
    def write(self, words: list[str]) -> list[list[str]]:
        return [self.shuffled(word, random.Random(f"{self.seed} {word}")) for word in words]

    def shuffled(self, word: str, chance: random.Random) -> list[str]:
        return ["".join(chance.sample(word, len(word))) for _ in range(self.tries)]


class Judge:
    seen = 0

    @register(dispatch=To.SCATTER)
    def best(self, words: list[str], answers: list[list[str]]) -> list[str]:
        self.seen += len(words)
        return [max(tried, key=partial(likeness, word)) for word, tried in zip(words, answers, strict=True)]

    @register(dispatch=To.ALL)
    def rows_seen(self) -> int:
        return self.seen


def likeness(word: str, answer: str) -> int:
    return sum(a == b for a, b in zip(answer, word, strict=True))


def main() -> None:
    with (
        ray_session(None),
        WorkerGroup(ClassWithArgs(Writer, tries=200, seed=7), ResourcePool([2]), timeout_s=60) as writer,
        WorkerGroup(ClassWithArgs(Judge), ResourcePool([2]), timeout_s=60) as judge,
    ):
        answers = writer.write.start(WORDS)  # returns at once; what it will answer goes to the judges
        for word, answer in zip(WORDS, judge.best(WORDS, answers), strict=True):
            print(f"{word}: {answer}, {likeness(word, answer)} of {len(word)} letters in place")
        print(f"rows that each judge saw, one of them padding: {judge.rows_seen()}")


if __name__ == "__main__":
    main()
