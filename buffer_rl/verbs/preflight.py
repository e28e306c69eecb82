"""The model folders of a run, and those that it writes to, looked at before Ray or an engine is started."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from buffer_rl.args import Args
from buffer_rl.driver.folders import check_lineage, check_writable
from buffer_rl.errors import ConfigError
from buffer_rl.files.checkpoint import read_manifest
from buffer_rl.files.hf_config import max_positions, read_config, require_short_rows, vocab_size
from buffer_rl.files.model_folder import check_tokenizer, check_weights, has_tokenizer
from buffer_rl.files.remote import file_system, is_remote, local_path
from buffer_rl.options.checks import refuse
from buffer_rl.options.redaction import mask_url
from buffer_rl.options.section import flag_of, required
from buffer_rl.plan.schedule import rollout_only, train_only
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.rollout.prompts import load_tokenizer

LIMITS = (
    ("-n", resource.RLIMIT_NOFILE, 1, 128, "open files"),
    ("-v", resource.RLIMIT_AS, 1024, 4 << 20, "KiB of address space"),
)
"""Limits of a process by the option of ``ulimit``, their unit in bytes or files, and the least with which a run of a
tiny model starts."""
MODEL_FOLDERS = ("hf_checkpoint", "ref_load", "opd_teacher_load", "critic_load")


def with_local_paths(args: Args, registry: PluginRegistry) -> Args:
    """The options with local paths in place of names that a plugin resolves, such as those of the Hugging Face Hub.
    Raises ConfigError if that fails, CheckpointError for a checkpoint that is not there."""
    facts = read_manifest(args.load).facts if args.load is not None else {}
    for _, found in registry.call_hook("buffer_rl_local_paths", config=args, facts=facts):
        args = args.model_copy(update=found)
    return args


def check_limits() -> None:
    """Raises ConfigError if a limit of this process is one with which Ray or a reward process does not start, or if its
    Python is one with which no model is loaded."""
    no_docstrings = "PYTHONOPTIMIZE: Python drops docstrings, which transformers reads when it is imported"
    refuse(sys.flags.optimize > 1, no_docstrings, "unset PYTHONOPTIMIZE, and start Python without -OO")
    for option, number, unit, least, what in LIMITS:
        limit = resource.getrlimit(number)[0]
        scarce = limit != resource.RLIM_INFINITY and limit // unit < least
        hint = f"raise the limit before the run: ulimit {option} {'unlimited' if option == '-v' else 4096}"
        refuse(scarce, f"ulimit {option}: a process may have {limit // unit} {what}", hint, f"at least {least}")


def check_folders(args: Args) -> None:
    """Raises ConfigError for a model folder that cannot be loaded, a folder that cannot be written to, or checkpoints
    of another run in ``--save``; CheckpointError for a checkpoint that is not there."""
    for name, folder in model_folders(args):
        read_config(flag_of(name), folder)
        if args.custom_model_provider_path is None:
            check_weights(flag_of(name), folder)
    check_tokenizer(flag_of("hf_checkpoint"), required(args.hf_checkpoint, "hf_checkpoint"))
    _check_teacher(args)
    if args.rm_model is not None and not train_only(args):
        _check_reward_model(args, args.rm_model)
    first_step = read_manifest(args.load).step if args.load is not None else 0
    what, hint = f"--run-dir: {mask_url(args.run_dir)!r} is no local folder", "--save takes a URL, and this does not"
    refuse(is_remote(args.run_dir), what, hint)  # object stores cannot append, as metrics and logs are all the time
    check_writable("--run-dir", Path(args.run_dir))
    if args.save is not None and is_remote(local_path(args.save)):
        file_system(args.save, ConfigError)
    elif args.save is not None:
        check_writable("--save", Path(local_path(args.save)))
    check_lineage(args, first_step)


def model_folders(args: Args) -> list[tuple[str, str]]:
    """The model folders that the options name, each behind its option."""
    return [(name, folder) for name in MODEL_FOLDERS if (folder := getattr(args, name)) is not None]


def check_row_lengths(args: Args) -> None:
    """Raises ConfigError if the trainer's rows may be longer than its models can compute in batches.

    Rows whose lengths no option limits are taken to be as long as the model allows."""
    if rollout_only(args) or args.custom_model_provider_path is not None:
        return
    prompt = args.rollout_max_prompt_len
    limits = [args.rollout_max_context_len, None if prompt is None else prompt + args.rollout_max_response_len]
    if args.router_url is None:
        limits.append(args.engine_context_length)
    for name, folder in model_folders(args):
        config = read_config(flag_of(name), folder)
        known = [limit for limit in (*limits, max_positions(config)) if limit is not None]
        require_short_rows(flag_of(name), config, min(known, default=None), "--rollout-max-context-len")


def _check_teacher(args: Args) -> None:
    """Raises ConfigError for a teacher whose tokenizer gives a token another id; one without a tokenizer is taken."""
    folder, trust = args.opd_teacher_load, args.trust_remote_code
    if folder is None or not has_tokenizer(folder):
        return
    own, of_teacher = (load_tokenizer(f, trust_remote_code=trust).get_vocab() for f in (args.hf_checkpoint, folder))
    other = [token for token, number in own.items() if of_teacher.get(token, number) != number]
    what = f"{len(other)} tokens have other ids than in --hf-checkpoint, such as {next(iter(other), '')!r}"
    refuse(other, f"--opd-teacher-load {folder}: {what}", "a teacher scores the tokens of the model's tokenizer")


def _check_reward_model(args: Args, folder: str) -> None:
    """Raises ConfigError for a reward model that is no sequence classifier with one label and a tokenizer."""
    flag, hint = flag_of("rm_model"), "another reward can be a function: --custom-rm-path, --custom-group-rm-path"
    config = read_config(flag, folder)
    names = [str(name) for name in config.get("architectures") or ()]
    of_code = "AutoModelForSequenceClassification" in (config.get("auto_map") or {})
    own = of_code or any(name.endswith("ForSequenceClassification") for name in names)
    what = f"{folder!r} is no sequence classifier: its architecture is {', '.join(names) or 'not said'}"
    refuse(not own, f"{flag}: {what}", hint, "a folder that AutoModelForSequenceClassification loads, with one label")
    labels = len(config.get("id2label") or {}) or config.get("num_labels", 2)  # 2: of configurations that say nothing
    what = f"{flag} config.json: the classifier has {labels} labels"
    refuse(labels != 1, what, hint, "one, whose logit is the reward")
    check_weights(flag, folder)
    check_tokenizer(flag, folder)
    tokens = len(load_tokenizer(folder, flag, trust_remote_code=args.trust_remote_code))
    size = vocab_size(config) or tokens
    refuse(tokens > size, f"{flag} {folder}: the tokenizer has {tokens} tokens, and the model {size}", hint)
