"""What ``--dry-run`` shows: every option with its origin, without secrets; plugins and where they are; data; what the
trial of a few rows gave; what the run needs of the machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from buffer_rl.cluster.process import with_engine_key
from buffer_rl.driver.provenance import option_changes, resume_notices
from buffer_rl.files.checkpoint import Manifest
from buffer_rl.observe.terminal import say
from buffer_rl.options.redaction import mask_secrets, mask_url
from buffer_rl.options.section import load_section
from buffer_rl.options.sources import Resolved
from buffer_rl.verbs.resources import Needs, bytes_text
from buffer_rl.verbs.row_sources import RowSource, Trial, TriedRow, is_evaluation

if TYPE_CHECKING:
    pass


MAX_PROMPT = 200  # characters of the first prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginUse:
    """One option that names a plugin. ``place``: where it is; ``origin``: where the option's value is from."""

    option: str
    kind: str
    reference: str
    place: str
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """A run that could start."""

    resolved: Resolved
    plugins: list[PluginUse]
    sources: list[RowSource]
    needs: Needs
    trial: Trial

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which each training row is used once, at least 1; 0 without rows."""
        args = self.resolved.args
        rows = sum(len(source.dataset) for source in self.sources if not is_evaluation(source))
        return rows and max(1, rows // args.rollout_batch_size)


def print_json(plan: DryRun, resumed: Manifest | None = None) -> None:
    """Print one JSON object with ``options``, ``plugins``, ``data``, ``trial``, ``needs`` and, if the run resumes from
    a checkpoint, ``changed``: each option that differs from the checkpoint's."""
    args = plan.resolved.args
    values = mask_secrets(args.model_dump(mode="json"))
    origins = plan.resolved.origins
    trial = asdict(plan.trial)
    for prompts in trial["prompts"]:
        del prompts["lengths"]
    document: dict[str, Any] = {
        "options": {
            name: {"value": value, "source": str(origins[name].source), "where": origins[name].where}
            for name, value in values.items()
        },
        "plugins": [asdict(use) for use in plan.plugins],
        "data": mask_secrets([source.facts() for source in plan.sources]),
        "trial": trial,
        "needs": {**asdict(plan.needs), "steps_per_epoch": plan.steps_per_epoch},
    }
    if resumed is not None:
        document["changed"] = [asdict(change) for change in option_changes(resumed.facts, with_engine_key(args))]
    say(json.dumps(document, indent=2, ensure_ascii=False))


def print_text(plan: DryRun, resumed: Manifest | None = None) -> None:
    """Print tables, and what differs from the checkpoint that the run resumes from."""
    for line in _option_lines(plan.resolved):
        say(line)
    say("\nPlugins")
    _print_columns([(use.kind, use.reference, use.place) for use in plan.plugins])
    say("\nData files")
    _print_columns([(source.use, mask_url(source.path), f"{len(source.dataset)} rows") for source in plan.sources])
    if plan.trial.prompts:
        say("\nPrompts")
        say(*_prompt_lines(plan.trial), sep="\n")
    if plan.trial.rows:
        say("\nScores of a trial")
        say(*score_lines(plan.trial.rows), sep="\n")
    say("\nThe run")
    _print_columns(_need_lines(plan))
    if resumed is not None:
        say(f"\nOptions that differ from those of the checkpoint of step {resumed.step}")
        args = plan.resolved.args
        for line in resume_notices(resumed.facts, resumed.step, with_engine_key(args)) or ["none"]:
            say(f"  {line}")
    unchecked = "; ".join(plan.trial.unchecked)
    if unchecked:
        say(f"\nDry run: what was checked is right. Not checked: {unchecked}.")
    else:
        say("\nDry run: everything that can be checked before a run is right.")


def score_lines(rows: Sequence[TriedRow]) -> Iterator[str]:
    """One line a row: the scores of the answers to it, the reward and the place of the row."""
    for row in rows:
        scores = "  ".join(f"{name} {score:<6g}" for name, score in row.scores.items())
        form = f" (the label as {row.form.format('…')})" if row.form != "{}" else ""
        yield f"  {row.use}  {scores}  {row.reward}{form}  {mask_url(row.where)}"


def _prompt_lines(trial: Trial) -> Iterator[str]:
    for prompts in trial.prompts:
        text = prompts.text[:MAX_PROMPT] + ("…" if len(prompts.text) > MAX_PROMPT else "")
        yield f"  {prompts.use}  first: {text!r}"
        masks = f", {prompts.masks} loss masks" if prompts.masks else ""
        longest = f"{prompts.longest} in the longest ({mask_url(prompts.longest_at)})"
        yield f"  {prompts.use}  tokens: {prompts.lengths[0]} in the first, {longest}{masks}"


def _need_lines(plan: DryRun) -> list[tuple[str, str, str]]:
    needs, lines = plan.needs, []
    args = plan.resolved.args
    if args.num_rollout != 0:
        step = f"{args.rollout_batch_size} prompts x {args.n_samples_per_prompt} samples"
        lines.append(("rows", f"{args.rollout_batch_size * args.n_samples_per_prompt} a step", step))
        if plan.steps_per_epoch:
            lines.append(("steps", f"{plan.steps_per_epoch} an epoch", ""))
    tokens = f"{plan.trial.tokens} tokens of the tokenizer" if plan.trial.tokens else ""
    lines.append(("model", f"{needs.parameters:,} parameters", tokens))
    lines.append(("disk", bytes_text(needs.disk), ""))
    lines.append(("processes", needs.text, f"{needs.cores} cores"))
    return lines


def _option_lines(resolved: Resolved) -> Iterator[str]:
    values = mask_secrets(resolved.args.model_dump(mode="json"))
    names = max(len(name) for name in values)
    for position, reference in enumerate(resolved.args.section_references):
        section = load_section(reference)
        yield ("\n" if position else "") + (section.heading or section.__name__)
        for name in section.model_fields:
            origin = resolved.origins[name]
            shown = json.dumps(values[name], ensure_ascii=False)
            yield f"  {name:<{names}}  {shown:<28}  {'' if origin.source == 'default' else origin}".rstrip()


def _print_columns(rows: Sequence[tuple[str, str, str]]) -> None:
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    for first, second, third in rows:
        say(f"  {first:<{widths[0]}}  {second:<{widths[1]}}  {third}".rstrip())
