"""Import rules that import-linter's contracts (pyproject.toml) cannot say: who may import something *directly*."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("buffer_rl", "rm_hub", "filter_hub")
RAY_MODULES = (
    "buffer_rl/*/actor.py",
    "buffer_rl/*/worker.py",
    "buffer_rl/*/client.py",
    "buffer_rl/buffer/storage.py",
    "buffer_rl/engines/host.py",
    "buffer_rl/weights/distributed.py",
    "buffer_rl/cluster/*.py",
    "buffer_rl/driver/runtime.py",
    "buffer_rl/rollout/data_source.py",
    "buffer_rl/trainer/rank.py",
    "buffer_rl/trainer/reward_model.py",
    "buffer_rl/weights/distributed.py",
)
OPTIONS_MAY_IMPORT = {"buffer_rl.args", "buffer_rl.errors"}
OF_SECTIONS = re.compile(r"buffer_rl\.(options|plan)\..*|buffer_rl\.\w+\.options")
VALUES_READ_BY = {
    "agents": {"buffer_rl.agents.template_reader"},
    "algo": {"buffer_rl.algo.kl"},
    "data": {"buffer_rl.data.difficulty"},
    "driver": {"buffer_rl.data.eval_sets"},
    "rollout": {"buffer_rl.algo.rewards", "buffer_rl.data.eval_sets"},
    "weights": {"buffer_rl.cluster.locality", "buffer_rl.engines.external"},
}
"""Modules that read the values of options, by the package of the section that checks them with these."""


def imported_names(source: str) -> set[str]:
    """Every module that the code imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return names


def modules() -> list[Path]:
    return sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def circle(imports: Mapping[str, Iterable[str]]) -> list[str]:
    """The modules of a circle of imports, the first one at both ends; empty if there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_neither_modules_nor_packages_import_each_other_in_a_circle():
    """Imports inside functions count, those for type checking alone do not."""
    plugins = [path.name for path in (ROOT / "plugins").iterdir() if (path / "__init__.py").exists()]
    graph = grimp.build_graph(*PACKAGES, *plugins, exclude_type_checking_imports=True)
    modules = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert circle(modules) == []
    packages: dict[str, set[str]] = {}
    for module, imported in modules.items():
        own = packages.setdefault(package_of(module), set())
        own.update(package_of(name) for name in imported if package_of(name) != package_of(module))
    assert circle(packages) == []
    assert circle({"a": ["b"], "b": ["c"], "c": ["a"]}) in (
        ["a", "c", "b", "a"],
        ["b", "a", "c", "b"],
        ["c", "b", "a", "c"],
    )


def package_of(module: str) -> str:
    """``buffer_rl.trainer`` for a module of it; the first part of others."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "buffer_rl" else parts[0]


def test_ray_is_imported_only_where_processes_meet():
    offenders = [
        str(path)
        for path in modules()
        if any(name.split(".")[0] == "ray" for name in imported_names((ROOT / path).read_text()))
        and not any(fnmatch(str(path), pattern) for pattern in RAY_MODULES)
    ]
    assert offenders == []


def test_option_sections_import_other_options_the_plan_and_what_reads_their_values():
    for path in modules():
        if path.name == "options.py" and path.parts[0] == "buffer_rl" and len(path.parts) > 2:
            names = {name for name in imported_names((ROOT / path).read_text()) if name.startswith("buffer_rl.")}
            names -= OPTIONS_MAY_IMPORT | VALUES_READ_BY.get(path.parts[1], set())
            assert [name for name in names if not OF_SECTIONS.fullmatch(name)] == [], path


def test_option_sections_load_nothing_that_takes_long():
    slow = {"torch", "transformers", "ray", "pyarrow", "aiohttp", "requests"}
    code = (
        "import sys; from buffer_rl.args import CORE_SECTIONS; from buffer_rl.options.section import compose; "
        f"compose(CORE_SECTIONS); print({slow!r} & set(sys.modules))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert loaded.stdout == "set()\n"


CALLS = frozenset({"call", "acall", "call_and_keep", "start", "submit", "send", "on_trained", "wait", "until", "stop"})
"""Methods whose first argument, or second after a role, says what another process is to do."""
METHOD = re.compile(r"[A-Z]\w*\.\w+|method|operation")


def methods_by_string(source: str) -> list[str]:
    """What calls in the code ask for as text: no method of a class is their first argument, or the second one."""
    found: list[str] = []
    if not re.search(rf"\.({'|'.join(CALLS)})\(\s*['\"]", source):
        return found  # most modules need not be parsed
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CALLS:
            asked = [ast.unparse(argument) for argument in node.args[:2]]
            if asked and asked[0].startswith("'") and not any(map(METHOD.fullmatch, asked)):
                found.append(next(text for text in reversed(asked) if text.startswith("'")).strip("'"))
    return found


def test_a_call_across_processes_names_a_method_and_not_a_string():
    """But the score of a reward model, which is asked for below the package of its process. An environment's calls do
    not leave the process."""
    assert methods_by_string("calls.call('train', 'fetch', 3)") == ["fetch"]
    assert methods_by_string("group.start('ready')\ngroup.call('fetch', step, timeout_s=1)") == ["ready", "fetch"]
    assert methods_by_string("calls.call('train', TrainRank.fetch, 3)\ngroup.start(Member.ready)") == []
    found = {str(path): names for path in modules() if (names := methods_by_string((ROOT / path).read_text()))}
    assert found == {
        "buffer_rl/agents/environment.py": ["step", "reward"],
        "buffer_rl/rollout/reward_model_client.py": ["score"],
    }


def test_the_core_names_no_backend_that_a_plugin_brings():
    """What the core has to know of one is a contract or a hook."""
    named = [str(path) for path in modules() if re.search("megatron|mbridge", (ROOT / path).read_text(), re.IGNORECASE)]
    assert named == []


def test_package_inits_hold_a_docstring_alone_but_for_what_python_programs_call_and_the_finder_of_old_names():
    for path in modules():
        if path.name == "__init__.py":
            body = ast.parse((ROOT / path).read_text()).body
            kept = [ast.unparse(node) for node in body if not isinstance(node, ast.Assign)]
            if path == Path("buffer_rl/__init__.py"):
                *imported, for_types, called, listed, finder, appended = kept[1:]
                known = ["import importlib", "import sys", "from typing import TYPE_CHECKING, Any"]
                assert (imported, appended) == (known, "sys.meta_path.append(OldNames)")
                starts = ("if TYPE_CHECKING:", "def __getattr__(name: str)", "def __dir__()", "class OldNames:")
                assert all(map(str.startswith, (for_types, called, listed, finder), starts))
                del kept[1:]
            assert len(kept) == 1, path
            assert isinstance(body[0], ast.Expr), path


def test_the_old_names_are_read_only_once_an_import_fails():
    code = "import sys, buffer_rl; print(*sorted(name for name in sys.modules if name.startswith('buffer_rl')))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["buffer_rl"]


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import ray", {"ray"}),
        ("def f():\n    from ray.util import x", {"ray.util"}),
        ("from . import y\nimport a.b as c", {".", "a.b"}),
    ],
)
def test_imports_inside_functions_are_found(source, names):
    assert imported_names(source) == names


def test_the_driver_starts_without_torch_which_takes_seconds_to_import():
    code = "import sys, buffer_rl.driver.launch; print({'torch', 'transformers'} & sys.modules.keys())"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_losses_of_the_package_are_found_and_checked_without_torch():
    code = """
import sys
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.kinds.marks import needs_of, unit_of
registry = PluginRegistry()
for name in registry.names("loss"):
    loss = registry.resolve("loss", name)
    print(name, unit_of(loss), sorted(needs_of(loss)))
print({"torch", "transformers"} & sys.modules.keys())
"""
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    *losses, imported = found.stdout.splitlines()
    assert "policy_loss token []" in losses
    assert "dpo group ['ref_log_probs', 'reward']" in losses
    assert imported == "set()"
