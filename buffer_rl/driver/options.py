"""Options of a run: schedule, seed, folders, checkpoints."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from buffer_rl.options.section import Section, option


class RunOptions(Section):
    """The run as a whole."""

    heading: ClassVar[str] = "Run"

    run_dir: str = option("runs/default", "where metrics, samples, weights and logs go; a local folder", metavar="PATH")
    schedule: Literal["lockstep", "pipelined"] = option(
        "lockstep",
        "when the work on a rollout's groups starts: after the last of them (lockstep), or as each is finished "
        "(pipelined); both train on exactly the current weights",
    )
    seed: int = option(1234, "seed of initialisation and of the trainer")
    deterministic: bool = option(False, "equal metrics and parameters for equal seeds, at some cost in speed")
    save: str | None = option(None, "checkpoint folder, or a URL that fsspec reaches", metavar="PATH")
    save_interval: int | None = option(None, "checkpoint every this many steps (and at the end)", ge=1)
    save_timeout_s: float = option(3600.0, "deadline of one checkpoint, its upload included, in seconds", gt=0)
    keep_last: int | None = option(None, "this many of the newest checkpoints remain in --save; absent: all", ge=1)
    keep_best: str | None = option(
        None,
        "besides these, the one with the highest eval/NAME; for the lowest: --keep-best=-eval/NAME",
        metavar="EVAL",
    )
    async_save: bool = option(
        False,
        "go on with the run while a checkpoint is written, from a copy in memory; it is whole before the next one "
        "begins, and before the run ends",
    )
    save_dtype: Literal["input", "float32", "bfloat16", "float16"] = option(
        "input",
        "number format of the model in hf/ of checkpoints and of --run-dir; input: that of each weight in "
        "--hf-checkpoint. What is trained, published and resumed from is float32",
    )
    load: str | None = option(None, "resume from a folder or URL; auto: the newest in --save, if any", metavar="PATH")
    max_global_restarts: int = option(
        3,
        "how often in a run all of its processes are started again from its newest checkpoint: after a trainer rank "
        "died, or another process more often than it is replaced; 0: such a death ends the run",
        ge=0,
    )
    early_stop: str | None = option(
        None, "end the run once an evaluation metric is reached, for example 'eval/dev>=0.25'", metavar="EXPR"
    )
    trial: bool = option(
        True,
        "before anything is started, render and encode a few rows and score answers to them, in a process of its own; "
        "--no-trial for a reward that must not be called then",
    )
    num_rollout_workers: int = option(1, "processes that run rollout functions", ge=1)
    ray_address: str | None = option(None, "a running Ray cluster; a local one is started where absent")
    object_store_gb: float = option(
        0.5,
        "memory of the object store of the local Ray that is started, in GB of 10^9 bytes; what does not fit is "
        "written to disk, which is slow",
        ge=0.1,
    )
    ship_code: bool = option(True, "send your plugins' own files to the nodes of --ray-address")
    custom_config_path: dict[str, Any] | None = option(
        None,
        "names and values that your functions find on args besides the options, for example in the file my.yaml: "
        "'max_turns: 3'",
    )
    plugin: list[str] = option([], "pluggy plugins to load, or no:NAME to block one", metavar="NAME", short="-p")


class DebugOptions(Section):
    """Halves of a run, for looking into one of them alone."""

    heading: ClassVar[str] = "Debugging"

    debug_rollout_only: bool = option(
        False,
        "generate and evaluate with the initial weights, or those of the engines behind --router-url; no trainer is "
        "started",
    )
    debug_train_only: bool = option(
        False, "train on the rollouts of --load-debug-rollout-data; no engine, no rollout worker, no evaluation"
    )
    save_debug_rollout_data: str | None = option(
        None, "write the rows of each rollout; the path holds {rollout_id}", metavar="PATH"
    )
    load_debug_rollout_data: str | None = option(
        None, "read the rows of each rollout, in place of generating; implies --debug-train-only", metavar="PATH"
    )
