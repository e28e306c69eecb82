"""What README, CONTRIBUTING and the docs tell people to type or open must exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from run import parts

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(ROOT)
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "plugins").rglob("README.md"),
        *ROOT.glob("*_hub/README.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("README.md"),
    )
)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def requirement_name(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9._-]+", requirement).group().lower().replace("_", "-")


def test_the_readme_names_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert "make quickstart" in text
    assert "make test" in text


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_make_command_of_a_page_is_a_target(page):
    text = (ROOT / page).read_text()
    assert set(re.findall(r"\bmake ([a-z][a-z-]+)(?=[\s`]| #)", "\n".join(_code(text)))) <= make_targets()


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_of_a_page_leads_to_a_file_and_to_a_heading_in_it(page):
    prose = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    assert [link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if not _leads_somewhere(ROOT / page, link)] == []


def test_a_dead_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A `page`, and [more](x.md)\n\n```\n# no heading\n```\n")
    (tmp_path / "x.md").write_text("## Twice\n## Twice\n")
    good = ["#a-page-and-more", "x.md", "x.md#twice", "x.md#twice-1", "page.md#a-page-and-more", "https://nowhere#x"]
    assert [link for link in good if not _leads_somewhere(page, link)] == []
    dead = ["y.md", "#no-heading", "x.md#thrice", "x.md#twice-2"]
    assert [link for link in dead if _leads_somewhere(page, link)] == []


def test_every_page_that_code_names_exists():
    """In docstrings, comments, hints and help texts of the packages and of what is beside them."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout.split()
    named = re.compile(r"\b(?:docs|plugins|rm_hub|filter_hub)/[\w/]*\w\.(?:md|svg)(?:#[\w-]+)?")
    written = [ROOT / file for file in files if file.endswith((".py", ".txt", ".yaml", ".sbatch", "Makefile"))]
    found = {(path, page) for path in written if path.exists() for page in named.findall(path.read_text())}
    assert len(found) > 40
    dead = {(str(path), page) for path, page in found if not _leads_somewhere(ROOT / "README.md", page)}
    assert {(path, page) for path, page in dead if page != "docs/coming_from_there.md"} == set()  # of an example


def test_the_folder_of_pages_stays_small():
    assert len(list((ROOT / "docs").glob("*.md"))) <= 15


def test_make_knows_what_to_do_for_both_commands():
    for target in ("quickstart", "test"):
        done = subprocess.run(
            ["make", "-n", target, "VENV=.no-such-environment"],
            cwd=ROOT,
            env={"PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert "-m venv .no-such-environment" in done.stdout
        assert "-c constraints.txt" in done.stdout


def test_an_old_python_is_refused_with_a_message_that_names_it(tmp_path):
    fake = tmp_path / "python-old"
    pretend = "import sys; sys.version_info = (3, 10, 0); exec(sys.argv[1])"
    fake.write_text(f'#!/usr/bin/env bash\nexec "$REAL_PYTHON" -c "{pretend}" "$2"\n')
    fake.chmod(0o755)
    done = subprocess.run(
        ["make", "env", f"PYTHON={fake}", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "REAL_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "needs Python 3.11 or newer; this is 3.10" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_the_ci_script_runs_the_tests_of_the_readme():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()


def test_every_file_of_tests_is_run_by_one_of_the_processes():
    tests = ROOT / "tests"
    files = {
        path
        for path in tests.rglob("test_*.py")
        if path.relative_to(tests).parts[0] not in ("megatron", "sglang", "with_verifiers")
    }
    found = Counter()
    for part in parts():
        left_out = [ROOT / arg.partition("=")[2] for arg in part if arg.startswith("--ignore=")]
        for place in (ROOT / arg for arg in part if not arg.startswith("-")):
            own = [place] if place.is_file() else place.rglob("test_*.py")
            found.update(path for path in own if not any(path.is_relative_to(out) for out in left_out))
    assert found == Counter(files)


def test_every_core_dependency_is_explained_and_every_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    explained = (ROOT / "CONTRIBUTING.md").read_text()
    pins = dict(
        line.lower().replace("_", "-").split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    core = {requirement_name(requirement) for requirement in project["dependencies"]}
    assert {name for name in core if name not in explained} == set()
    extras = {requirement_name(r) for rows in project["optional-dependencies"].values() for r in rows}
    assert (core | extras) - {"buffer-rl"} <= set(pins)
    assert pins["torch"] == "2.13.0"


def test_the_wheel_has_the_plugins_and_what_the_report_is_made_of():
    from hatchling.builders.wheel import WheelBuilder

    shipped = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert {f"buffer_rl/observe/templates/report.{kind}" for kind in ("html", "css", "js")} <= shipped
    plugins = ROOT / "plugins"
    assert {str(path.relative_to(plugins)) for path in plugins.rglob("*.py")} <= shipped


def _leads_somewhere(page: Path, link: str) -> bool:
    """Whether a relative link of a page leads to a file, and to a heading of it if it names one."""
    name, _, anchor = link.partition("#")
    path = page.parent / name if name else page
    return "://" in link or (path.exists() and (not anchor or anchor in _anchors(path.read_text())))


def _anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    found: Counter[str] = Counter()
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        found[re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")] += 1
    return {f"{name}-{at}" if at else name for name, count in found.items() for at in range(count)}


def _code(text: str) -> list[str]:
    """Fenced blocks and inline code of a page."""
    fenced = re.findall(r"```[a-z]*\n(.*?)```", text, flags=re.DOTALL)
    return fenced + re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
