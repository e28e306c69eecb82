"""Options of the processes of a run: the Buffer, engines and their router; how many devices the roles have, on which
nodes, and which of them are shared."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from buffer_rl.args import Args
from buffer_rl.options.checks import given, refuse
from buffer_rl.options.section import Section, option
from buffer_rl.plan.schedule import Schedule


class PlacementOptions(Section):
    """Where the processes of a run are placed. A device is a GPU; on a cluster of several nodes without any, a CPU."""

    heading: ClassVar[str] = "Placement"

    actor_num_nodes: int | None = option(
        None, "number of nodes for trainer ranks; sets --num-train-ranks, together with --actor-num-gpus-per-node", ge=1
    )
    actor_num_gpus_per_node: int | None = option(
        None, "number of trainer ranks per node, one GPU each; 1 if only --actor-num-nodes is set", ge=1
    )
    rollout_num_gpus: int | None = option(
        None,
        "number of GPUs for all engines; sets --rollout-num-engines, together with --rollout-num-gpus-per-engine. "
        "With --colocate and neither of them: the number of trainer ranks",
        ge=1,
    )
    rollout_num_gpus_per_engine: int = option(1, "number of GPUs per engine, all on one node", ge=1)
    num_gpus_per_node: int | None = option(None, "maximum number of GPUs to use per node; if not set: all", ge=1)
    colocate: bool = option(
        False,
        "place trainer, critic, engines and other roles on the same devices; with --offload-train and "
        "--offload-rollout, trainer and engines hold the memory in turn",
    )
    offload_train: bool = option(
        False,
        "move trained models and optimizer states to host memory during generation, and of policy and critic one "
        "while the other trains; --schedule lockstep",
    )
    offload_rollout: bool = option(
        False, "release the engines' weights, cache and CUDA graphs during training; --schedule lockstep, own engines"
    )
    colocate_actor_ref: bool = option(
        False, "place the processes of reference model and actor's forward pass on the devices of the trainer ranks"
    )
    colocate_critic_reward: bool = option(False, "place processes of a reward model on devices of the critic ranks")
    resource: dict[str, list[int]] | None = option(
        None,
        'number of replicas and GPUs per replica by role, in place of other counts: \'{"actor": [1, 8], "rollout": '
        '[1, 4], "reference": [1, 1], "advantages": [1, 0]}\'; rollout: the engines; other names: your roles',
        metavar="JSON",
    )
    rollout_worker_nodes: list[str] = option(
        [],
        "node addresses for rollout workers, used in turn, for example nodes with free CPUs for rewards and tools; "
        "if not set: near the trainer",
        metavar="ADDRESS",
    )
    train_env_vars: dict[str, str] = option(
        {}, "environment variables of trainer ranks and role processes", metavar="JSON"
    )
    hang_timeout_s: float = option(
        60.0,
        "end and replace a process of trainer, roles, reward model or rollout that does not answer for N seconds, or "
        "makes no progress for N seconds and for 20 times its longest pause so far",
        gt=0,
    )
    placement_timeout_s: float = option(300.0, "deadline for free devices on the cluster, in seconds", gt=0)

    @staticmethod
    def check(args: Args) -> None:
        """For memory that trainer and engines need at the same time, or in which the run has no say."""
        schedule, hint = Schedule.of(args), "--schedule lockstep, or take {} out"
        what = f"{{}} and --schedule {args.schedule}: engines generate while others work, and both need their memory"
        overlaps = schedule.streams or schedule.max_staleness
        refuse(overlaps and given(args, "offload_train", "offload_rollout"), what, hint)
        foreign = args.offload_rollout and given(args, "router_url", "rollout_external_engine_addrs")
        what = "--offload-rollout and {}: the run does not start these engines, and others may use them"
        refuse(foreign, what, "take --offload-rollout out; --offload-train alone goes with any engines")


class EngineOptions(Section):
    """Rollout engines and their router."""

    heading: ClassVar[str] = "Engine"

    rollout_engine: str = option("embedded", "engine to start", kind="engine")
    rollout_num_engines: int = option(1, "number of engines behind the router", ge=1, common=True)
    engine_device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "device of the engines; auto: GPUs, if any", common=True
    )
    engine_dtype: Literal["float32", "bfloat16", "float16"] = option(
        "float32", "number format of the engine; if not set, with --bf16: bfloat16"
    )
    engine_num_threads: int = option(1, "number of torch threads per engine", ge=1)
    engine_max_running_requests: int = option(64, "maximum number of sequences that decode together", ge=1)
    engine_context_length: int | None = option(None, "maximum number of tokens per sequence; if not set: the model's")
    engine_start_timeout_s: float = option(300.0, "deadline for the start of an engine or the router, in seconds", gt=0)
    rollout_health_check_timeout: float = option(
        60.0, "replace an engine that does not answer /server_info for this many seconds", gt=0
    )
    engine_max_restarts: int = option(2, "maximum number of engine restarts; without an engine the run ends", ge=0)
    engine_auth: bool = option(True, "engines and router of the run require its API key (otherwise status 401)")
    engine_api_key: str | None = option(
        None,
        "API key for engines and router; if not set: a new key per run. With --router-url: the key to send. Set it "
        "in the --config file or as BUFFER_RL_ENGINE_API_KEY, never as a flag",
        metavar="KEY",
    )
    engine_host: str = option(
        "127.0.0.1",
        "address that engines and router listen on; with --ray-address: that of the node of each",
        metavar="ADDRESS",
    )
    rollout_external_engine_addrs: list[str] = option(
        [],
        "addresses of running engines; the run starts a router for them, publishes its weights first, and uses an "
        "engine again after an interruption",
        metavar="HOST:PORT",
        one_of="servers",
    )
    router: str = option(
        "sglang", "router that the run starts: sglang, or smg, which passes fields that it does not know", kind="router"
    )
    router_policy: Literal["manual", "consistent_hashing", "cache_aware", "round_robin", "power_of_two", "random"] = (
        option(
            "manual",
            "how the run's router chooses an engine. manual, consistent_hashing: by the sample's session_id, otherwise "
            "by the prompt group; manual starts new ones on the engine with the fewest requests",
        )
    )
    router_args: dict[str, Any] = option(
        {},
        "arguments of the run's router by their own names, for example --router-cache-threshold 0.5",
        metavar="JSON",
        prefix="router_",
    )
    router_url: str | None = option(
        None, "URL for all generation requests; if not set, the run starts a router", metavar="URL", one_of="servers"
    )
    engine_urls: list[str] = option(
        [], "URLs of the engines behind --router-url; not needed for engines that the run starts", metavar="URL"
    )


class BufferOptions(Section):
    """The process that owns prompts, sample groups and the ledger."""

    heading: ClassVar[str] = "Buffer"

    num_data_storage_units: int = option(
        0, "number of processes that hold large payloads in Ray's object store; 0: the Buffer holds them", ge=0
    )
    data_storage_min_bytes: int = option(
        1 << 20,
        "minimum size of a column of a group for the object store, in bytes; smaller ones travel in calls",
        ge=0,
    )
    buffer_timeout_s: float = option(60.0, "deadline for one call to the Buffer, in seconds", gt=0)
    buffer_max_restarts: int = option(
        3,
        "maximum number of replacements of a Buffer that died or hung; counted separately, of repetitions of a "
        "rollout or evaluation lost with a process",
        ge=0,
    )
    buffer_hang_timeout_s: float = option(
        20.0, "replace a Buffer that answers no call for N seconds; at most half of --buffer-timeout-s counts", gt=0
    )
    ledger_dir: str | None = option(
        None,
        "folder for the ledger, on a local disk of the node that starts the run; default: --run-dir",
        metavar="PATH",
    )
