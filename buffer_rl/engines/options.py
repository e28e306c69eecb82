"""Options of the rollout engines and of the router in front of them."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from buffer_rl.options.section import Section, option


class EngineOptions(Section):
    """Rollout engines."""

    heading: ClassVar[str] = "Engine"

    rollout_engine: str = option("embedded", "which engine to start", kind="engine")
    rollout_num_engines: int = option(1, "engines behind the router", ge=1, common=True)
    engine_device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "where engines that the run starts compute; auto: on GPUs where there are any", common=True
    )
    engine_dtype: Literal["float32", "bfloat16", "float16"] = option("float32", "number format of the engine")
    engine_num_threads: int = option(1, "torch threads an engine", ge=1)
    engine_max_running_requests: int = option(64, "sequences that decode together", ge=1)
    engine_context_length: int | None = option(None, "most tokens of a sequence; the model's own limit where absent")
    engine_start_timeout_s: float = option(300.0, "deadline for an engine or the router to answer, in seconds", gt=0)
    rollout_health_check_timeout: float = option(
        60.0, "seconds after which an engine that answers no /server_info is replaced as one that died", gt=0
    )
    engine_max_restarts: int = option(
        2, "most engines of a run that are started again after they died; with none left the run ends", ge=0
    )
    engine_auth: bool = option(
        True, "engines and router that the run starts answer only to requests with its API key (401 otherwise)"
    )
    engine_api_key: str | None = option(
        None,
        "API key of the engines and the router, as the variable BUFFER_RL_ENGINE_API_KEY or in the --config file; a "
        "command line is no place for it. Made for each run where absent; of --router-url it is the key to send",
        metavar="KEY",
    )
    engine_host: str = option(
        "127.0.0.1",
        "address that engines and router listen on; with --ray-address the run sets it to that of the node of each",
        metavar="ADDRESS",
    )
    rollout_external_engine_addrs: list[str] = option(
        [],
        "engines that run elsewhere, behind a router of this run's own; it starts none, publishes its weights to them "
        "first, and takes one that went away back when it answers again",
        metavar="HOST:PORT",
        one_of="servers",
    )
    router_policy: Literal["manual", "consistent_hashing", "cache_aware", "round_robin", "power_of_two", "random"] = (
        option(
            "manual",
            "how the router that the run starts chooses the engine of a request: manual and consistent_hashing by its "
            "sample's session_id, else by its prompt group (manual has a new one begin where the fewest requests are)",
        )
    )
    router_args: dict[str, Any] = option(
        {},
        "arguments of that router under its own names: --router-cache-threshold 0.5, or a line "
        "router_cache_threshold: 0.5 in the --config file",
        metavar="JSON",
        prefix="router_",
    )
    router_url: str | None = option(
        None,
        "the URL that every generation request goes to; set by the run where absent",
        metavar="URL",
        one_of="servers",
    )
    engine_urls: list[str] = option(
        [], "the engines behind --router-url; absent where the run starts its own: the router lists them", metavar="URL"
    )
