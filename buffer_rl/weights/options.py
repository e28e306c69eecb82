"""Options of weight publication."""

from __future__ import annotations

from typing import ClassVar

from buffer_rl.args import Args
from buffer_rl.cluster.locality import require_local_engines
from buffer_rl.engines.external import urls_of
from buffer_rl.options.checks import first, refuse
from buffer_rl.options.section import Section, option
from buffer_rl.plan.schedule import rollout_only


class WeightOptions(Section):
    """Publication of weights to the engines."""

    heading: ClassVar[str] = "Weights"

    weight_sync_mode: str = option(
        "disk",
        "weight transport: disk, tensor (through the memory of one machine) or distributed (broadcasts to any machine)",
        kind="weight_transport",
    )
    update_weight_buffer_size: int = option(
        256 * 1024 * 1024, "maximum number of bytes per transfer of weights; a larger tensor is sent alone", gt=0
    )
    update_weight_disk_dir: str | None = option(
        None,
        "folder for published weights, on a file system that all nodes share, for this run alone; read by "
        "--weight-sync-mode disk and by roles. If not set: in --run-dir",
        metavar="PATH",
    )
    publish_delta: bool = option(
        False,
        "send embedded engines what changed since the version that they have, in --engine-dtype; with "
        "--weight-sync-mode disk or distributed. Trainer and engines each keep a version more in memory",
    )
    publish_follow: str | None = option(
        None,
        "folder on a shared file system where each published version is written as well, with a pointer to the newest, "
        "for engines that others run and that poll it; for this run alone",
        metavar="PATH",
    )
    publish_follow_keep: int = option(2, "how many versions before the newest stay in --publish-follow", ge=0)
    update_weights_timeout_s: float = option(
        600.0, "deadline for one call to the engines in a publication, in seconds; three times that in total", gt=0
    )
    check_weight_update_equal: bool = option(False, "after a publication, compare checksums of the engines' weights")

    @staticmethod
    def check(args: Args) -> None:
        """For engines that cannot apply what changed, and for transports that would save nothing by it."""
        mode, engine = args.weight_sync_mode, args.rollout_engine
        require_local_engines(mode, [*args.engine_urls, *urls_of(args)])
        refused = {
            f"--weight-sync-mode {mode}: it sends all weights": mode not in ("disk", "distributed"),
            f"--rollout-engine {engine}: its engines take whole tensors": engine != "embedded" and not args.engine_urls,
            "--lora-publish adapter: adapters are all that is sent": publishes_adapters(args),
        }
        delta = args.publish_delta and not rollout_only(args)
        refuse(delta and first(refused), "--publish-delta: {}")


def engines_may_differ(args: Args) -> bool:
    """Whether engines may have started with other weights than the trainer, or call them otherwise: those behind
    ``--router-url`` were not started by the run, those of a plugin's launcher not by this package, a model provider or
    converter may change what is in ``--hf-checkpoint``, and ``--trainer-load`` and adapters do."""
    foreign = args.engine_urls or args.rollout_engine != "embedded"  # the run sets --router-url of its own engines too
    own = (args.custom_model_provider_path, args.model_converter_path, args.trainer_load, args.lora_adapter_path)
    return any((foreign, *own)) or publishes_adapters(args)


def publishes_adapters(args: Args) -> bool:
    """Whether engines get adapters alone: none has one before the first publication."""
    return args.lora_publish == "adapter"
