"""What installed distributions offer: the entry points of buffer_rl's groups, read without importing anything."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Iterable
from dataclasses import dataclass

AUTOLOAD_VARIABLE = "BUFFER_RL_DISABLE_PLUGIN_AUTOLOAD"
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


class Offers:
    """What is installed, and what of it may be used.

    blocked: names of entry points or of distributions. autoload: whether other distributions count at all.
    """

    def __init__(self, *, blocked: Iterable[str] = (), autoload: bool = True) -> None:
        self._blocked = frozenset(blocked)
        self._blocked_distributions = frozenset(normalise(name) for name in self._blocked)
        self._autoload = autoload

    @functools.cached_property
    def _read(self) -> tuple[list[Offer], dict[str, str]]:
        return read_offers()

    @property
    def broken(self) -> dict[str, str]:
        """Distributions whose entry points cannot be read, and why."""
        return self._read[1]

    def usable(self, kind: str) -> list[Offer]:
        """The offers for ``kind`` (empty: the pluggy plugins) that are neither blocked nor switched off."""
        return [offer for offer in self.all(kind) if not self.refusal(offer)]

    def all(self, kind: str) -> list[Offer]:
        """The offers for ``kind``, usable or not."""
        return [offer for offer in self._read[0] if offer.kind == kind]

    def refusal(self, offer: Offer) -> str:
        """Why an offer may not be used; empty if it may."""
        if not self._autoload and not offer.is_own:
            return f"not loaded, because {AUTOLOAD_VARIABLE} is set or autoload is off"
        return self.block(offer)

    def block(self, offer: Offer) -> str:
        """Which ``-p no:NAME`` blocks an offer; empty if none does."""
        if offer.name in self._blocked:
            return f"blocked by -p no:{offer.name}"
        if offer.distribution in self._blocked_distributions:
            return f"blocked by -p no:{offer.distribution}"
        return ""

    def is_blocked(self, name: str) -> bool:
        """Whether a name or a whole reference was blocked."""
        return name in self._blocked


def read_offers() -> tuple[list[Offer], dict[str, str]]:
    """The offers of all distributions on ``sys.path``, and what is wrong with those that cannot be read, by name.

    Of two copies of one distribution, the first counts, as in imports.
    """
    offers: list[Offer] = []
    broken: dict[str, str] = {}
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        try:
            entries = [entry for entry in distribution.entry_points if _is_ours(entry.group)]
        except Exception as error:  # the fault boundary around metadata that others wrote by hand
            if HOOK_GROUP in (distribution.read_text("entry_points.txt") or ""):
                broken[_name_of(distribution)] = f"its entry_points.txt cannot be read: {error}"
            continue
        if entries and (name := _name_of(distribution)) not in seen:
            seen.add(name)
            offers.extend(_offers_of(name, distribution.version or "", entries))
    return offers, broken


def _name_of(distribution: importlib.metadata.Distribution) -> str:
    return normalise(distribution.metadata["Name"] or "unknown")


def join_offers(offers: Iterable[object]) -> str:
    """Several sources of one name, for a message."""
    return " and ".join(str(offer) for offer in offers)


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
