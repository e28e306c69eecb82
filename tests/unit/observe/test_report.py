"""The HTML report: what is on the page, and that nothing a model wrote can act in it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import DataError
from buffer_rl.observe.metrics import phase_seconds, steps_of
from buffer_rl.observe.report import Report, parts_of, read_report, render_report, run_files, write_report
from buffer_rl.observe.run_folder import RunFacts, changed_options, read_facts, write_facts
from buffer_rl.observe.sample_groups import (
    MAX_CHARACTERS,
    MAX_PER_STEP,
    MAX_STEPS,
    chosen_samples,
    plain_text,
    spread,
)
from buffer_rl.observe.svg_chart import names_shown
from buffer_rl.observe.timeline import WorkSpan
from buffer_rl.options.section import compose

METRICS: list[dict[str, Any]] = [
    {"step": 0, "kind": "eval", "eval/dev": 0.25},
    {"step": 0, "kind": "rollout", "rollout/raw_reward": 0.5, "rollout/drop_zero_std": 3.0},
    {"step": 0, "kind": "perf", "perf/rollout_time": 3.0, "perf/train_time": 2.0, "perf/step_time": 6.0},
    {"step": 0, "kind": "train", "train/loss": 0.125, "train/entropy": None},
    {"step": 1, "kind": "train", "train/loss": 0.25},
    {"step": 1, "kind": "eval", "eval/dev": 0.75},
]
NASTY = "</td><script>alert(1)</script><img src=x onerror=\"alert('2')\">&amp;"


class Page(HTMLParser):
    """The tags of a page, and the texts of its table cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.in_script = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self.in_script = False

    def handle_data(self, data: str) -> None:
        (self.scripts if self.in_script else self.texts).append(data)


def sample(step: int = 0, **fields: Any) -> dict[str, Any]:
    usual = {"rollout_id": step, "kind": "train", "prompt": "p", "response": "r", "label": "l", "reward": 1.0}
    return {**usual, "status": "completed", **fields}


def test_what_a_model_wrote_is_text_and_nothing_else() -> None:
    names = ("prompt", "response", "label", "status", "kind", "data_set")
    fields: dict[str, Any] = dict.fromkeys(names, NASTY)
    page = Page(
        render_report(
            Report(
                title=NASTY,
                metrics=[*METRICS, {"step": 1, "kind": "rollout", f"rollout/drop_{NASTY}": 2.0, f"eval/{NASTY}": 1}],
                samples=[sample(**fields, reward={NASTY: 1.0})],
                facts=RunFacts(started=NASTY, version=NASTY, changed={NASTY: NASTY}),
                files={NASTY: NASTY},
            )
        )
    )
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not [tag for tag, _ in page.tags if tag in ("img", "iframe", "object", "link")]
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert page.texts.count(NASTY) >= 5


def test_the_page_asks_for_nothing_and_runs_only_its_own_script() -> None:
    page = Page(render_report(Report(title="run", metrics=METRICS, samples=[sample()])))
    for _, attributes in page.tags:
        assert not (attributes.get("src") or attributes.get("href") or "").startswith(("http", "//"))
    (policy,) = [a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    own = base64.b64encode(hashlib.sha256("".join(page.scripts).encode()).digest()).decode()
    assert f"script-src 'sha256-{own}'" in policy
    assert "default-src 'none'" in policy


def test_the_page_shows_gains_curves_times_drops_samples_and_files() -> None:
    text = render_report(
        Report(
            title="run",
            metrics=METRICS,
            samples=[sample()],
            facts=RunFacts(started="2026-01-02T03:04:05+00:00", version="0.1", changed={"--lr": 0.5}),
            files={"metrics": "metrics.jsonl"},
        )
    )
    for expected in (
        "+0.500",
        "0 → 1",
        "Loss",
        "zero_std: 3",
        "differ from their defaults: 1",
        "--lr",
        "metrics.jsonl",
    ):
        assert expected in text
    assert "2026-01-02 03:04:05 UTC" in text
    assert "Entropy" not in text  # it was never a number
    rollout = text[text.index("rollout</td>") :]
    assert "3.000 s" in rollout[:120]
    assert "50.0%" in rollout[:250]


def test_the_reward_with_dropped_groups_is_on_the_page_where_it_is_another_one() -> None:
    metrics = [*METRICS, {"step": 0, "rollout/raw_reward_all": 0.25}]
    more = {"step": 1, "rollout/raw_reward": 0.5, "rollout/raw_reward_all": 0.25}
    assert (
        render_report(Report(title="run", metrics=[*metrics, more])).count("stroke-dasharray") == 2
    )  # wide and narrow
    page = render_report(Report(title="run", metrics=metrics))
    assert "training reward with dropped groups" in page
    assert "step 0: 0.25<" in page
    page = render_report(Report(title="run", metrics=[*METRICS, {"step": 0, "rollout/raw_reward_all": 0.5}]))
    assert "with dropped groups" not in page


def keys_of(page: str) -> dict[str, str]:
    """The colour of each phase in the table of times."""
    return {name: colour for colour, name in re.findall(r'<span class="key c(\d+)"></span>(\w+)</td>', page)}


def test_a_phase_has_one_colour_in_every_chart_of_every_run_and_that_of_its_work_on_the_timeline() -> None:
    few = {"rollout": 3.0, "train": 2.0, "step": 6.0}
    many = {**few, "ref_log_probs": 0.25, "values": 0.25, "save": 0.25, "publish": 0.25}
    pages = []
    for times in (few, many):
        line = {"step": 0, "kind": "perf", **{f"perf/{name}_time": seconds for name, seconds in times.items()}}
        pages.append(render_report(Report(title="run", metrics=[line])))
    first, second = (keys_of(page) for page in pages)
    assert first == {name: second[name] for name in ("rollout", "train", "other")}
    assert len(set(second.values())) == len(second) == 7
    for name, colour in second.items():
        titles = re.findall(rf'<rect class="bar c(\d+)"[^>]*><title>{name},', pages[1])
        assert titles == [colour] * 2  # shares and seconds
    phase_of_work = {"rollout": "rollout", "update": "train", "publish": "publish", "save": "save"}
    spans = {work: [WorkSpan(name=work, rollout_id=0, start=0.0, end=1.0)] for work in phase_of_work}
    shown = names_shown(spans)
    for work, title in zip(phase_of_work, ("generation", "update", "publish", "checkpoint"), strict=True):
        assert shown[title] == int(second[phase_of_work[work]])


def test_what_the_trainer_measures_has_a_chart_where_it_is_measured() -> None:
    metrics = {
        "critic/loss": 1.0,
        "critic/values": 0.5,
        "critic/explained_variance": 0.5,
        "train/kl_loss": 0.1,
        "train/pg_clipfrac": 0.1,
        "train/train_rollout_logprob_abs_diff": 0.1,
        "staleness/max": 1.0,
        "perf/peak_memory/train_gb": 3.0,
        "perf/peak_memory/rollout_device_gb": 4.0,
    }
    page = render_report(Report(title="run", metrics=[{"step": step, "kind": "x", **metrics} for step in range(2)]))
    for heading in ("Loss", "Critic: values and returns", "KL divergence", "Share of clipped tokens", "Staleness"):
        assert f"<h3>{heading}" in page
    assert "<h3>Engine and trainer: difference" in page
    memory = page[page.index("<h3>Peak memory (GB)") :]
    assert memory.index("rollout device</li>") < memory.index("train</li>") < memory.index("</figure>")
    assert "effective sample size" not in page


def test_the_copied_command_is_text_and_the_button_is_the_scripts(tmp_path: Path) -> None:
    facts = RunFacts(command=["buffer-rl", "train", "--title", "a b", NASTY], changed={"--engine-api-key": "***"})
    page = render_report(Report(title="run", metrics=METRICS, facts=facts))
    assert "buffer-rl train --title &#39;a b&#39;" in page
    assert '<button type="button" data-copies="command" hidden>' in page
    assert "onclick" not in page
    assert "differ from their defaults" not in page  # a secret is none


def test_wide_pictures_have_a_narrow_one_for_narrow_pages() -> None:
    page = render_report(Report(title="run", metrics=METRICS))
    wide, narrow = re.findall(r'<div class="for-(?:wide|narrow)"><svg viewBox="0 0 (\d+) \d+"', page)[:2]
    assert (wide, narrow) == ("1000", "460")


def test_a_page_of_almost_nothing_is_a_page() -> None:
    page = render_report(Report(title="run", metrics=[]))
    assert "evaluated nothing" in page
    assert "<svg" not in page


def test_the_phases_of_a_step_add_up_to_it() -> None:
    times = {"rollout": 3.0, "ref_log_probs": 0.25, "old_log_probs": 0.5, "train": 2.0, "publish": 0.5, "step": 6.0}
    phases = phase_seconds({f"perf/{name}_time": seconds for name, seconds in times.items()})
    assert phases["train"] == 1.25  # without the two passes that it contains
    assert phases["other"] == 0.5
    assert sum(phases.values()) == 6.0


def test_a_step_that_was_done_again_counts_once_and_as_last_time() -> None:
    steps = steps_of([*METRICS, {"step": 0, "kind": "train", "train/loss": 9.0}])
    assert list(steps) == [0, 1]
    assert steps[0]["train/loss"] == 9.0


def test_the_samples_shown_are_spread_over_the_run_and_bounded() -> None:
    records = [sample(step, response=str(i)) for step in range(100) for i in range(MAX_PER_STEP + 5)]
    chosen = chosen_samples(records)
    steps = [record["rollout_id"] for record in chosen]
    assert len(chosen) == MAX_STEPS * MAX_PER_STEP
    assert steps == sorted(steps, reverse=True)
    assert {0, 99} <= set(steps)
    assert spread([1, 2, 3], 12) == [1, 2, 3]
    page = render_report(Report(title="run", metrics=METRICS, samples=[sample(response="x" * (MAX_CHARACTERS + 7))]))
    assert "7 more characters" in page
    assert "x" * (MAX_CHARACTERS + 1) not in page


def test_chat_messages_are_readable() -> None:
    assert plain_text([{"role": "user", "content": "hi"}, {"role": "tool", "content": None}]) == "user: hi\ntool: "
    assert plain_text(["a", 1]) == '["a", 1]'
    assert plain_text(None) == ""


def test_a_folder_becomes_a_page_beside_its_files(tmp_path: Path) -> None:
    run = tmp_path / "my run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in METRICS))
    lone_surrogate = json.dumps(sample(response="\ud800"))
    (run / "samples.jsonl").write_text(lone_surrogate + "\n" + '{"unfinished')
    assert write_report(read_report(run), run) == run / "report.html"
    text = (run / "report.html").read_text(encoding="utf-8")
    assert "<h1>my run</h1>" in text
    assert 'href="metrics.jsonl"' in text
    elsewhere = write_report(read_report(run, "Title"), run, tmp_path / "pages" / "one.html")
    assert 'href="../my%20run/metrics.jsonl"' in elsewhere.read_text(encoding="utf-8")
    with pytest.raises(DataError, match="no such file"):
        read_report(tmp_path)


def test_the_facts_are_the_options_that_were_changed(tmp_path: Path) -> None:
    args = compose(CORE_SECTIONS).model_validate({"num_rollout": 3, "eval_prompt_data": ["dev=x"], "seed": 4321})
    changed = {"--num-rollout": 3, "--eval-prompt-data": ["dev=x"], "--seed": 4321}
    assert changed_options(args) == changed
    write_facts(tmp_path, args)
    facts = read_facts(tmp_path)
    assert facts.changed == changed
    assert facts.started.endswith("+00:00")
    assert facts.cores == len(os.sched_getaffinity(0))
    (tmp_path / "run.json").write_text("[]")
    assert read_facts(tmp_path) == RunFacts()


def test_a_run_that_was_resumed_shows_its_parts_and_what_changed_between_them(tmp_path: Path) -> None:
    def part(resume_step: int | None, command: str, **options: Any) -> RunFacts:
        args = compose(CORE_SECTIONS).model_validate(options)
        write_facts(tmp_path, args, command=["buffer-rl", "train", command], resume_step=resume_step)
        return read_facts(tmp_path)

    first = part(None, "one", lr=0.001, num_rollout=4)
    assert parts_of(first) == []
    part(4, "two", lr=0.001, num_rollout=6, load="saves")
    third = part(6, "three", num_rollout=6, load="saves")
    shown = [(each["first"], each["command"].split()[-1], each["changes"]) for each in parts_of(third)]
    assert shown == [(0, "one", {}), (4, "two", {"--num-rollout": "4 → 6"}), (6, "three", {"--lr": "0.001 → default"})]
    page = render_report(Report(title="run", metrics=METRICS, facts=third))
    assert "which was resumed: 3" in page
    assert "differ from their defaults, of the last part: 2" in page
    assert "after step 6, " in page
    again = part(4, "four", num_rollout=9, load="saves")  # from an earlier checkpoint: what came after it is gone
    assert [each["first"] for each in parts_of(again)] == [0, 4]
    assert parts_of(part(None, "anew")) == []
    assert "resumed" not in render_report(Report(title="run", metrics=METRICS, facts=first))


def test_facts_with_a_lone_surrogate_are_read_again(tmp_path: Path) -> None:
    """A file's name that is no UTF-8 is one in the command."""
    words = ["buffer-rl", "train", "--config", "a\udc80.yaml"]
    write_facts(tmp_path, compose(CORE_SECTIONS)(), command=words)
    assert list(read_facts(tmp_path).command) == words


def test_the_checkpoints_are_among_the_files_of_a_run(tmp_path: Path) -> None:
    run_dir, saves = tmp_path / "run", tmp_path / "saves"
    write_facts(run_dir, compose(CORE_SECTIONS)(run_dir=str(run_dir), save=str(saves)))
    assert "checkpoints" not in run_files(run_dir)
    saves.mkdir()
    assert run_files(run_dir)["checkpoints"] == saves
