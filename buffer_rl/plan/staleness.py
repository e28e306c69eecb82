"""Checks of options of runs that train on tokens of older weights than those that they update, and notices about them:
how far production runs ahead, and whether there is room for it. No plugin is imported."""

from __future__ import annotations

from collections.abc import Sequence

from buffer_rl.args import Args
from buffer_rl.options.checks import refuse
from buffer_rl.plan.algorithm import is_supervised, loss_flag, loss_of
from buffer_rl.plan.algorithms import LOSSES
from buffer_rl.plan.counts import optimizer_steps
from buffer_rl.plan.schedule import Mode, Schedule, rollout_only, train_only

COLUMN_ITEM_BYTES = 4
"""Of each number of a payload: ids are int32, masks and log-probabilities float32."""

CORRECTIONS = "--loss-type decoupled_ppo, --use-tis or --use-rollout-logprobs"


def check_async(args: Args) -> None:
    """Raises ConfigError for options that do not go with a staleness of 1 or more, with what to take instead."""
    schedule, where, size = Schedule.of(args), f"--schedule {args.schedule}", args.rollout_batch_size
    if not schedule.max_staleness or train_only(args):
        return
    what = "requests that a publication stops continue by themselves, and those kept beside that would be too old"
    refuse(args.partial_rollout, f"--partial-rollout and {where}: {what}", "take --partial-rollout out")
    what = f"tickets in production already have {schedule.target * size} more groups in flight than a step takes"
    hint, expected = "--target-staleness says how many tickets there are", f"at most --rollout-batch-size {size}"
    more = (args.over_sampling_batch_size or size) > size
    refuse(more, f"--over-sampling-batch-size and {where}: {what}", hint, expected)
    what = "which groups a step trains on, and which weights sampled each token, depends on how long each takes"
    hint = "--schedule one-step-off, whose samples are of one version each, or take --deterministic out"
    varies = args.deterministic and schedule.mode is not Mode.ONE_STEP_OFF
    refuse(varies, f"--deterministic and {where}: {what}", hint)
    steps = f"{schedule.max_staleness} step" + "s" * (schedule.max_staleness > 1)
    uncorrected = _is_uncorrected(args) and loss_of(args) in LOSSES and not args.allow_uncorrected
    what = f"tokens may be {steps} older than the trained weights, which {loss_flag(args)} {loss_of(args)} ignores"
    refuse(uncorrected, f"{where}: {what}", "add one of these, or --allow-uncorrected", CORRECTIONS)


def async_notices(args: Args, whole_rollout_flags: Sequence[str] = ()) -> list[str]:
    """One text for each thing to know about a run with a staleness of 1 or more; it starts all the same.

    whole_rollout_flags: of functions that see all groups of a rollout."""
    schedule = Schedule.of(args)
    if not schedule.max_staleness or train_only(args) or args.num_rollout == 0:
        return []
    found, given = [], f"--schedule {args.schedule}"
    if not rollout_only(args) and (steps := optimizer_steps(args)) > 1:
        found.append(
            f"{given} with {steps} optimizer steps a rollout: the later ones train on older samples than the staleness "
            f"says, which counts rollouts: by up to {steps - 1} more steps"
        )
    if _is_uncorrected(args) and loss_of(args) not in LOSSES:
        found.append(
            f"{given}: tokens may be of older weights than those that are trained; whether the loss {loss_of(args)} "
            f"corrects for it is not known here (what does: {CORRECTIONS}, or the column rollout_log_probs)"
        )
    own = not args.rollout_function_path.startswith("buffer_rl.")
    seeing = [*(["--rollout-function-path"] if own else []), *whole_rollout_flags]
    if args.custom_rollout_log_function_path is not None:
        seeing.append("--custom-rollout-log-function-path")
    if schedule.by_window and seeing:
        found.append(
            f"{given}: what {' and '.join(seeing)} sees is a ticket, and rollout_id is its number; a step may train on "
            "groups of several tickets"
        )
    if schedule.by_window and own:
        found.append(
            f"{given}: a rollout worker calls --rollout-function-path {args.rollout_function_path} for one ticket at a "
            "time, unless it declares concurrent = True: so much of the rollouts overlaps with training and no more"
        )
    return found


def _is_uncorrected(args: Args) -> bool:
    """Whether the loss may have a ratio of policies, and nothing that the options tell takes the one that sampled into
    account. A loss of the user's may do so itself."""
    if rollout_only(args) or args.num_rollout == 0 or is_supervised(args):
        return False
    loss = LOSSES.get(loss_of(args))
    return not (args.use_tis or args.use_rollout_logprobs or (loss is not None and loss.uncorrected))


def staleness_notice(args: Args) -> str:
    """One text: staleness, bound and window; groups and samples in flight; what has no room for them."""
    schedule = Schedule.of(args)
    line = f"--schedule {schedule.mode}: target staleness {schedule.target}, at most {schedule.max_staleness}"
    if schedule.by_window:
        window = schedule.window(args.rollout_batch_size)
        line += f"; window {window}: a group is trained on before {window} younger ones have passed it"
    return "; ".join(filter(None, (line, slots_text(args), store_text(args))))


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
    if they are too small for the store. Images, kept tokens and routed experts come on top."""
    response = args.rollout_max_response_len
    total = args.rollout_max_context_len or args.engine_context_length
    prompt = "" if total or args.rollout_max_prompt_len else ", prompts apart"
    total = total or response + (args.rollout_max_prompt_len or 0)
    # Of each group: tokens; loss mask and log-probabilities of the response.
    lengths = (total, min(response, total), min(response, total))
    columns = [args.n_samples_per_prompt * COLUMN_ITEM_BYTES * length for length in lengths]
    large = sum(size for size in columns if size >= args.data_storage_min_bytes)
    if not large:
        return ""
    steps = Schedule.of(args).target + 1
    gigabytes = steps * args.rollout_batch_size * large / 1e9
    line = f"payloads of {steps} steps take up to {gigabytes:.2g} GB of the object store{prompt}"
    if args.ray_address is None and gigabytes > args.object_store_gb:
        line += f", which has {args.object_store_gb:g} GB: --object-store-gb {-(-gigabytes // 0.5) * 0.5:g} holds them"
    return line
