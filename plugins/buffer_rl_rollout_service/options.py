"""Options of ``ServiceRollout``, and its check of the service before anything starts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from buffer_rl.options.checks import refuse
from buffer_rl.options.section import Section, option
from buffer_rl.plan.schedule import Schedule
from buffer_rl.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    from buffer_rl.args import Args

CHECK_TIMEOUT_S = 10.0
ROLLOUTS = ("rollout_service", "buffer_rl_rollout_service.rollout:ServiceRollout")
"""What ``--rollout-function-path`` says for the rollout function of this plugin."""


class ServiceOptions(Section):
    """The service that a rollout takes its groups from."""

    heading: ClassVar[str] = "Rollout service"

    rollout_service_url: str | None = option(
        None, "URL of the service that --rollout-function-path rollout_service reads", metavar="URL"
    )
    rollout_service_token: str | None = option(
        None, "token of the service; set it in the environment or in the --config file", metavar="TOKEN"
    )


if TYPE_CHECKING:

    class ServiceArgs(Args, ServiceOptions):
        """The options of a run with those of this plugin, for a type checker."""


@hookimpl
def buffer_rl_add_options() -> list[str]:
    """The section above, by reference."""
    return [f"{__name__}:ServiceOptions"]


@hookimpl
def buffer_rl_configure(config: Any) -> None:
    """Raises ConfigError where the rollout function is of this plugin, and its service does not answer, refuses the
    token, or makes groups of another size; or has a group that an asynchronous run cannot take."""
    if config.rollout_function_path.replace(".ServiceRollout", ":ServiceRollout") not in ROLLOUTS:
        return
    from buffer_rl_rollout_service.client import ServiceClient  # what only such a run needs

    async def ask() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        async with ServiceClient(config.rollout_service_url, config.rollout_service_token) as service:
            statistics = await service.statistics(timeout_s=CHECK_TIMEOUT_S)
            return statistics, await service.peek(timeout_s=CHECK_TIMEOUT_S)

    statistics, waiting = asyncio.run(ask())
    size = statistics["group_size"]
    wanted, where = config.n_samples_per_prompt, f"--rollout-service-url {config.rollout_service_url}"
    what, expected = f"{where}: the service makes groups of {size} trajectories", f"--n-samples-per-prompt, {wanted}"
    refuse(size != wanted, what, expected=expected)
    for group in waiting if Schedule.of(config).max_staleness else ():
        require_versions(group, where=f"--schedule {config.schedule} and --rollout-service-url")


def require_versions(group: Mapping[str, Any], *, where: str) -> None:
    """Raises ConfigError for a group of the service if a trajectory of it does not say its weight versions."""
    for item in group["items"]:
        turns = item.get("turns") or []
        of_turns = turns and all(turn.get("version") is not None or turn.get("spans") for turn in turns)
        unknown = item.get("weight_version") is None and not item.get("weight_versions") and not of_turns
        what = f"the trajectory {item['uid']!r} of problem {item['instance_id']!r} does not say which weights made it"
        expected = "in each trajectory weight_version, a whole number, or weight_versions; or version or spans per turn"
        hint = "engines report both in meta_info: send them along with the tokens; or --schedule lockstep"
        refuse(unknown, f"{where}: {what}", hint, expected)
