"""Options of the rollout engines and of the router in front of them."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from buffer_rl.options.section import Section, option


class EngineOptions(Section):
    """Rollout engines and their router."""

    heading: ClassVar[str] = "Engine"

    rollout_engine: str = option("embedded", "engine to start", kind="engine")
    rollout_num_engines: int = option(1, "number of engines behind the router", ge=1, common=True)
    engine_device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "device of the engines; auto: GPUs, if any", common=True
    )
    engine_dtype: Literal["float32", "bfloat16", "float16"] = option("float32", "number format of the engine")
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
