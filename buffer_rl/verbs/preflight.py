"""What a run needs of this machine and of its folders, looked at before Ray or an engine is started."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from buffer_rl.args import Args
from buffer_rl.cluster.devices import Node
from buffer_rl.cluster.requirements import counts_devices, plan_devices
from buffer_rl.driver.folders import check_lineage
from buffer_rl.errors import CheckpointError, ConfigError
from buffer_rl.files.checkpoint import make_folder, read_manifest
from buffer_rl.files.hf_config import DOWNLOAD, json_object, max_positions, read_config, require_short_rows, vocab_size
from buffer_rl.files.remote import file_system, is_remote, local_path
from buffer_rl.options.redaction import mask_url
from buffer_rl.options.section import flag_of, required
from buffer_rl.options.sources import Resolved, Source
from buffer_rl.plan.algorithm import checkpoint_folder, uses_critic
from buffer_rl.plan.roles import CRITIC
from buffer_rl.plan.schedule import rollout_only, train_only
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.rollout.prompts import load_tokenizer

MODEL_FOLDERS = ("hf_checkpoint", "ref_load", "opd_teacher_load", "critic_load")


def with_local_paths(args: Args, registry: PluginRegistry) -> Args:
    """The options with local paths in place of names that a plugin resolves, such as those of the Hugging Face Hub.
    Raises ConfigError if that fails, CheckpointError for a checkpoint that is not there."""
    facts = read_manifest(args.load).facts if args.load is not None else {}
    for _, found in registry.call_hook("buffer_rl_local_paths", config=args, facts=facts):
        args = args.model_copy(update=found)
    return args


def check_folders(args: Args) -> None:
    """Raises ConfigError for a model folder that cannot be loaded, a folder that cannot be written to, or checkpoints
    of another run in ``--save``; CheckpointError for a checkpoint that is not there."""
    for name in MODEL_FOLDERS:
        folder = getattr(args, name)
        if folder is not None:
            read_config(flag_of(name), folder)
            if args.custom_model_provider_path is None:
                check_weights(flag_of(name), folder)
    check_tokenizer(flag_of("hf_checkpoint"), required(args.hf_checkpoint, "hf_checkpoint"))
    _check_teacher(args)
    if args.rm_model is not None and not train_only(args):
        _check_reward_model(args)
    first_step = read_manifest(args.load).step if args.load is not None else 0
    if is_remote(args.run_dir):
        raise ConfigError(
            f"{mask_url(args.run_dir)!r} is no local folder",
            where="--run-dir",
            hint="--save takes a URL; metrics and logs are appended to all the time, which object stores cannot do",
        )
    check_writable("--run-dir", Path(args.run_dir))
    if args.save is not None and is_remote(local_path(args.save)):
        file_system(args.save, ConfigError)
    elif args.save is not None:
        check_writable("--save", Path(local_path(args.save)))
    check_lineage(args, first_step)


def check_row_lengths(args: Args) -> None:
    """Raises ConfigError if the trainer's rows may be longer than its models can compute in batches.

    Rows whose lengths no option limits are taken to be as long as the model allows."""
    if rollout_only(args) or args.custom_model_provider_path is not None:
        return
    prompt = args.rollout_max_prompt_len
    limits = [args.rollout_max_context_len, None if prompt is None else prompt + args.rollout_max_response_len]
    if args.router_url is None:
        limits.append(args.engine_context_length)
    for name in MODEL_FOLDERS:
        if (folder := getattr(args, name)) is None:
            continue
        config = read_config(flag_of(name), folder)
        own = max_positions(config)
        longest = min((limit for limit in (*limits, own) if limit is not None), default=None)
        require_short_rows(flag_of(name), config, longest, "--rollout-max-context-len")


def check_devices(args: Args) -> None:
    """Raises ConfigError if CUDA, or a number of GPUs, is asked for on this machine and is not there.

    Trainer ranks and engines of a cluster that is joined run on its nodes.
    """
    asked = []
    if args.engine_device == "cuda" and args.router_url is None:
        asked.append("engine_device")
    if args.train_device == "cuda":
        asked.append("train_device")
    if args.ray_address is not None or not (asked or counts_devices(args)):
        return
    import torch  # takes seconds, so only where a GPU is requested

    if asked and not torch.cuda.is_available():
        raise ConfigError(
            "there is no CUDA device, or torch is a build without CUDA",
            where=" and ".join(f"{flag_of(name)} cuda" for name in asked),
            hint="nvidia-smi shows the devices; 'auto' takes one if there is one",
        )
    here = Node(node_id="", address="127.0.0.1", gpus=torch.cuda.device_count())
    plan_devices(args, [here], engines=not train_only(args))


def check_checkpoint(args: Args, data: Sequence[Mapping[str, Any]]) -> None:
    """Raises CheckpointError if ``--load`` was written without the critic that is to go on, or with other training
    data, in another order.

    data: use, path, source_hash and num_rows of the sources that the options name now.
    """
    if args.load is None or args.num_rollout == 0:
        return  # the last: an evaluation, which reads no training data
    manifest = read_manifest(args.load)
    if uses_critic(args) and not any(name.startswith(f"{checkpoint_folder(CRITIC)}/") for name in manifest.files):
        raise CheckpointError(
            "it was written by a run without a critic, and this run has one",
            where=f"--load {mask_url(args.load)}",
            hint="resume without it, or start again from the checkpoint's hf/ folder: --hf-checkpoint in place of "
            "--load (--num-critic-only-steps trains the critic first)",
        )
    if train_only(args) or args.data_source_path is not None:
        return
    facts = manifest.facts
    options = facts.get("options", {})
    if "data" not in facts or options.get("data_source_path") is not None:
        return  # of an earlier version, or of a data source that says so itself
    before, now = ([entry for entry in entries if entry["use"] == "train"] for entries in (facts["data"], data))
    hashes, rows = (
        [[entry.get(name) for entry in part] for part in (before, now)] for name in ("source_hash", "num_rows")
    )
    if hashes[0] != hashes[1] and before and not (args.accept_changed_rows and rows[0] == rows[1]):
        raise CheckpointError(
            f"it was written with other training data: {_list_sources(before)}; now {_list_sources(now)}",
            where=f"--load {mask_url(args.load)}",
            expected="as many rows in each source, which --accept-changed-rows asks for" * args.accept_changed_rows,
            hint="resume with the files, field names and slices of the saved run (rows that were mended since, none "
            "added and none taken out: --accept-changed-rows), or start again from its hf/ folder",
        )
    for name in ("rollout_seed", "rollout_shuffle", "prompt_order", "prompt_data_weights"):
        if name in options and options[name] != getattr(args, name):
            raise CheckpointError(
                f"it was written with {flag_of(name)} {options[name]}, now {getattr(args, name)}: another order",
                where=f"--load {mask_url(args.load)}",
            )


def with_special_tokens(resolved: Resolved) -> tuple[Resolved, str]:
    """The options of a run that goes on from a checkpoint: where nothing says otherwise, plain-text prompts get special
    tokens as they did in the run that wrote it; and a notice of that, or an empty text.

    Runs of versions without ``--add-special-tokens`` added none. Raises CheckpointError."""
    args = resolved.args
    if args.load is None or resolved.origins["add_special_tokens"].source is not Source.DEFAULT:
        return resolved, ""
    added = read_manifest(args.load).facts.get("options", {}).get("add_special_tokens", False)
    if added == args.add_special_tokens:
        return resolved, ""
    notice = (
        f"--load {mask_url(args.load)} was written by a run whose plain-text prompts got no special tokens such as "
        "<bos>, and so do those of this run; --add-special-tokens adds what the tokenizer adds"
    )
    changed = args.model_copy(update={"add_special_tokens": added})
    return Resolved(args=changed, origins=resolved.origins), notice


def check_writable(flag: str, folder: Path) -> None:
    """Raises ConfigError if ``folder`` cannot be made or written to. It is really made, a file is written in it, and
    both are removed again: permissions alone do not tell of a full disk, or of folders that the system makes."""
    nearest = nearest_folder(folder)
    if not nearest.is_dir():
        raise ConfigError(f"{str(nearest)!r} is a file, not a folder", where=flag)
    new = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=".buffer-rl-", dir=folder) as file:
            file.write(b"?")
            file.flush()
    except PermissionError as error:
        raise ConfigError(f"no permission to write to {str(nearest)!r}", where=flag) from error
    except OSError as error:
        raise ConfigError(f"the folder {str(folder)!r} cannot be written to: {error.strerror}", where=flag) from error
    finally:
        with suppress(OSError):  # of one that was not made, or that another process has filled meanwhile
            for path in new:
                path.rmdir()


def nearest_folder(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def make_folders(args: Args) -> None:
    """Make ``--run-dir`` and a local ``--save``. Raises ConfigError if one cannot be made."""
    for flag, path in (("--run-dir", args.run_dir), ("--save", args.save)):
        if path is None or is_remote(local_path(path)):
            continue
        try:
            make_folder(Path(local_path(path)))
        except OSError as error:
            raise ConfigError(f"the folder {path!r} cannot be made: {error.strerror}", where=flag) from error


def _list_sources(sources: Sequence[Mapping[str, Any]]) -> str:
    texts = (f"{entry['path']} ({entry['source_hash']}, {entry.get('num_rows')} rows)" for entry in sources)
    return ", ".join(texts) or "none"


# Every file that a tokenizer of transformers keeps its vocabulary in, by the names that models use.
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.tiktoken", "*.model", "*.spm")
INDEX_NAMES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WEIGHT_NAMES = ("model.safetensors", "pytorch_model.bin")
_LFS_START = b"version "


def check_weights(flag: str, folder: str) -> None:
    """Raises ConfigError for a model folder without weights, and naming the first file of weights that is missing or
    cut off."""
    for file in weight_files(flag, folder):
        _check_file(flag, file)


def weight_files(flag: str, folder: str) -> list[Path]:
    """The files of a model folder's weights. Raises ConfigError if there are none, or if their index is damaged."""
    base = Path(folder)
    index = next((base / name for name in INDEX_NAMES if (base / name).is_file()), None)
    if index is not None:
        shards = json_object(flag, index).get("weight_map")
        if not isinstance(shards, dict):
            raise ConfigError("the index has no weight_map", where=f"{flag} {index}", hint=DOWNLOAD)
        return [base / name for name in sorted({str(name) for name in shards.values()})]
    files = [path for name in WEIGHT_NAMES if (path := base / name).is_file()][:1]
    if not files:
        raise ConfigError(
            f"there are no weights in {folder!r}", where=flag, expected=" or ".join(WEIGHT_NAMES), hint=DOWNLOAD
        )
    return files


def check_tokenizer(flag: str, folder: str) -> None:
    """Raises ConfigError if no file of the model folder looks like a tokenizer's; transformers would make one up."""
    if not any(path for pattern in TOKENIZER_FILES for path in Path(folder).glob(pattern)):
        raise ConfigError(
            f"there is no tokenizer in {folder!r}",
            where=flag,
            expected="tokenizer.json or another tokenizer file beside config.json",
            hint="AutoTokenizer.from_pretrained(ORIGIN).save_pretrained(FOLDER) writes it",
        )


def _check_teacher(args: Args) -> None:
    """Raises ConfigError for a teacher whose tokenizer gives a token another id; one without a tokenizer is taken."""
    folder = args.opd_teacher_load
    if folder is None or not any(path for pattern in TOKENIZER_FILES for path in Path(folder).glob(pattern)):
        return
    trust = args.trust_remote_code
    own, of_teacher = (load_tokenizer(f, trust_remote_code=trust).get_vocab() for f in (args.hf_checkpoint, folder))
    other = [token for token, number in own.items() if of_teacher.get(token, number) != number]
    if other:
        raise ConfigError(
            f"{len(other)} tokens have other ids than in --hf-checkpoint, such as {other[0]!r}",
            where=f"--opd-teacher-load {folder}",
            expected="a teacher with the tokenizer of the model, whose tokens it scores",
        )


def _check_reward_model(args: Args) -> None:
    """Raises ConfigError for a reward model that is no sequence classifier with one label and a tokenizer."""
    flag, folder = flag_of("rm_model"), required(args.rm_model, "rm_model")
    config = read_config(flag, folder)
    names = [str(name) for name in config.get("architectures") or ()]
    own = "AutoModelForSequenceClassification" in (config.get("auto_map") or {})
    if not own and not any(name.endswith("ForSequenceClassification") for name in names):
        raise ConfigError(
            f"{folder!r} is no sequence classifier: its architecture is {', '.join(names) or 'not said'}",
            where=flag,
            expected="a folder that AutoModelForSequenceClassification loads, with one label",
            hint="a reward that is no classifier can be a function: --custom-rm-path, --custom-group-rm-path",
        )
    labels = len(config.get("id2label") or {}) or config.get("num_labels", 2)  # 2: of configurations that say nothing
    if labels != 1:
        raise ConfigError(
            f"the classifier has {labels} labels",
            where=f"{flag} config.json",
            expected="one, whose logit is the reward",
            hint="which of them is good is for a function to say: --custom-rm-path",
        )
    check_weights(flag, folder)
    check_tokenizer(flag, folder)
    tokens = len(load_tokenizer(folder, flag, trust_remote_code=args.trust_remote_code))
    if tokens > (size := vocab_size(config) or tokens):
        raise ConfigError(f"the tokenizer has {tokens} tokens, and the model {size}", where=f"{flag} {folder}")


def _check_file(flag: str, file: Path) -> None:
    where = f"{flag} {file}"
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(len(_LFS_START))
        if start == _LFS_START:
            raise ConfigError("the file is a pointer of Git LFS, not the weights", where=where, hint="git lfs pull")
        if not size:
            raise ConfigError("the file is empty", where=where, hint=DOWNLOAD)
        if file.suffix == ".safetensors":
            with safe_open(file, framework="np"):  # compares the header with the size and reads no weights
                pass
    except OSError as error:
        raise ConfigError(f"the weights cannot be read: {error.strerror}", where=where, hint=DOWNLOAD) from error
    except SafetensorError as error:
        what = f"the file is no safetensors file, or it is damaged: {size} bytes; {error}"
        raise ConfigError(what, where=where, hint="copy or download the file again") from error
