"""Options of a run: schedule, seed, folders, checkpoints; progress display, metrics, sample dumps and trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from buffer_rl.args import Args
from buffer_rl.data.eval_sets import eval_sets_of
from buffer_rl.options.checks import given, refuse
from buffer_rl.options.section import Section, did_you_mean, flag_of, option
from buffer_rl.plan.schedule import Schedule, parse_early_stop, rollout_only, train_only
from buffer_rl.plan.staleness import async_notices, check_async
from buffer_rl.rollout.options import whole_rollout_functions

PLACEHOLDER = "{rollout_id}"
JOB_PACKAGE = "_ray_pkg_"  # how the folder begins that Ray makes of a submitted job's working_dir


class RunOptions(Section):
    """Folders, checkpoints, schedule, seed and plugins."""

    heading: ClassVar[str] = "Run"

    run_dir: str = option(
        "runs/default", "local folder for metrics, samples, weights, logs", metavar="PATH", common=True
    )
    schedule: Literal["lockstep", "pipelined", "one-step-off", "async"] = option(
        "lockstep",
        "lockstep: train after the last group of a rollout; pipelined: work on each group as soon as it is finished; "
        "one-step-off: generate the next rollout during a step; async: generate all the time, within --max-staleness",
        common=True,
    )
    max_staleness: int | None = option(
        None,
        "M of --schedule async: step v trains on tokens of weight version v - M or later; 0 is lockstep; default 2",
        ge=0,
        needs="schedule=async",
    )
    target_staleness: int | None = option(
        None,
        "S of --schedule async: typical staleness, which sets how many groups are in production; default M / 2, "
        "rounded up",
        ge=0,
        needs="schedule=async",
    )
    publication: Literal["retract", "drain"] | None = option(
        None,
        "what new weights do to running requests; retract: they continue with the new weights (default of async); "
        "drain: they end first (default of one-step-off)",
    )
    seed: int = option(1234, "seed of the initialisation and of the trainer")
    deterministic: bool = option(False, "equal seeds give equal metrics and parameters, at some cost in speed")
    save: str | None = option(None, "folder for checkpoints, or a URL that fsspec reaches", metavar="PATH", common=True)
    save_interval: int | None = option(
        None, "save a checkpoint every N steps, and at the end", ge=1, needs="save", common=True
    )
    save_timeout_s: float = option(3600.0, "deadline for one checkpoint, including its upload, in seconds", gt=0)
    keep_last: int | None = option(
        None, "keep only the N newest checkpoints in --save; if not set: all", ge=1, needs="save"
    )
    keep_best: str | None = option(
        None,
        "keep also the checkpoint with the highest eval/NAME; for the lowest: --keep-best=-eval/NAME",
        metavar="EVAL",
        needs="keep_last",
    )
    save_on_exit_s: float = option(
        30.0,
        "after SIGTERM, finish the training step under way and save within this many seconds; in a rollout, save at "
        "once. Ctrl-C finishes the step first, in any time",
        gt=0,
    )
    async_save: bool = option(
        False,
        "write checkpoints in the background; one is complete before the next begins and before the run ends",
        needs="save",
    )
    save_optim: bool = option(
        True, "keep the optimizer's state in checkpoints; without it a resumed run starts with new Adam moments"
    )
    save_dtype: Literal["input", "float32", "bfloat16", "float16"] = option(
        "input",
        "number format of the exported model (hf/ in checkpoints and in --run-dir); input: that of each weight in "
        "--hf-checkpoint. Training, publication and resume use float32",
    )
    load: str | None = option(
        None, "resume from a folder or URL; auto: the newest in --save, if any", metavar="PATH", common=True
    )
    max_global_restarts: int = option(
        3,
        "maximum number of restarts of all processes from the newest checkpoint, after a trainer rank died or "
        "another process exceeded its own limit of restarts; 0: end the run instead",
        ge=0,
    )
    early_stop: str | None = option(
        None, "end the run when an evaluation metric reaches a value, for example 'eval/dev>=0.25'", metavar="EXPR"
    )
    trial: bool = option(
        True,
        "before anything starts, render, encode and score a few rows in a separate process; use --no-trial if the "
        "reward must not be called then",
    )
    num_rollout_workers: int = option(1, "number of processes that run rollout functions", ge=1)
    ray_address: str | None = option(None, "address of a running Ray cluster; if not set, the run starts a local one")
    object_store_gb: float = option(
        0.5, "size of the local Ray object store, in GB (10^9 bytes); the rest goes to disk, which is slow", ge=0.1
    )
    ship_code: bool = option(True, "copy the files of your plugins to the nodes of --ray-address")
    custom_config_path: dict[str, Any] | None = option(
        None, "more attributes of args for your functions, for example a file my.yaml with 'max_turns: 3'"
    )
    plugin: list[str] = option([], "pluggy plugins to load; no:NAME blocks one", metavar="NAME", short="-p")

    @staticmethod
    def check(args: Args) -> None:
        # What no run can be without comes before everything that may be wrong with the rest.
        hint = "add --hf-checkpoint PATH, or 'hf_checkpoint: PATH' in the file of --config"
        refuse(not args.hf_checkpoint, "--hf-checkpoint: there is no model to train", hint)
        no_data = not args.prompt_data and not train_only(args) and args.data_source_path is None
        hint = "add --prompt-data PATH, or your own data source with --data-source-path"
        refuse(no_data, "--prompt-data: there are no training prompts", hint)
        endless, hint = args.num_rollout is None and args.num_epoch is None, "add --num-rollout N or --num-epoch N"
        refuse(endless, "--num-rollout: the length of the run is not given", hint)
        # A name that is an option has a meaning for the run, which what functions see on ``args`` never changes.
        name = next((name for name in sorted(args.custom_config_path or ()) if name in type(args).model_fields), "")
        hint = f"take it out of there and give {flag_of(name)}"
        refuse(name, "--custom-config-path: {} is an option of the run, and no name of your own", hint)
        check_async(args)
        stop = None if args.early_stop is None else parse_early_stop(args.early_stop).metric
        _check_evaluated(args, "--early-stop", stop)
        _check_evaluated(args, "--keep-best", args.keep_best and args.keep_best.removeprefix("-"))

    @staticmethod
    def notices(args: Args) -> Iterator[str]:
        whole = [(what, flag_of(name)) for name, what in whole_rollout_functions(args).items()]
        if Schedule.of(args).streams and not rollout_only(args):
            for what, flag in whole:
                yield (
                    f"--schedule {args.schedule} overlaps nothing with generation here: with {flag}, {what} sees the "
                    "whole rollout, so no group is finished before all are"
                )
        yield from async_notices(args, [flag for _, flag in whole])
        folders = [(flag_of(name), str(getattr(args, name) or "/")) for name in ("run_dir", "save")]
        relative = [flag for flag, path in folders if "://" not in path and not Path(path).is_absolute()]
        if relative and any(part.startswith(JOB_PACKAGE) for part in Path.cwd().parts):
            yield (
                f"{' and '.join(relative)}: a relative path lies in Ray's copy of the job's working folder, which Ray "
                "may remove after the job: name an absolute path"
            )


def _check_evaluated(args: Args, flag: str, metric: str | None) -> None:
    """Raises ConfigError if no evaluation during the run gives the metric that an option names."""
    if metric is None:
        return
    metrics = [f"eval/{eval_set.name}" for eval_set in eval_sets_of(args)]
    is_known = any(metric == known or metric.startswith(f"{known}/") for known in metrics)
    hint, expected = did_you_mean(metric, metrics), f"eval/NAME of --eval-prompt-data: {', '.join(metrics) or 'none'}"
    refuse(not is_known, f"{flag}: the metric {metric!r} is of no evaluation set", hint, expected)
    refuse(args.eval_interval is None, f"{flag}: it needs evaluations during the run", "add --eval-interval N")


class DebugOptions(Section):
    """Generation or training alone."""

    heading: ClassVar[str] = "Debugging"

    debug_rollout_only: bool = option(
        False, "generate and evaluate without a trainer, with the initial weights or those behind --router-url"
    )
    debug_train_only: bool = option(
        False, "train on the rollouts of --load-debug-rollout-data, without engines, rollout workers and evaluation"
    )
    save_debug_rollout_data: str | None = option(
        None, "write the rows of each rollout to this path, which contains {rollout_id}", metavar="PATH"
    )
    load_debug_rollout_data: str | None = option(
        None, "read the rows of each rollout from here, do not generate; implies --debug-train-only", metavar="PATH"
    )

    @staticmethod
    def check(args: Args) -> None:
        """For a half run that lacks what it works on, or that could not do what it is asked to."""
        for name in ("save_debug_rollout_data", "load_debug_rollout_data"):
            path, expected = getattr(args, name), f"a path with {PLACEHOLDER}, such as 'rows_{PLACEHOLDER}.safetensors'"
            is_one = bool(path and PLACEHOLDER not in path)
            refuse(is_one, f"{flag_of(name)}: {path!r} names one file for all rollouts", expected=expected)
        if train_only(args):
            what, hint = "--debug-train-only: there are no rollouts to train on", "add --load-debug-rollout-data PATH"
            refuse(not args.load_debug_rollout_data, what, hint)
            refuse(rollout_only(args), "--debug-rollout-only and --load-debug-rollout-data: nothing is left of the run")
            unknown = args.num_rollout is None and (args.data_source_path is not None or not args.prompt_data)
            refuse(unknown, "--num-rollout: the number of recorded rollouts is not known", "add --num-rollout N")
            found = given(args, "save_debug_rollout_data", "early_stop", "keep_best")
            refuse(found, "{}: it needs rollouts, and none are generated")
        what = "--debug-rollout-only and {}: there is no trainer to save or to resume"
        hint = "to generate with a checkpoint's weights: --hf-checkpoint CHECKPOINT/hf"
        refuse(rollout_only(args) and given(args, "save", "load"), what, hint)


class ObserveOptions(Section):
    """Progress display, metric loggers, sample dump and trace."""

    heading: ClassVar[str] = "Observation"

    logger: list[str] = option(["tensorboard"], "metric loggers besides metrics.jsonl", kind="logger", common=True)
    progress: Literal["auto", "rich", "plain", "none"] = option("auto", "progress display")
    dump_samples: int = option(4, "number of groups per rollout to write to samples.jsonl", ge=0)
    trace: bool = option(True, "write trace.json, a timeline of all processes for Perfetto and the report")
