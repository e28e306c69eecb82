"""What a report shows of samples: by prompt, on the run's scale, evaluation prompts over the steps, targets."""

from __future__ import annotations

from typing import Any

import pytest

from buffer_rl.observe.report import Report, render_report
from buffer_rl.observe.run_folder import RunFacts
from buffer_rl.observe.sample_groups import (
    MAX_ANSWERS,
    MAX_FOLLOWED,
    MAX_MESSAGE,
    MAX_STEPS,
    MAX_TRANSCRIPTS,
    followed_prompts,
    prompt_groups,
    scale_of,
    shown_rewards,
)


def sample(step: int = 0, row: int = 0, kind: str = "train", reward: Any = 1.0, **fields: Any) -> dict[str, Any]:
    usual = {
        "rollout_id": step,
        "kind": kind,
        "uid": f"data:{row}:0",
        "prompt": f"p{row}",
        "response": "r",
        "label": "l",
    }
    return {**usual, "data_set": "dev" if kind == "eval" else "", "reward": reward, "status": "completed", **fields}


def page_of(samples: list[dict[str, Any]], **changed: Any) -> str:
    return render_report(Report(title="run", metrics=[], samples=samples, facts=RunFacts(changed=changed)))


def test_a_reward_is_shown_by_its_place_in_the_runs_range() -> None:
    """Of -2 to 2: 0.1429 is far from right, and 1 is three quarters of the way, not both just positive."""
    samples = [sample(reward=value) for value in (-2, 0.1429, 1.0, 2.0)]
    (group,) = prompt_groups(samples)
    rewards = [answer.rewards[0] for answer in group.answers]
    assert [reward.share for reward in rewards] == pytest.approx([0.0, 2.1429 / 4, 0.75, 1.0])
    assert [reward.level for reward in rewards] == ["lowest", "between", "between", "highest"]
    assert group.mean is not None
    assert group.mean.share == pytest.approx((1.1429 / 4 + 2) / 4)
    page = page_of(samples)
    assert "--share:0.7500" in page
    assert page.count('data-level="highest"') == 1


def test_rewards_that_are_all_equal_or_no_numbers_have_no_bar() -> None:
    assert shown_rewards(3.0, scale_of([sample(reward=3.0)] * 2))[0].share is None
    (group,) = prompt_groups([sample(reward="nan"), sample(reward=None), sample(reward=True)])
    assert [[reward.text for reward in answer.rewards] for answer in group.answers] == [["nan"], [], ["true"]]
    assert 'class="meter"' not in page_of([sample(reward=3.0)] * 2)


def test_several_rewards_are_shown_by_name_each_on_its_own_scale_and_the_trained_one_first() -> None:
    samples = [sample(reward={"length": 10.0, "score": 0.0}), sample(reward={"length": 30.0, "score": 1.0})]
    (group,) = prompt_groups(samples, reward_key="score")
    shown = [[(reward.name, reward.text, reward.share) for reward in answer.rewards] for answer in group.answers]
    assert shown == [[("score", "0", 0.0), ("length", "10", 0.0)], [("score", "1", 1.0), ("length", "30", 1.0)]]
    assert group.mean is not None
    assert (group.mean.name, group.mean.share) == ("score", 0.5)
    assert "score</span> 1" in page_of(samples, **{"--reward-key": "score"})


def test_samples_of_one_prompt_in_one_step_are_one_group() -> None:
    samples = [sample(step, row, response=f"{step}{row}{n}") for step in (0, 1) for row in (0, 1) for n in range(2)]
    groups = prompt_groups(samples)
    assert [(group.step, group.prompt, [answer.response for answer in group.answers]) for group in groups] == [
        (1, "p0", ["100", "101"]),
        (1, "p1", ["110", "111"]),
        (0, "p0", ["000", "001"]),
        (0, "p1", ["010", "011"]),
    ]
    assert len(prompt_groups([sample(uid=None), sample(uid=None)])) == 2  # nothing says that they are of one prompt


def test_evaluation_prompts_are_followed_over_the_steps() -> None:
    """The first one; the fifth, whose reward fell by 96; the third, whose reward rose by 48."""
    factors = [0, 0, 1, 0, -2, 0]
    samples = [sample(step, row, "eval", reward=step * f) for step in range(0, 50, 2) for row, f in enumerate(factors)]
    samples += [sample(4, 9, "eval", data_set="once"), sample(4, 0)]
    prompts = followed_prompts(samples)
    assert [prompt.steps[0].prompt for prompt in prompts] == ["p0", "p4", "p2"][:MAX_FOLLOWED]
    steps = [group.step for group in prompts[0].steps]
    assert len(steps) == MAX_STEPS
    assert (steps[0], steps[-1], sorted(steps)) == (0, 48, steps)
    shares = [group.answers[0].rewards[0].share for group in prompts[1].steps]
    assert shares == pytest.approx([(96 - 2 * step) / 144 for step in steps])  # of -96 to 48
    assert "Evaluation prompts over the steps" in page_of(samples)
    assert "Evaluation prompts over the steps" not in page_of([sample(3, 0, "eval"), sample(3, 1)])


def test_supervised_rows_show_context_and_target_and_no_reward() -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "the answer"},
    ]
    samples = [
        sample(reward=0.0, prompt=messages, response="the answer", label=None),
        sample(row=1, reward=0.0, label="r"),
    ]
    samples.append(sample(kind="eval", reward=0.5, row=2))
    groups = {(group.kind, group.prompt): group for group in prompt_groups(samples, supervised=True)}
    conversation = groups["train", "system: be brief\nuser: hi"]
    assert [(answer.response, answer.status, answer.rewards) for answer in conversation.answers] == [
        ("the answer", "target", ())
    ]
    assert (groups["train", "p1"].label, groups["train", "p1"].mean) == ("", None)
    assert [reward.text for reward in groups["eval", "p2"].answers[0].rewards] == ["0.5"]
    page = page_of(samples, **{"--loss-type": "sft_loss"})
    assert page.count(">context</div>") == 2
    assert "assistant: the answer" not in page


def test_the_transcript_of_an_agent_is_on_the_page_as_text() -> None:
    page = page_of([sample(transcript=[["user", "guess <b>"], ["assistant", "7"], ["", "… 3 more messages"]])])
    assert "<summary>3 messages</summary>" in page
    assert "guess &lt;b&gt;" in page
    (group,) = prompt_groups([sample(transcript=[["user", "x" * 5000]])] * (MAX_TRANSCRIPTS + 1))
    assert [len(answer.transcript) for answer in group.answers] == [1, 1, 0]
    assert group.answers[0].transcript[0][1].endswith(f" … {5000 - MAX_MESSAGE} more characters")


def test_a_followed_prompt_shows_few_of_its_answers_and_the_mean_of_all() -> None:
    samples = [sample(step, 0, "eval", reward=number) for step in (0, 1) for number in range(10)]
    (prompt,) = followed_prompts(samples)
    assert [len(group.answers) for group in prompt.steps] == [MAX_ANSWERS, MAX_ANSWERS]
    assert prompt.steps[0].mean is not None
    assert prompt.steps[0].mean.text == "4.5"
