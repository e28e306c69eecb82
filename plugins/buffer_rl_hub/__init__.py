"""Names of the Hugging Face Hub as paths in its local cache: ``org/name[@revision]`` for a model folder, and
``hf://datasets/org/name[@revision][/path]`` for data.

An existing folder wins over a model's name. What is needed is downloaded by ``huggingface_hub``, whose variables count
(``HF_HOME``, ``HF_TOKEN``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``); no Python file but with ``--trust-remote-code``. The
path in the cache names the commit, so everything that notes the path notes the commit.
"""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar

from buffer_rl.args import Args
from buffer_rl.errors import ConfigError
from buffer_rl.observe.terminal import say
from buffer_rl.options.redaction import mask_url
from buffer_rl.options.section import flag_of
from buffer_rl.plugin.calls import in_thread
from buffer_rl.plugin.hookspecs import hookimpl

T = TypeVar("T")
MODEL_OPTIONS = ("hf_checkpoint", "ref_load", "opd_teacher_load", "critic_load", "rm_model")
DATA_OPTIONS = ("prompt_data", "eval_prompt_data")
MODEL_FILES = ("*.json", "model*.safetensors", "*.model", "*.tiktoken", "*.spm", "*.jinja", "vocab*", "merges*")
ANSWER_S = 10.0
"""For the Hub to say what a repository holds."""
DOWNLOAD_S = 6 * 3600.0
_MODEL = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?()")
_DATA = re.compile(r"hf://datasets/(\w[\w.-]*/\w[\w.-]*)(?:@(refs/\w+/\w+|[^/@]+))?(?:/(.*))?")
_CACHED = re.compile(r"(model|dataset)s--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})")
_DATA_FILE = re.compile(r"\.(parquet|jsonl|ndjson)(\.(gz|bz2|xz|zst))?$")
_SPLITS = {"train": "train", "test": "test", "validation": "validation", "valid": "validation", "dev": "validation"}


@hookimpl
def buffer_rl_local_paths(config: Args, facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Paths in the cache in place of names of the Hub, which are downloaded. A run that resumes has the commits of the
    run that wrote its checkpoint, unless a revision is named.

    Raises ConfigError if neither the Hub nor its cache gives one: after 10 s if the Hub does not answer."""
    commits = {f"{kind}/{org}/{name}": sha for kind, org, name, sha in _CACHED.findall(str(facts.get("options")))}
    changed = dict[str, Any]()
    for name in MODEL_OPTIONS:
        text = getattr(config, name)
        if text and not os.path.exists(text) and (match := _MODEL.fullmatch(text)):
            patterns = [*MODEL_FILES, *(["*.py"] if config.trust_remote_code else [])]
            changed[name] = _fetched("model", match, f"{flag_of(name)} {text}", commits, partial(_model, patterns))
    for name in DATA_OPTIONS:
        items = list(getattr(config, name) or ())
        evaluates = name == "eval_prompt_data" or config.num_rollout == 0
        for index, item in enumerate(items):
            path, mark, rows = item.partition("@[")
            label, equals, url = path.rpartition("=") if "=hf://" in path else ("", "", path)
            if match := _DATA.fullmatch(url):
                choose = partial(_data, path=match[3] or "", evaluates=evaluates)
                where = f"{flag_of(name)} {mask_url(url)}"
                items[index] = label + equals + _fetched("dataset", match, where, commits, choose) + mark + rows
                changed[name] = items
    return changed


def _model(patterns: list[str], files: Sequence[str]) -> tuple[str, list[str]]:
    """What a model needs: files that patterns match, none of a folder in the repository."""
    return "", [glob.escape(file) for file in files if "/" not in file and any(fnmatchcase(file, p) for p in patterns)]


def _fetched(
    kind: str,
    match: re.Match[str],
    where: str,
    commits: Mapping[str, str],
    choose: Callable[[Sequence[str]], tuple[str, list[str]]],
) -> str:
    """The local path of what ``choose`` takes of the repository's files: a path in it, and patterns of files."""
    import huggingface_hub as hub
    from huggingface_hub.errors import OfflineModeIsEnabled

    name, revision = match[1], match[2] or commits.get(f"{kind}/{match[1]}")
    download = partial(hub.snapshot_download, name, repo_type=kind, revision=revision)

    def listed() -> list[str]:
        try:
            info = hub.HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=ANSWER_S)
            return [file.rfilename for file in getattr(info, "siblings", None) or ()]
        except OfflineModeIsEnabled:
            folder = download(local_files_only=True, allow_patterns=["no file"])
            found = glob.glob("**", root_dir=folder, recursive=True)
            return [file for file in found if os.path.isfile(os.path.join(folder, file))]

    try:
        path, patterns = choose(_within(ANSWER_S, listed))
        folder = _within(DOWNLOAD_S, partial(download, allow_patterns=patterns, etag_timeout=ANSWER_S))
    except ConfigError as error:
        error.where = where
        raise
    except Exception as error:  # fault boundary: the network, the Hub, the disk
        text = " ".join(mask_url(str(error)).split())
        raise ConfigError(
            f"there is no such folder, and the Hub gave nothing: {type(error).__name__}: {text[:400]}",
            where=where,
            expected="a local folder, or a name of the Hub (HF_ENDPOINT: a mirror of it; HF_TOKEN: for private ones)",
            hint=f"HF_HUB_OFFLINE=1 if it is in the cache; else, with a network: hf download {name} "
            f"--repo-type {kind} --local-dir FOLDER",
        ) from error
    local = os.path.join(glob.escape(folder) if glob.has_magic(path) else folder, path).rstrip("/")
    say(f"buffer-rl: notice: {where}: {local}", file=sys.stderr)
    return local


def _data(files: Sequence[str], *, path: str, evaluates: bool) -> tuple[str, list[str]]:
    """A file, folder or pattern among ``files``; without ``path`` the files of one split, if one pattern has them."""
    if path:
        inside = f"{glob.escape(path.rstrip('/'))}/*"
        options = [glob.escape(path), path, inside]
        if any(fnmatchcase(file, option) for file in files for option in options):
            return path, options
        chosen = []
    else:
        data = {file: _split_of(file) for file in files if _DATA_FILE.search(file)}
        wanted = ("test", "validation") if evaluates else ("train",)
        split = next((split for split in wanted if split in data.values()), "")
        chosen = sorted(file for file in data if data[file] == split)
    if chosen:
        found = _DATA_FILE.search(chosen[0])
        prefix = os.path.commonprefix(chosen)  # noqa: RUF071 (of characters)
        suffix = found[0] if found else ""
        pattern = glob.escape(prefix) + (f"*{suffix}" if len(chosen) > 1 else "")
        same = [file for file in files if fnmatchcase(file, pattern)]
        if sorted(same) == chosen and len({os.path.dirname(file) for file in chosen}) == 1:
            return (pattern if len(chosen) > 1 else chosen[0]), [pattern]
    known = [file for file in files if _DATA_FILE.search(file)]
    what = "the data set has no such file" if path else "which of the data set's files are meant is not clear"
    expected = f"hf://datasets/ORG/NAME/FILE, and a FILE, pattern or folder of: {', '.join(known[:20]) or 'none'}"
    raise ConfigError(what, expected=expected)


def _split_of(file: str) -> str:
    words = [_SPLITS[word] for word in re.findall("[a-z]+", file.lower()) if word in _SPLITS]
    return words[-1] if words else ""


def _within(limit_s: float, call: Callable[[], T]) -> T:
    """What ``call`` returns or raises. Raises TimeoutError after ``limit_s``; ``call`` then goes on in its thread, for
    which the process does not wait."""
    answer, _ = in_thread("hub", call)
    try:
        return answer.result(limit_s)
    except TimeoutError as error:
        if answer.done():  # its own
            raise
        raise TimeoutError(f"no answer within {limit_s:g} s") from error
