"""What a run is made of: versions, the source of each plugin, the user's code, the data. Nothing is imported for it.

And what a resumed run does otherwise than the one that wrote its checkpoint, and whether it may: its options, its
learning rate, its data.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from buffer_rl import __version__
from buffer_rl.args import Args
from buffer_rl.errors import CheckpointError
from buffer_rl.files.checkpoint import read_manifest
from buffer_rl.options.redaction import mask_secrets, mask_url
from buffer_rl.options.section import flag_of, plugin_kind_of
from buffer_rl.options.sources import Resolved, Source
from buffer_rl.plan.algorithm import checkpoint_folder, role_args, uses_critic
from buffer_rl.plan.counts import optimizer_steps
from buffer_rl.plan.roles import ACTOR, CRITIC
from buffer_rl.plan.schedule import RolePlan, critic_only_steps, rollout_only, train_only
from buffer_rl.plugin.entry_points import OWN_DISTRIBUTION
from buffer_rl.plugin.locate import resolve_file
from buffer_rl.plugin.old_names import with_new_names
from buffer_rl.plugin.reference import Form, find_module, form_of, split_file
from buffer_rl.plugin.registry import Origin, PluginInfo, PluginRegistry
from buffer_rl.plugin.shipping import CodeBundle, collect_code, search_folders
from buffer_rl.trainer.learning_rate import learning_rate, with_decay_iters

# What the numbers of a run depend on.
PACKAGES = (
    *("ray", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "pluggy"),
    *("sglang-router", "smg"),
)


def provenance_of(args: Args, registry: PluginRegistry, data: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """What a run is made of, as JSON values without secrets.

    plugins: where each option's plugin is from, with the SHA-256 of its file, empty where there is none.
    code: SHA-256 of each of the user's own files that the plugins need, by relative path (of one over 20 MiB, its
    size); code_sha256: of all of them.
    data: use, path, number of rows and source hash of each data source.

    Raises PluginError for a reference that leads nowhere, ConfigError for code that is too large to be sent."""
    bundle = collect_user_code(args, registry)
    facts = {
        "python": platform.python_version(),
        "packages": dict(_versions()),
        "plugins": [_source(option, origin) for option, origin in plugin_origins(args, registry)],
        "code": bundle.hashes(),
        "code_sha256": bundle.sha256,
        "data": list(data),
    }
    return cast("dict[str, Any]", mask_secrets(facts))


def collect_user_code(args: Args, registry: PluginRegistry) -> CodeBundle:
    """The user's own files that the plugins of ``args`` need. Raises PluginError; and ConfigError if they are to be
    sent to other nodes and are too large for it."""
    origins = [origin for _, origin in plugin_origins(args, registry)]
    python_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    bundle = collect_code(origins, cwd=os.getcwd(), python_path=python_path)
    if ships_code(args):
        bundle.check_size()
    return bundle


def ships_code(args: Args) -> bool:
    """Whether the run sends the user's files to other nodes. The workers of a local run start in the driver's folder,
    with its ``PYTHONPATH``, and import them from there."""
    return args.ray_address is not None and bool(args.ship_code)


def plugin_origins(args: Args, registry: PluginRegistry) -> Iterator[tuple[str, Origin]]:
    """Every option that names a plugin, with where it leads; those of ``-p`` last. Raises PluginError."""
    for name in type(args).model_fields:
        kind = plugin_kind_of(type(args), name)
        value = getattr(args, name)
        if kind and value is not None:
            for reference in [value] if isinstance(value, str) else value:
                yield name, registry.locate(kind, reference)
    for reference in args.plugin:
        if not reference.startswith("no:") and (origin := _pluggy_origin(reference)) is not None:
            yield "plugin", origin


def changed_plugins(facts: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line for each option whose plugin has other source than when ``facts`` (a checkpoint's) were written, and
    for user code that differs otherwise. now: the run's ``provenance_of``."""
    before = {(entry["option"], entry["reference"]): entry for entry in facts.get("plugins", ())}
    lines, has_changed = [], "has changed since the checkpoint was written"
    if facts.get("buffer_rl", __version__) != __version__:
        lines.append(f"the checkpoint was written by buffer_rl {facts['buffer_rl']}; this is {__version__}")
    for source in now["plugins"]:
        earlier = before.get((source["option"], source["reference"]))
        if source["distribution"] == OWN_DISTRIBUTION or earlier is None or earlier["sha256"] == source["sha256"]:
            continue
        then, version = earlier["version"], source["version"]
        versions = f" ({then}, now {version})" if then != version else ""
        lines.append(f"{flag_of(source['option'])} {source['reference']}: {source['file']} {has_changed}{versions}")
    named = {source["file"] for source in now["plugins"]}
    code = facts.get("code", {})
    lines += [
        f"{path} {has_changed}"
        for path, sha256 in now["code"].items()
        if path in code and code[path] != sha256 and not any(file.endswith(f"/{path}") for file in named)
    ]
    return lines


def _source(option: str, origin: Origin) -> dict[str, str]:
    info = PluginInfo.of(origin, loaded=False)
    found = {name: getattr(info, name) for name in ("file", "sha256", "distribution", "version")}
    return {"option": option, "reference": origin.reference, **found}


def _pluggy_origin(reference: str) -> Origin | None:
    """Where a whole pluggy plugin is; None for an installed name, which its distribution's version identifies."""
    folders = search_folders()
    if form_of(reference) is Form.FILE:
        path, attr = split_file(reference)
        file = resolve_file(path, folders)
        return Origin(kind="", reference=reference, form=Form.FILE, file=str(file), attr=attr) if file else None
    module = reference.partition(":")[0]
    found = find_module(module, folders)
    if found is None:
        return None
    return Origin(kind="", reference=reference, form=Form.MODULE, module=module, file=found.file)


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)


IDLE_IN_EVALUATION = (
    "num_rollout", "num_epoch", "early_stop", "eval_interval", "run_dir",
    "save", "save_interval", "keep_last", "keep_best", "async_save",
)  # fmt: skip
"""Options that ``buffer-rl eval`` sets itself."""
ABSENT = "absent"
"""The value of an option that the checkpoint's run did not have, or that this one has not: of another plugin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionChange:
    """An option, the checkpoint's value and the one of now: JSON values without secrets."""

    option: str
    then: Any
    now: Any

    def __str__(self) -> str:
        then, now = (json.dumps(value, ensure_ascii=False) for value in (self.then, self.now))
        return f"{flag_of(self.option)} {then}, now {now}"


def option_changes(facts: Mapping[str, Any], args: Args) -> list[OptionChange]:
    """Every option but ``--load`` that differs from the checkpoint with these facts, by name."""
    then, now = _options_then(facts), mask_secrets(args.model_dump(mode="json"))
    if not then:
        return []
    return [
        OptionChange(option=name, then=then.get(name, ABSENT), now=now.get(name, ABSENT))
        for name in sorted({*then, *now} - {"load"})
        if name not in then or name not in now or then[name] != now[name]
    ]


def _options_then(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint's options; their references to modules of ours as these are called now."""
    then = facts.get("options")
    return {name: with_new_names(value) for name, value in then.items()} if isinstance(then, Mapping) else {}


def resume_notices(facts: Mapping[str, Any], step: int, args: Args) -> list[str]:
    """One line with all options that differ from the checkpoint with these facts, one if the run has no step left, else
    one for each trained role whose learning rate goes on otherwise. step: of the checkpoint, in rollouts."""
    changes = option_changes(facts, args)
    if args.num_rollout == 0:  # it evaluates alone: what trains and saves has nothing to say
        changes = [change for change in changes if change.option not in IDLE_IN_EVALUATION]
    lines = [f"options that differ from the checkpoint's: {'; '.join(map(str, changes))}"] if changes else []
    length = _lengths(facts, args, args)[1]
    if length and length <= step:
        flag = "--num-rollout" if args.num_rollout is not None else "--num-epoch"
        what = f"the checkpoint has {step} steps, and {flag} ends the run after {length} in all"
        return [*lines, f"nothing is left to train: {what}; a larger {flag} goes on"]
    if not changes or rollout_only(args) or args.num_rollout == 0:
        return lines
    roles = (ACTOR, CRITIC) if uses_critic(args) else (ACTOR,)
    return [*lines, *filter(None, (_learning_rate_notice(facts, step, args, role) for role in roles))]


def _learning_rate_notice(facts: Mapping[str, Any], step: int, args: Args, role: str) -> str:
    """Empty if the role's next optimizer step has the learning rate that it would have had."""
    known = {name: value for name, value in _options_then(facts).items() if name in type(args).model_fields}
    then = args.model_copy(update=known)
    rollouts_then, rollouts_now = _lengths(facts, then, args)
    if rollouts_then is None or rollouts_now is None:
        return ""
    before = role_args(with_decay_iters(then, _updates(then, role, rollouts_then)), role)
    now = role_args(with_decay_iters(args, _updates(args, role, rollouts_now)), role)
    taken = _updates(then, role, step) * optimizer_steps(then)
    if learning_rate(before, taken) == learning_rate(now, taken):
        return ""
    whose, last, following = "critic" if role == CRITIC else "policy", max(taken - 1, 0), learning_rate(now, taken)
    text = (
        f"the learning rate of the {whose} goes from {learning_rate(before, last):.3g}, of the checkpoint's last "
        f"optimizer step, to {following:.3g}"
    )
    kept = before.lr_decay_iters
    if learning_rate(now.model_copy(update={"lr_decay_iters": kept}), taken) != learning_rate(before, taken):
        return text
    return (
        f"{text}: it falls over {now.lr_decay_iters} optimizer steps, and fell over {kept} before; "
        f"--lr-decay-iters {kept} keeps the curve"
    )


def _updates(args: Args, role: str, num_rollouts: int) -> int:
    return RolePlan(critic_only_steps=critic_only_steps(args)).num_updates(role, num_rollouts)


def _lengths(facts: Mapping[str, Any], then: Any, now: Any) -> tuple[int | None, int | None]:
    """The rollouts of the run that wrote the checkpoint, and of this one; None if that is not known before the data
    are counted."""
    before = facts.get("num_rollouts", then.num_rollout)
    if now.num_rollout is not None or before is None:
        return before, now.num_rollout
    rows = sum(source["num_rows"] for source in facts.get("data", ()) if source["use"] == "train")
    return before, max(1, now.num_epoch * rows // now.rollout_batch_size) if rows else None


def check_checkpoint(args: Args, data: Sequence[Mapping[str, Any]]) -> None:
    """Raises CheckpointError if ``--load`` was written without the critic that is to go on, of other weights than the
    adapters' options give, with another data source, or with other training data, in another order.

    data: use, path, source_hash and num_rows of the sources that the options name now.
    """
    if args.load is None:
        return
    manifest, where = read_manifest(args.load), f"--load {mask_url(args.load)}"
    facts = manifest.facts
    adapters = ("lora_rank", "lora_alpha", "target_modules") if args.lora_rank else ("lora_rank",)
    _refuse_changed(facts, args, () if rollout_only(args) else adapters, where, "other weights")
    if args.num_rollout == 0:
        return  # an evaluation, which reads no training data
    if uses_critic(args) and not any(name.startswith(f"{checkpoint_folder(CRITIC)}/") for name in manifest.files):
        how = "--hf-checkpoint in place of --load (--num-critic-only-steps trains the critic first)"
        hint = f"resume without it, or start again from the checkpoint's hf/ folder: {how}"
        raise CheckpointError("it was written by a run without a critic, and this run has one", where=where, hint=hint)
    reads = () if train_only(args) else ("data_source_path",)
    _refuse_changed(facts, args, reads, where, "other groups")
    if not reads or args.data_source_path is not None or "data" not in facts:
        return  # the last: of an earlier version
    before, now = ([entry for entry in entries if entry["use"] == "train"] for entries in (facts["data"], data))
    hashes, rows = (
        [[entry.get(name) for entry in part] for part in (before, now)] for name in ("source_hash", "num_rows")
    )
    if hashes[0] != hashes[1] and before and not (args.accept_changed_rows and rows[0] == rows[1]):
        what = f"it was written with other training data: {_list_sources(before)}; now {_list_sources(now)}"
        expected = "as many rows in each source, which --accept-changed-rows asks for" * args.accept_changed_rows
        mended = "rows that were mended since, none added and none taken out: --accept-changed-rows"
        same = f"resume with the files, field names and slices of the saved run ({mended})"
        hint, see = f"{same}, or start again from its hf/ folder", "docs/troubleshooting.md#resuming-is-refused"
        raise CheckpointError(what, where=where, expected=expected, hint=hint, see=see)
    order = ("rollout_seed", "rollout_shuffle", "prompt_order", "prompt_data_weights")
    _refuse_changed(facts, args, order, where, "another order")


def _refuse_changed(facts: Mapping[str, Any], args: Args, names: Sequence[str], where: str, why: str) -> None:
    for change in option_changes(facts, args):
        if change.option in names and change.then != ABSENT:
            what, how = f"it was written with {change}: {why}", "--hf-checkpoint in place of --load"
            hint = f"resume with {flag_of(change.option)} as it was, or start again from its hf/ folder: {how}"
            raise CheckpointError(what, where=where, hint=hint)


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


def _list_sources(sources: Sequence[Mapping[str, Any]]) -> str:
    texts = (f"{entry['path']} ({entry['source_hash']}, {entry.get('num_rows')} rows)" for entry in sources)
    return ", ".join(texts) or "none"
