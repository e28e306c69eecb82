"""What installed distributions offer: the entry points of buffer_rl's groups, read without importing anything."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable
from dataclasses import dataclass

OWN_DISTRIBUTION = "buffer-rl"
HOOK_GROUP = "buffer_rl"
"""Entry points of this group are pluggy plugins; those of a kind stand in ``buffer_rl.<kind>``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One entry point. ``kind`` is empty for a pluggy plugin; ``distribution`` is the normalised name."""

    kind: str
    name: str
    value: str
    distribution: str
    version: str

    @property
    def is_own(self) -> bool:
        """Whether it comes with buffer_rl itself."""
        return self.distribution == OWN_DISTRIBUTION

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} ({self.value})"


def normalise(distribution: str) -> str:
    """A distribution's name in the form in which two spellings are equal (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def read_offers() -> list[Offer]:
    """The offers of all distributions on ``sys.path``; of two copies of one distribution, the first counts."""
    offers: list[Offer] = []
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        entries = [entry for entry in distribution.entry_points if _is_ours(entry.group)]
        if not entries:
            continue
        name = normalise(distribution.metadata["Name"] or "unknown")
        if name not in seen:
            seen.add(name)
            offers.extend(_offers_of(name, distribution.version or "", entries))
    return offers


def _is_ours(group: str) -> bool:
    return group == HOOK_GROUP or group.startswith(f"{HOOK_GROUP}.")


def _offers_of(distribution: str, version: str, entries: Iterable[importlib.metadata.EntryPoint]) -> list[Offer]:
    return [
        Offer(
            kind=entry.group.removeprefix(HOOK_GROUP).removeprefix("."),
            name=entry.name,
            value=entry.value.partition("[")[0].replace(" ", ""),
            distribution=distribution,
            version=version,
        )
        for entry in entries
    ]
