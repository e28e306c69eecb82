"""What ``--dry-run`` shows: every option with its origin, without secrets; plugins and where they are; data; what the
trial of a few rows gave; what the run needs of the machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from buffer_rl.cluster.process import with_engine_key
from buffer_rl.driver.provenance import option_changes, resume_notices
from buffer_rl.files.checkpoint import Manifest
from buffer_rl.observe.terminal import say
from buffer_rl.options.redaction import mask_secrets, mask_url
from buffer_rl.options.section import load_section
from buffer_rl.options.sources import Resolved
from buffer_rl.verbs.resources import Needs, bytes_text, memory_of_processes
from buffer_rl.verbs.row_sources import RowSource, Trial, TriedRow, is_evaluation

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

    @property
    def memory(self) -> dict[str, tuple[int, str]]:
        """An estimate for one process of each name: bytes, and of what."""
        longest = max((prompts.longest for prompts in self.trial.prompts), default=0)
        return memory_of_processes(self.resolved.args, self.needs, longest)


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
        "needs": {**asdict(plan.needs), "steps_per_epoch": plan.steps_per_epoch, "memory": plan.memory},
    }
    if resumed is not None:
        document["changed"] = [asdict(change) for change in option_changes(resumed.facts, with_engine_key(args))]
    say(json.dumps(document, indent=2, ensure_ascii=False))


def print_text(plan: DryRun, resumed: Manifest | None = None, *, every: bool = False) -> None:
    """Print tables, and what differs from the checkpoint that the run resumes from. every: options with their
    defaults, too."""
    say(*_option_lines(plan.resolved, every=every), sep="\n")
    say("\nPlugins")
    _print_columns([(use.kind, use.reference, use.place) for use in plan.plugins if every or use.origin != "default"])
    say("\nData files")
    _print_columns([(source.use, mask_url(source.path), f"{len(source.dataset)} rows") for source in plan.sources])
    if plan.trial.prompts:
        say("\nPrompts", *_prompt_lines(plan.trial), sep="\n")
    if plan.trial.rows:
        say("\nScores of a trial", *score_lines(plan.trial.rows), sep="\n")
    say("\nThe run")
    _print_columns([*_need_lines(plan)])
    if resumed is not None:
        say(f"\nOptions that differ from those of the checkpoint of step {resumed.step}")
        args = plan.resolved.args
        for line in resume_notices(resumed.facts, resumed.step, with_engine_key(args)) or ["none"]:
            say(f"  {line}")
    if unchecked := "; ".join(plan.trial.unchecked):
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


def _need_lines(plan: DryRun) -> Iterator[tuple[str, str, str]]:
    needs, args = plan.needs, plan.resolved.args
    if args.num_rollout != 0:
        step = f"{args.rollout_batch_size} prompts x {args.n_samples_per_prompt} samples"
        yield "rows", f"{args.rollout_batch_size * args.n_samples_per_prompt} per step", step
        if plan.steps_per_epoch:
            yield "steps", f"{plan.steps_per_epoch} per epoch", ""
    tokens = f"{plan.trial.tokens} tokens of the tokenizer" if plan.trial.tokens else ""
    yield "model", f"{needs.parameters:,} parameters", tokens
    for name, (size, what) in plan.memory.items():
        yield "memory", f"about {bytes_text(size)} per {name}", f"estimate: {what}"
    yield "disk", bytes_text(needs.disk), ""
    yield "processes", needs.text, f"{needs.cores} cores"


def _option_lines(resolved: Resolved, *, every: bool) -> Iterator[str]:
    values = mask_secrets(resolved.args.model_dump(mode="json"))
    defaults = mask_secrets(type(resolved.args)().model_dump(mode="json"))
    changed = {name for name, value in values.items() if value != defaults[name]}
    texts = {name: json.dumps(value, ensure_ascii=False) for name, value in values.items() if every or name in changed}
    names = max(map(len, texts), default=0)
    width = min(40, max(map(len, texts.values()), default=0))
    for reference in resolved.args.section_references:
        section = load_section(reference)
        shown = [name for name in section.model_fields if name in texts]
        yield from [section.heading or section.__name__] if shown else ()
        for name in shown:
            origin = resolved.origins[name]
            source = "" if origin.source == "default" else origin
            yield f"  {name:<{names}}  {texts[name]:<{width}}  {source}".rstrip()
    same = [name for name in values if name not in changed and resolved.origins[name].source != "default"]
    if not every:
        given = f"; given with the value of the default: {', '.join(same)}" if same else ""
        yield f"{len(values) - len(changed)} other options have their defaults (--all shows them){given}"


def _print_columns(rows: Sequence[tuple[str, str, str]]) -> None:
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    for first, second, third in rows:
        say(f"  {first:<{widths[0]}}  {second:<{widths[1]}}  {third}".rstrip())
