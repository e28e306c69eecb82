"""Every file and every option that the documentation names exists."""

from __future__ import annotations

import pkgutil
import re
import tomllib
from pathlib import Path

import pytest
from sglang_router.router_args import RouterArgs

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.options.section import compose, flag_of, item_of_mapping
from buffer_rl_sglang.options import SglangOptions

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(DOCS.rglob("*.md")),
    *sorted(ROOT.glob("plugins/*/README.md")),
    *sorted(ROOT.glob("*_hub/README.md")),
    *sorted(ROOT.glob("examples/*/*.md")),
]
WORDS = 1_500  # of the page that newcomers read
OF_THE_READER = {"my_reward.py", "test_my_reward.py", "prepare.py", "run.yaml"}  # what "buffer-rl init" writes
OF_OTHER_COMMANDS = {
    **{"--strict": "mypy", "--logdir": "tensorboard", "--backend-store-uri": "mlflow", "--build-arg": "docker"},
    **{"--job-name": "sbatch", "--requeue": "sbatch", "--open-mode": "sbatch"},
    "--signal": "sbatch and scancel",
    **{"--fully-async": "Relax and miles", "--hybrid": "Relax", "--num-iters-per-train-update": "Relax"},
    **{"--max-weight-staleness": "miles", "--pause-generation-mode": "miles"},
    **{"--update-weights-interval": "slime", "--keep-old-actor": "slime"},
}
SOURCES = "\n".join(
    path.read_text(encoding="utf-8")
    for folder in ("buffer_rl", "benchmarks", "examples", "plugins", "tests/golden", "tests/conformance")
    for path in (ROOT / folder).rglob("*.py")
)


def files(text: str) -> set[str]:
    return set(re.findall(r"`([\w./-]+\.(?:py|md|toml|txt|yaml|svg))`", text))


def python_names(text: str) -> set[str]:
    """Modules, and what is in them, of the three packages; names of entry-point groups look the same."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    found = set(re.findall(r"\b((?:buffer_rl|rm_hub|filter_hub)(?:\.\w+)+(?::\w+)?)(?![\w*/])", text))
    return {name for name in found - set(groups) if not name.endswith((".py", ".toml"))}


def options(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w*-])", text))


def known(option: str) -> bool:
    """Whether it is an option of a run, or of a command or script of the repository."""
    name = option.removeprefix("--").removeprefix("no-").replace("-", "_")
    core = {flag_of(name) for name in compose(CORE_SECTIONS).model_fields}
    return (
        option in core
        or (option.startswith("--no-") and name in compose(CORE_SECTIONS).model_fields)
        or f'"{option}"' in SOURCES
        or bool(item_of_mapping(SglangOptions.model_fields, name)[0])  # the server's own, which its parser knows
        or (name.startswith("router_") and hasattr(RouterArgs, name.removeprefix("router_")))
        or bool(re.search(rf"^    {name}: ", SOURCES, flags=re.MULTILINE))  # of a plugin's options class
        or option in OF_OTHER_COMMANDS
        or option == "--help"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    folders = (ROOT, ROOT / "buffer_rl", page.parent)
    missing = {name for name in files(page.read_text()) if not any((folder / name).exists() for folder in folders)}
    assert missing - OF_THE_READER == set()


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent.name != "buffer_rl_slime"],  # it names slime's modules too
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_every_module_and_function_that_a_page_names_exists(page: Path) -> None:
    for name in python_names(page.read_text()):
        assert pkgutil.resolve_name(name) is not None


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent.name != "buffer_rl_slime"],  # it names slime's; see its own tests
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_every_option_that_a_page_names_exists(page: Path) -> None:
    assert {option for option in options(page.read_text()) if not known(option)} == set()


def test_the_page_on_the_architecture_is_short_and_answers_where_things_are() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8").partition("\n## Glossary\n")[0]
    assert len(text.split()) <= WORDS
    answers = [line for line in text.partition("## Where is …?")[2].splitlines() if line.startswith("| … ")]
    assert len(answers) >= 20
    for line in answers:
        assert files(line.split("|")[2]), line


def test_every_package_lists_its_modules() -> None:
    """In the docstring of its ``__init__``, a line each."""
    for init in (ROOT / "buffer_rl").rglob("__init__.py"):
        head = init.read_text(encoding="utf-8")
        modules = {path.stem for path in init.parent.glob("*.py")} - {"__init__"}
        assert {name for name in modules if not re.search(rf"\b{name}\b", head)} == set(), init.parent.name
