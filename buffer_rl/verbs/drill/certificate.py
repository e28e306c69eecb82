"""What a drill found, as data, as text and as one HTML page."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fault. step: the last one that was trained before it; None for one that meets samples of all steps. found:
    how the run noticed it; empty if it did not. recovered_s: seconds until the next trained step; None if there was
    none. wrong: what contradicts the certificate."""

    fault: str
    step: int | None = None
    found: str = ""
    recovered_s: float | None = None
    wrong: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether it was noticed and survived, with nothing wrong."""
        return bool(self.found) and not self.wrong


@dataclass(slots=True, kw_only=True)
class Certificate:
    """What was found, as far as it is known. command: how the drill was called. runs: of each run, by name, what is
    wrong with its end. rewards_from_failures: groups that were trained with the reward of a failed attempt. equal_bits:
    whether all ended with the weights of the undisturbed run; None if the configuration does not promise it."""

    command: str
    model: str
    num_steps: int = 0
    rows: list[Row] = field(default_factory=list)
    runs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    groups_lost: int = 0
    groups_doubled: int = 0
    rewards_from_failures: int = 0
    equal_bits: bool | None = None
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every fault was found and survived, with exact accounting."""
        clean = not any(self.runs.values()) and all(row.passed for row in self.rows)
        miscounted = self.groups_lost or self.groups_doubled or self.rewards_from_failures
        return clean and not miscounted and self.equal_bits is not False

    def facts(self) -> dict[str, Any]:
        """For JSON and the page."""
        return {
            "passed": self.passed,
            "faults": len(self.rows),
            "found": sum(bool(row.found) for row in self.rows),
            "survived": sum(row.passed for row in self.rows),
            **{key: value for key, value in asdict(self).items() if key != "rows"},
            "rows": [asdict(row) | {"passed": row.passed} for row in self.rows],
        }

    def write(self, folder: Path) -> Path:
        """``certificate.json`` and ``certificate.html``; returns the latter's path."""
        facts = self.facts()
        (folder / "certificate.json").write_text(json.dumps(facts, indent=2) + "\n")
        template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        page = folder / "certificate.html"
        page.write_text(Template(template, autoescape=True, undefined=StrictUndefined).render(facts))
        return page

    def lines(self) -> list[str]:
        """For the terminal."""
        facts = self.facts()
        bits = {None: "not promised by this configuration", True: "yes", False: "NO"}[self.equal_bits]
        found = [
            f"faults put in {facts['faults']}, found {facts['found']}, survived {facts['survived']}",
            f"groups lost {self.groups_lost}, doubled {self.groups_doubled}; rewards counted from failures "
            f"{self.rewards_from_failures}; equal bits: {bits}",
        ]
        found += [f"left out: {what}: {why}" for what, why in self.left_out.items()]
        found += [f"WRONG: {run}: {what}" for run, wrong in self.runs.items() for what in wrong]
        return [*found, "the drill is passed" if self.passed else "the drill is NOT passed"]


def line_of(row: Row) -> str:
    """One fault for the terminal."""
    if row.wrong:
        return f"{row.fault}: WRONG: {'; '.join(row.wrong)}"
    after = "" if row.recovered_s is None else f", next step trained {row.recovered_s:.1f} s later"
    return f"{row.fault}: {row.found or 'NOT FOUND'}{after}"
