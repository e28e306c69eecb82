from __future__ import annotations

import re
import tomllib
from pathlib import Path

from buffer_rl.verbs.table import VERBS

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_every_verb_has_its_section_and_no_other_has_one() -> None:
    headings = re.findall(r"^## `buffer-rl (\S+)`$", (DOCS / "commands.md").read_text(encoding="utf-8"), re.MULTILINE)
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert sorted(headings) == sorted([*VERBS, *project["entry-points"]["buffer_rl.verb"]])
    assert "(commands.md)" in (DOCS / "README.md").read_text(encoding="utf-8")
