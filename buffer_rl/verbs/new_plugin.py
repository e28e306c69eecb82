"""``buffer-rl plugins new KIND NAME``: writes a working plugin and its test into a folder."""

from __future__ import annotations

import keyword
from pathlib import Path
from string import Template

from buffer_rl.errors import ConfigError
from buffer_rl.kinds import PluginKind, kind_named
from buffer_rl.verbs.skeletons import SAMPLING, Skeleton
from buffer_rl.verbs.skeletons_backend import BACKEND

SKELETONS = {**SAMPLING, **BACKEND}

_PLUGIN = '''\
"""A $kind for buffer_rl: $signature."""

from __future__ import annotations

${imports}

$code'''

_TEST = """\
from __future__ import annotations

${imports}
from $module import $name


def test_${module}_meets_its_contract():
    check_contract("$kind", $name)


def test_${module}_works(tmp_path):
$test"""


def write_plugin(kind: str, name: str, folder: Path) -> tuple[Path, Path]:
    """Write ``name.py`` and ``test_name.py`` into ``folder``; the paths of both.

    Raises ConfigError for an unknown kind, for a name that is no identifier, and where one of the files is there
    already.
    """
    row = kind_named(kind)
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} is no name of a Python module", where="NAME", expected="letters, digits and _")
    paths = folder / f"{name}.py", folder / f"test_{name}.py"
    for path in paths:
        if path.exists():
            raise ConfigError(f"{path} is there already", hint="choose another name or --output FOLDER")
    texts = plugin_texts(row, name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write to {str(folder)!r}: {error.strerror}", where="--output") from error
    return paths


def object_name(kind: PluginKind, name: str) -> str:
    """The name of the function, or of the class for kinds that are classes: ``my_logger`` makes ``MyLogger``."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_")) if kind.constructed else name


def plugin_texts(kind: PluginKind, name: str) -> tuple[str, str]:
    """The plugin's file and its test's."""
    skeleton: Skeleton = SKELETONS[kind.name]
    named = object_name(kind, name)
    code = Template(skeleton.code).substitute(name=named)
    test = Template(skeleton.test).substitute(name=named)
    typed = "from typing import Any\n"
    plugin = Template(_PLUGIN).substitute(
        kind=kind.name, signature=kind.signature, imports=_sorted(skeleton.imports + typed), code=code
    )
    checker = "from buffer_rl.plugins import check_contract\n"
    tested = Template(_TEST).substitute(
        kind=kind.name, module=name, name=named, imports=_sorted(skeleton.test_imports + checker), test=test
    )
    return plugin, tested


def _sorted(imports: str) -> str:
    """Import lines in three blocks: the standard library's, others', buffer_rl's."""
    lines = sorted(
        {line for line in imports.splitlines() if line}, key=lambda line: (not line.startswith("import"), line)
    )
    others = [line for line in lines if line.split()[1].partition(".")[0] in ("numpy", "torch")]
    own = [line for line in lines if line.split()[1].startswith("buffer_rl")]
    standard = [line for line in lines if line not in others and line not in own]
    return "\n\n".join("\n".join(block) for block in (standard, others, own) if block)
