"""``buffer-rl train``: checks everything that can be checked before Ray is started, then trains.

Order: options, what must hold between them, model and checkpoint folders, where the plugins are (nothing is
imported), every data file, the plugins themselves, then a trial of a few rows. ``--dry-run`` ends there and shows
what was found.
"""

from __future__ import annotations

import argparse
import os
import pickle
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from buffer_rl.agents.tools import check_environment, check_tools
from buffer_rl.args import CORE_SECTIONS, Args
from buffer_rl.cluster.fork_server import SOCKET_VARIABLE, start_process
from buffer_rl.cluster.requirements import check_devices
from buffer_rl.data.dataset import PromptDataset
from buffer_rl.driver.folders import LOCK_NAME, folder_lock, make_folders, with_start
from buffer_rl.driver.provenance import check_checkpoint, with_special_tokens
from buffer_rl.driver.role_checks import check_roles
from buffer_rl.errors import BufferRLError, ConfigError, DataError, PluginError, Stopped, all_of
from buffer_rl.files.checkpoint import open_checkpoint, read_manifest
from buffer_rl.files.remote import is_remote, local_path
from buffer_rl.kinds.marks import is_for_rows
from buffer_rl.observe.startup import StartUp
from buffer_rl.options.checks import check_options, notices
from buffer_rl.options.help import add_config_flag, add_help, add_options
from buffer_rl.options.redaction import mask_url
from buffer_rl.options.section import Section, dump_args, plugin_kind_of
from buffer_rl.options.sources import Resolved, resolve_namespace
from buffer_rl.plan.counts import derived_counts, with_counts, with_steps
from buffer_rl.plan.schedule import rollout_only
from buffer_rl.plugin.calls import returned
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.rollout.options import is_built_in_rollout
from buffer_rl.rollout.scoring import check_row_choice, unmarked_reward
from buffer_rl.verbs.dry_run import DryRun, PluginUse, print_json, print_text
from buffer_rl.verbs.engine_checks import ContextLimit, check_engines, check_eval_prompts
from buffer_rl.verbs.preflight import check_folders, check_limits, check_row_lengths, with_local_paths
from buffer_rl.verbs.resources import check_resources
from buffer_rl.verbs.row_sources import RowSource, Trial, read_rows
from buffer_rl.verbs.table import print_notices

TRIAL_S = 300.0
"""Deadline of the trial in a process of its own; rewards and masks have shorter ones within it."""
MAX_PRINTED = 100_000
"""Bytes that are shown of what the trial printed, the last."""
BegunTrial = Callable[[Callable[[], None]], Trial]
"""Returns the result of a trial. Its argument is called before something is printed there."""
_DESCRIPTION = """\
Train a model.

Options come from YAML files (--config), from variables BUFFER_RL_<NAME> and from flags, the later ones winning; so do
options that exclude each other, such as --rm-type and --custom-rm-path.
--rollout-batch-size and --rollout_batch_size are one flag. BOOL: --flag, --no-flag or --flag false. Several values:
--flag a b. REF names a plugin: package.module:name, ./file.py:name or a registered name (buffer-rl plugins list).
"""


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
    argv: Sequence[str],
    *,
    name: str = "train",
    description: str = _DESCRIPTION,
    usage: str = "buffer-rl train [--config FILE] [--OPTION VALUE ...]",
) -> argparse.ArgumentParser:
    """Add the verb with a flag for every option, those of plugins included (installed ones, and ``-p`` in argv).

    name, description, usage: for a verb that is this one with some options fixed.
    """
    sections = sections_of(plugins_named(argv))
    parser = subparsers.add_parser(name, description=description, usage=usage, add_help=False)
    add_help(parser, sections)
    add_config_flag(parser)
    parser.add_argument("--dry-run", action="store_true", help="check everything, show options and plugins, and stop")
    parser.add_argument("--all", action="store_true", help="with --dry-run: show the options with defaults as well")
    parser.add_argument("--json", action="store_true", help="with --dry-run: print JSON, with all options")
    add_options(parser, sections)
    parser.set_defaults(run=run, sections=sections)
    return parser


def run(namespace: argparse.Namespace) -> int:
    """Check, then train. Returns the exit status; raises BufferRLError."""
    for flag in ("all", "json"):
        if getattr(namespace, flag) and not namespace.dry_run:
            raise ConfigError(f"--{flag} goes with --dry-run", where=f"--{flag}")
    resolved = resolve_namespace(namespace)
    given = resolved.args
    args = with_start(with_steps(with_counts(given)))
    if args.load != given.load:
        found = f"continues from the newest checkpoint in {mask_url(args.load)}" if args.load else ""
        none = "has no checkpoint yet: the run starts from --hf-checkpoint"
        print_notices([f"--load {mask_url(given.load or '')} {found or none}"])
    sources = {name: derived.option for name, derived in derived_counts(args).items()}
    sources["num_steps_per_rollout"] = "global_batch_size"
    changed = {name for name in sources if getattr(args, name) != getattr(resolved.args, name)}
    origins = {**resolved.origins, **{name: resolved.origins[sources[name]] for name in changed}}
    resolved = replace(resolved, args=args, origins=origins)
    check_options(args)
    check_limits()
    registry = PluginRegistry.from_flags(args.plugin)
    resolved, notice = with_special_tokens(replace(resolved, args=with_local_paths(args, registry)))
    args = resolved.args
    print_notices((*resolved.notices, *notices(args), *([notice] if notice else [])))
    _check_folders_and_data(args)
    engines = check_engines(args, registry)
    check_row_lengths(args)
    check_devices(args)
    needs, scarce = check_resources(args)
    plugins, rows = locate_plugins(resolved, registry), read_data(args, registry)
    data = [source.facts() for source in rows]
    check_checkpoint(args, data)
    for use in plugins:
        if use.origin != "default":  # those are of this package: no mistakes to find, and seconds to import
            registry.resolve(use.kind, use.reference)
    check_row_rm_types(args, registry)
    check_tools(args, registry)
    check_environment(args, registry)
    check_roles(args, registry)
    print_notices(scarce)
    begun = _trial_of(args, registry, rows, engines)
    if namespace.dry_run:
        trial = begun(lambda: None)
        print_notices(trial.notices)
        registry.call_hook("buffer_rl_configure", config=args)  # what plugins check; a run calls it itself
        if args.load is not None and not is_remote(local_path(args.load)):
            open_checkpoint(args.load)  # a run does it itself; it reads every byte
        plan = DryRun(resolved=resolved, plugins=plugins, sources=rows, needs=needs, trial=trial)
        resumed = read_manifest(args.load) if args.load is not None else None
        print_json(plan, resumed) if namespace.json else print_text(plan, resumed, every=namespace.all)
        return 0
    return _launch(args, registry, data, begun, namespace)


def _check_folders_and_data(args: Args) -> None:
    """``check_folders``, whose error also names a training file that cannot be read."""
    try:
        check_folders(args)
    except ConfigError as error:
        try:
            read_rows(args)
        except DataError as other:
            raise all_of([error, ConfigError(str(other))]) from None
        raise


def plugins_named(argv: Sequence[str]) -> list[str]:
    """What ``-p`` and ``--plugin`` name on the command line, read before the options of plugins are known."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("-p", "--plugin", nargs="*", action="extend", default=[])
    return list(early.parse_known_args(argv)[0].plugin)


def sections_of(plugins: Sequence[str]) -> list[str | type[Section]]:
    """The core's option sections, then those that installed plugins and ``plugins`` declare. Raises PluginError."""
    registry = PluginRegistry.from_flags(plugins)
    sections: list[str | type[Section]] = list(CORE_SECTIONS)
    hook = "buffer_rl_add_options"
    for name, declared in reversed(registry.call_hook(hook)):  # pluggy: the last registered comes first
        if not isinstance(declared, Sequence) or isinstance(declared, str) or not all(map(_is_section, declared)):
            expected = "a list of subclasses of buffer_rl.options.section.Section, or of 'module:Class'"
            raise returned("plugin", name, declared, expected, at=hook)
        sections.extend(declared)
    return sections


def _is_section(declared: object) -> bool:
    return isinstance(declared, str) or (isinstance(declared, type) and issubclass(declared, Section))


def locate_plugins(resolved: Resolved, registry: PluginRegistry) -> list[PluginUse]:
    """Find every plugin that the options refer to, importing none. Raises PluginError."""
    args = resolved.args
    uses = []
    for name in type(args).model_fields:
        kind = plugin_kind_of(type(args), name)
        value = getattr(args, name)
        if not kind or value is None:
            continue
        for reference in [value] if isinstance(value, str) else value:
            place = registry.locate(kind, reference)
            origin = str(resolved.origins[name])
            uses.append(PluginUse(option=name, kind=kind, reference=reference, place=str(place), origin=origin))
    return uses


def read_data(args: Args, registry: PluginRegistry) -> list[RowSource]:
    """Read and validate every data file that the options name, and the rewards that its rows choose. What the user
    should know of how they were read is printed.

    Raises DataError.
    """
    sources = read_rows(args)
    for source in sources:
        chosen = source.eval_set.chosen_reward() if source.eval_set is not None else None
        if source.eval_set is None and (args.num_rollout == 0 or not is_built_in_rollout(args)):
            continue  # others score by themselves, not at all, or ask again
        if chosen is None:
            check_row_rewards(source.dataset, args, registry)
        elif chosen and args.custom_rm_path is None and source.eval_set is not None:
            check_reward_name(chosen, f"the evaluation set {source.eval_set.name!r}", args.eval_config or "", registry)
    print_notices(text for source in sources for text in source.dataset.notices)
    return sources


def check_row_rewards(dataset: PromptDataset, args: Args, registry: PluginRegistry) -> None:
    """Raises DataError for the first row whose metadata choose a reward that rows of this run may not choose, or one
    that is not registered. Nothing that only a row names is imported."""
    if args.custom_rm_path is not None or args.custom_group_rm_path is not None:
        return  # which score every row
    if args.rm_type and (flag := dataset.facts.likely_label):
        reward = f"--rm-type {args.rm_type}"
        print_notices([f"{mask_url(dataset.path)}: no row has a label, which {reward} may compare with ({flag}?)"])
    if (bad := dataset.facts.bad_rewards) is not None:
        raise DataError(bad[1].what, where=dataset.where(dataset[bad[0]]), expected=bad[1].expected)
    for name, row in sorted(dataset.facts.rewards.items(), key=lambda item: item[1]):
        where = dataset.where(dataset[row])
        if name not in (args.rm_type, *args.row_rm_types) and name not in registry.names("reward"):
            check_reward_name(name, "the metadata", where, registry)
        check_row_choice(args, name, where=where)


def check_row_rm_types(args: Args, registry: PluginRegistry) -> None:
    """Raises ConfigError for one of ``--row-rm-types`` that is not registered, is broken, or is not marked as safe for
    data to choose."""
    for name in args.row_rm_types:
        try:
            reward = registry.resolve_registered("reward", name)
        except PluginError as error:
            raise ConfigError(f"{name!r}: {error.what}", where="--row-rm-types", hint=error.hint) from error
        if not is_for_rows(reward):
            raise unmarked_reward(name)


def check_reward_name(name: str, whose: str, where: str, registry: PluginRegistry) -> None:
    """Raises DataError if ``name`` is no registered reward, or a broken one."""
    try:
        registry.resolve_registered("reward", name)
    except PluginError as error:
        raise DataError(f"rm_type {name!r} in {whose}: {error.what}", where=where, hint=error.hint) from error


class TrialProcess:
    """The trial in a process of its own (see ``buffer_rl.verbs.trial.main``), which reads the data files once more."""

    def __init__(self, args: Args, engines: list[ContextLimit]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="buffer_rl_trial_")
        given, self._answer = (os.path.join(self._folder.name, name) for name in ("given", "answer"))
        with open(given, "wb") as file:
            pickle.dump((dump_args(args), engines, sys.path), file)
        command = [sys.executable, "-m", "buffer_rl.verbs.trial", given, self._answer]
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115, ``result`` closes it
        streams = self._printed.fileno(), self._printed.fileno()
        self._process = start_process(command, streams=streams, env=os.environ, stage="trial")

    def result(self, interrupt: Callable[[], None]) -> Trial:
        """Wait for what it has found, and show what was printed, before which ``interrupt`` ends the line that grows.
        Raises as ``try_rows``, and ConfigError if the process ends without an answer or takes longer than
        ``TRIAL_S``."""
        with self._folder, self._printed:
            try:
                status: int | str = self._process.wait(TRIAL_S)
            except subprocess.TimeoutExpired:
                status = f"none within {TRIAL_S:g} s"
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._printed.seek(max(0, self._printed.seek(0, os.SEEK_END) - MAX_PRINTED))
                if printed := self._printed.read():
                    interrupt()
                    sys.stderr.write(printed.decode(errors="replace"))
            try:
                with open(self._answer, "rb") as file:
                    found = pickle.load(file)
            except (OSError, EOFError, pickle.UnpicklingError) as error:
                what = f"the trial of a few rows ended without an answer; exit status {status}"
                raise ConfigError(what, where="--trial", hint="--no-trial starts without it") from error
        if isinstance(found, BufferRLError):
            raise found
        return cast("Trial", found)


def _trial_of(
    args: Args, registry: PluginRegistry, sources: Sequence[RowSource], engines: list[ContextLimit]
) -> BegunTrial:
    """The trial, which has begun if a process of its own can be forked for it."""
    if args.trial and os.environ.get(SOCKET_VARIABLE):
        return TrialProcess(args, engines).result

    def here(_: Callable[[], None]) -> Trial:
        check_eval_prompts(args, engines, sources)
        if not args.trial:
            return Trial(unchecked=["prompts and rewards (--no-trial)"])
        from buffer_rl.verbs.trial import try_rows  # imports what scores samples, which takes long

        return try_rows(args, registry, sources, engines)

    return here


def _launch(
    args: Args, registry: PluginRegistry, data: list[dict[str, Any]], trial: BegunTrial, namespace: argparse.Namespace
) -> int:
    title = f"buffer-rl · {Path(args.run_dir).name}"
    out = None if args.progress == "none" else sys.stdout
    startup = StartUp(title, namespace.began, out, command=["buffer-rl", *namespace.arguments])
    startup.ready("checks")
    with ExitStack() as stack:
        stack.callback(startup.end_line)
        from buffer_rl.cluster.environment import direct_variables, variables
        from buffer_rl.cluster.session import ray_session
        from buffer_rl.driver.launch import launch_training
        from buffer_rl.verbs.report import has_written_metrics, report_run

        _check_locks(args)
        if os.environ.get(SOCKET_VARIABLE) and args.ray_address is None:  # Ray starts while the trial runs
            stack.enter_context(variables(direct_variables(args)))
            stack.enter_context(ray_session(None, object_store_bytes=round(args.object_store_gb * 1e9)))
            startup.ready("Ray")
        found = trial(startup.end_line)
        if args.trial:
            startup.ready("trial")
        if found.notices:
            startup.end_line()
        print_notices(found.notices)
        make_folders(args)
        launched = time.time()
        try:
            launch_training(args, registry, data, startup)
        except Stopped as stopped:
            stopped.text = f"{stopped.steps} steps are done; {_resume_hint(args, namespace.arguments)}"
            if stopped.steps > 0:
                report_run(args.run_dir)
            raise
        except BufferRLError:
            if has_written_metrics(args.run_dir, launched):
                report_run(args.run_dir)
            raise
    report_run(args.run_dir)
    return 0


def _check_locks(args: Args) -> None:
    """Raises ConfigError if another run is at work in a folder of the run: before Ray is started, in seconds."""
    folders = {"--run-dir": args.run_dir, "--save": None if rollout_only(args) else args.save}
    for flag, folder in folders.items():
        if folder is not None and Path(local_path(folder), LOCK_NAME).exists():
            with folder_lock(Path(local_path(folder)), flag):
                pass


def _resume_hint(args: Args, arguments: Sequence[str]) -> str:
    """How to continue a run that a signal ended."""
    if args.save is None:
        return "nothing was saved: with --save PATH a run can be resumed"
    loading = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    loading.add_argument("--load")
    kept = loading.parse_known_args(arguments)[1]
    return f"to resume: {shlex.join(['buffer-rl', *kept, '--load', 'auto'])}"
