"""What a run with a staleness of 1 or more says at its start: how far production runs ahead, and whether engines,
rollout workers and the object store have room for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from buffer_rl.plan.schedule import Schedule

if TYPE_CHECKING:
    from buffer_rl.args import Args

BYTES = 4
"""Of each number of a payload: ids are int32, masks and log-probabilities float32."""


def staleness_notice(args: Args) -> str:
    """One text: staleness, bound and window; groups and samples in flight; what has no room for them."""
    schedule = Schedule.of(args)
    line = f"--schedule {schedule.mode}: target staleness {schedule.target}, at most {schedule.max_staleness}"
    if schedule.by_window:
        window = schedule.window(args.rollout_batch_size)
        line += f"; window {window}: a group is trained on before {window} younger ones have passed it"
    parts = [line, slots_text(args), store_text(args)]
    return "; ".join(part for part in parts if part)


def slots_text(args: Args) -> str:
    """How many samples may be in flight, how many of them the rollout workers send, and for how many the engines have
    slots; with what to change if slots stay empty."""
    schedule = Schedule.of(args)
    tickets = schedule.target + 1 if schedule.by_window else 1  # one-step-off they run one after another
    groups = tickets * args.rollout_batch_size
    samples, sent = groups * args.n_samples_per_prompt, args.num_rollout_workers * args.rollout_concurrency
    line = f"up to {groups} groups ({samples} samples) are in flight; rollout workers send at most {sent} at a time"
    if args.engine_urls or args.rollout_external_engine_addrs:  # --router-url is set for engines of the run as well
        return f"{line}; the slots of engines that run elsewhere are not known"
    slots = args.rollout_num_engines * args.engine_max_running_requests
    line += f"; engines have {slots} slots"
    if sent < min(slots, samples):
        least = -(-min(slots, samples) // args.num_rollout_workers)
        return f"{line}, of which at least {slots - sent} stay empty: --rollout-concurrency {least} fills more"
    if samples < slots:
        line += f", of which at least {slots - samples} stay empty"
    return line


def store_text(args: Args) -> str:
    """What the columns of all groups in flight take of the object store, if each sample is as long as it may be; empty
    if they are too small for the store. Images and kept tokens come on top."""
    response = args.rollout_max_response_len
    total = args.rollout_max_context_len or args.engine_context_length
    prompt = "" if total or args.rollout_max_prompt_len else ", prompts apart"
    total = total or response + (args.rollout_max_prompt_len or 0)
    # Of each group: tokens; loss mask and log-probabilities of the response.
    lengths = (total, min(response, total), min(response, total))
    columns = [args.n_samples_per_prompt * BYTES * length for length in lengths]
    large = sum(size for size in columns if size >= args.data_storage_min_bytes)
    if not large:
        return ""
    steps = Schedule.of(args).target + 1
    gigabytes = steps * args.rollout_batch_size * large / 1e9
    line = f"payloads of {steps} steps take up to {gigabytes:.2g} GB of the object store{prompt}"
    if args.ray_address is None and gigabytes > args.object_store_gb:
        line += f", which has {args.object_store_gb:g} GB: --object-store-gb {-(-gigabytes // 0.5) * 0.5:g} holds them"
    return line
