"""What a resumed run does otherwise than the one that wrote its checkpoint: its options, its learning rate."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from buffer_rl.options.redaction import mask_secrets
from buffer_rl.options.section import flag_of
from buffer_rl.plan.algorithm import role_args, uses_critic
from buffer_rl.plan.counts import optimizer_steps
from buffer_rl.plan.roles import ACTOR, CRITIC
from buffer_rl.plan.schedule import RolePlan, critic_only_steps, rollout_only
from buffer_rl.plugin.old_names import with_new_names
from buffer_rl.train.learning_rate import learning_rate, with_decay_iters

if TYPE_CHECKING:
    from buffer_rl.args import Args


ABSENT = "absent"
"""The value of an option that the checkpoint's run did not have, or that this one has not: of another plugin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionChange:
    """An option, the checkpoint's value and the one of now: JSON values without secrets."""

    option: str
    then: Any
    now: Any

    def __str__(self) -> str:
        then, now = (json.dumps(value, ensure_ascii=False) for value in (self.then, self.now))
        return f"{flag_of(self.option)} {then}, now {now}"


def option_changes(facts: Mapping[str, Any], args: Args) -> list[OptionChange]:
    """Every option but ``--load`` that differs from the checkpoint with these facts, by name."""
    then, now = _options_then(facts), mask_secrets(args.model_dump(mode="json"))
    if not then:
        return []
    return [
        OptionChange(option=name, then=then.get(name, ABSENT), now=now.get(name, ABSENT))
        for name in sorted({*then, *now} - {"load"})
        if name not in then or name not in now or then[name] != now[name]
    ]


def _options_then(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint's options; their references to modules of ours as these are called now."""
    then = facts.get("options")
    return {name: with_new_names(value) for name, value in then.items()} if isinstance(then, Mapping) else {}


def resume_notices(facts: Mapping[str, Any], step: int, args: Args) -> list[str]:
    """One line with all options that differ from the checkpoint with these facts, and one for each trained role whose
    learning rate goes on otherwise. step: of the checkpoint, in rollouts."""
    changes = option_changes(facts, args)
    if not changes:
        return []
    lines = [f"options that differ from the checkpoint's: {'; '.join(map(str, changes))}"]
    if rollout_only(args) or args.num_rollout == 0:
        return lines
    roles = (ACTOR, CRITIC) if uses_critic(args) else (ACTOR,)
    return [*lines, *filter(None, (_learning_rate_notice(facts, step, args, role) for role in roles))]


def _learning_rate_notice(facts: Mapping[str, Any], step: int, args: Args, role: str) -> str:
    """Empty if the role's next optimizer step has the learning rate that it would have had."""
    known = {name: value for name, value in _options_then(facts).items() if name in type(args).model_fields}
    then = args.model_copy(update=known)
    rollouts_then, rollouts_now = _lengths(facts, then, args)
    if rollouts_then is None or rollouts_now is None:
        return ""
    before = role_args(with_decay_iters(then, _updates(then, role, rollouts_then)), role)
    now = role_args(with_decay_iters(args, _updates(args, role, rollouts_now)), role)
    taken = _updates(then, role, step) * optimizer_steps(then)
    if learning_rate(before, taken) == learning_rate(now, taken):
        return ""
    whose, last, following = "critic" if role == CRITIC else "policy", max(taken - 1, 0), learning_rate(now, taken)
    text = (
        f"the learning rate of the {whose} goes from {learning_rate(before, last):.3g}, of the checkpoint's last "
        f"optimizer step, to {following:.3g}"
    )
    kept = before.lr_decay_iters
    if learning_rate(now.model_copy(update={"lr_decay_iters": kept}), taken) != learning_rate(before, taken):
        return text
    return (
        f"{text}: it falls over {now.lr_decay_iters} optimizer steps, and fell over {kept} before; "
        f"--lr-decay-iters {kept} keeps the curve"
    )


def _updates(args: Args, role: str, num_rollouts: int) -> int:
    return RolePlan(critic_only_steps=critic_only_steps(args)).num_updates(role, num_rollouts)


def _lengths(facts: Mapping[str, Any], then: Any, now: Any) -> tuple[int | None, int | None]:
    """The rollouts of the run that wrote the checkpoint, and of this one; None if that is not known before the data
    are counted."""
    before = facts.get("num_rollouts", then.num_rollout)
    if now.num_rollout is not None or before is None:
        return before, now.num_rollout
    rows = sum(source["num_rows"] for source in facts.get("data", ()) if source["use"] == "train")
    return before, max(1, now.num_epoch * rows // now.rollout_batch_size) if rows else None
