"""The user's own code that goes to other nodes, and a process there that has nothing else of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from buffer_rl.errors import ConfigError
from buffer_rl.plugin import shipping
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.plugin.shipping import CodeBundle, collect_code

FILES = {
    "alone.py": "def score(args, sample):\n    return 1.0\n",
    "chief.py": "import json\nimport helper\n\ndef score(args, sample):\n    return helper.VALUE\n",
    "helper.py": "def late():\n    from deeper.inner import thing\n\nVALUE = 2.0\n",
    "deeper/inner.py": "thing = 3\n",
    "deeper/unrelated.py": "",
    "pack/__init__.py": "from pack.sub import VALUE\n",
    "pack/sub.py": "from pathlib import Path\n\nVALUE = float(Path(__file__).with_name('words.txt').read_text())\n",
    "pack/words.txt": "4.0",
    "pack/reward.py": "from . import VALUE\n\ndef score(args, sample):\n    return VALUE\n",
    "pack/__pycache__/sub.cpython-311.pyc": "",
    "pack/weights.safetensors": "",
    "pack/.git/config": "",
    "pack/runs/metrics.jsonl": "",
    "below/by_file.py": "import beside\n\ndef score(args, sample):\n    return beside.VALUE\n",
    "below/beside.py": "VALUE = 5.0\n",
    "unrelated.py": "",
    "model/model.safetensors": "",
    ".venv/lib/python3.11/site-packages/installed_there/__init__.py": "",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "outside.py").write_text(
        "import next_to_it\n\ndef score(args, sample):\n    return next_to_it.VALUE\n"
    )
    (tmp_path / "elsewhere" / "next_to_it.py").write_text("VALUE = 6.0\n")
    monkeypatch.chdir(folder)
    return folder


def bundle_of(project: Path, *references: str) -> CodeBundle:
    registry = PluginRegistry(search_path=[str(project)])
    return collect_code([registry.locate("reward", reference) for reference in references], cwd=str(project))


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("alone:score", {"alone.py"}),
        ("alone.score", {"alone.py"}),
        ("chief:score", {"chief.py", "helper.py", "deeper/inner.py"}),
        ("pack.reward:score", {"pack/__init__.py", "pack/sub.py", "pack/words.txt", "pack/reward.py"}),
        ("./below/by_file.py:score", {"below/by_file.py", "below/beside.py"}),
        ("numeric", set()),
        ("rm_hub.numeric:score", set()),
    ],
)
def test_a_reference_takes_what_it_needs_of_the_users_code_and_nothing_else(
    project: Path, reference: str, expected: set[str]
) -> None:
    assert set(bundle_of(project, reference).files) == expected


def test_files_outside_of_the_folder_go_with_what_they_import(project: Path) -> None:
    bundle = bundle_of(project, "../elsewhere/outside.py:score")
    assert {Path(target).name for target in bundle.files} == {"outside.py", "next_to_it.py"}
    assert all(target.startswith("_outside/") for target in bundle.files)


def test_what_an_environment_in_the_folder_has_installed_does_not_go(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(project / ".venv/lib/python3.11/site-packages"))
    (project / "alone.py").write_text(f"import installed_there\n{FILES['alone.py']}")
    registry = PluginRegistry(search_path=[str(project)])
    bundle = collect_code([registry.locate("reward", "alone:score")], cwd=str(project))
    assert set(bundle.files) == {"alone.py"}


def test_modules_of_the_python_path_go_as_well(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(project.parent / "elsewhere"))
    (project / "alone.py").write_text(f"import next_to_it\n{FILES['alone.py']}")
    registry = PluginRegistry(search_path=[str(project)])
    origin = registry.locate("reward", "alone:score")
    assert set(collect_code([origin], cwd=str(project)).files) == {"alone.py"}
    path = [str(project.parent / "elsewhere")]
    assert set(collect_code([origin], cwd=str(project), python_path=path).files) == {"alone.py", "next_to_it.py"}


def test_code_that_is_too_large_is_refused_with_the_largest_files(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "MAX_BYTES", 2**20)
    (project / "pack" / "huge.txt").write_bytes(b" " * (2**20 + 1))
    bundle = bundle_of(project, "pack.reward:score")
    with pytest.raises(ConfigError, match=r"huge\.txt \(1\.0 MiB\)") as caught:
        bundle.check_size()
    assert "--no-ship-code" in str(caught.value)


def test_the_hash_is_of_names_and_contents(project: Path) -> None:
    before = bundle_of(project, "chief:score").sha256
    assert bundle_of(project, "chief:score").sha256 == before
    (project / "helper.py").write_text("VALUE = 9.0\n")
    assert bundle_of(project, "chief:score").sha256 != before
    assert bundle_of(project, "numeric").sha256 == ""


ELSEWHERE = """
import json, os, sys
from buffer_rl.plugin.shipping import use_shipped_code
sys.path.insert(0, os.getcwd())  # as Ray does with the folder that it was sent
came = os.getcwd()
os.chdir(sys.argv[1])
use_shipped_code(came)
from buffer_rl.plugin.registry import PluginRegistry
registry = PluginRegistry()
answers = [registry.resolve("reward", reference)(None, None) for reference in sys.argv[2:]]
print(json.dumps([answers, sorted({os.path.dirname(sys.modules[n].__file__) for n in ("pack", "chief")})]))
"""


def test_a_process_that_has_only_the_shipped_files_resolves_the_same_references(project: Path, tmp_path: Path) -> None:
    references = [
        "alone:score",
        "chief:score",
        "pack.reward:score",
        "./below/by_file.py:score",
        "../elsewhere/outside.py:score",
        f"{project}/below/by_file.py:score",
    ]
    (tmp_path / "node").mkdir()
    (tmp_path / "came").mkdir()
    bundle_of(project, *references).write(tmp_path / "came")
    shutil.rmtree(project)
    shutil.rmtree(tmp_path / "elsewhere")
    answers, folders = at_another_node(tmp_path / "came", tmp_path / "node", *references)
    assert answers == [1.0, 2.0, 4.0, 5.0, 6.0, 5.0]
    assert folders == [str(tmp_path / "came"), str(tmp_path / "came" / "pack")]


def test_a_node_that_has_the_same_files_uses_them_where_they_are(project: Path, tmp_path: Path) -> None:
    references = ["pack.reward:score", "chief:score"]
    (tmp_path / "came").mkdir()
    bundle_of(project, *references).write(tmp_path / "came")
    assert at_another_node(tmp_path / "came", project, *references)[1] == [str(project), str(project / "pack")]
    (project / "helper.py").write_text("VALUE = 7.0\n")  # an older copy of the folder
    answers, folders = at_another_node(tmp_path / "came", project, *references)
    assert answers == [4.0, 2.0]
    assert folders == [str(tmp_path / "came"), str(tmp_path / "came" / "pack")]


def at_another_node(came: Path, working_directory: Path, *references: str) -> tuple[list[float], list[str]]:
    """What the references answer in a process there, and where it has modules from."""
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(working_directory), *references],
        cwd=came,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers, folders = json.loads(done.stdout)
    return answers, folders
