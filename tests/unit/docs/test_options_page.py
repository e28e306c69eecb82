from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.options.section import compose, flag_of

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.fixture
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_options", DOCS / "generate_options.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_the_options_page_are_up_to_date(generator: ModuleType) -> None:
    page = (DOCS / "options.md").read_text(encoding="utf-8")
    assert page == generator.render_page(page), "run: python docs/generate_options.py"


def test_the_options_page_has_every_option_once() -> None:
    page = (DOCS / "options.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `--")]
    flags = [row.split("`")[1] for row in rows]
    assert flags == [flag_of(name) for name in compose(CORE_SECTIONS).model_fields]


def test_a_page_without_its_marker_is_not_overwritten(generator: ModuleType) -> None:
    with pytest.raises(ValueError, match="generate_options"):
        generator.render_page("# Options\n")
