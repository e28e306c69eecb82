"""Every function that a rollout calls, by every route, sync and async, right and wrong in five ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from buffer_rl.config import compose
from buffer_rl.errors import BufferRLError, PluginError
from buffer_rl.kinds import KINDS
from buffer_rl.options import CORE_SECTIONS
from buffer_rl.plugins import PluginRegistry
from buffer_rl.rollout.context import RolloutContext
from buffer_rl.rollout.default import DefaultRollout
from buffer_rl.rollout.user_rollout import run_user_rollout
from buffer_rl.testing.fake_buffer import FakeBuffer
from buffer_rl.testing.tiny import make_char_tokenizer
from buffer_rl.types import GroupUid, Sample, SampleGroup, Ticket, VersionSpan

HEADERS = {
    "rollout": "plug(args, rollout_id, buffer, evaluation=False)",
    "generate": "plug(args, sample, sampling_params)",
    "reward": "plug(args, sample)",
    "filter": "plug(args, group)",
}
BODIES = {
    "rollout": """
    groups = buffer.get_samples(1)
    for sample in groups[0]:
        sample.tokens, sample.response_length, sample.reward, sample.response = [3, 4], 1, 1.0, "by plug"
        sample.status = sample.Status.COMPLETED
    return groups""",
    "generate": """
    sample.tokens, sample.response_length, sample.response = [3, 4], 1, "by plug"
    sample.status = sample.Status.COMPLETED
    return sample""",
    "reward": "\n    return 0.25",
    "filter": "\n    return group.uid.row == 1",
}
OPTIONS = {
    "generate": "custom_generate_function_path",
    "reward": "custom_rm_path",
    "filter": "dynamic_sampling_filter_path",
}
KINDS_HERE = list(HEADERS)


@dataclasses.dataclass
class Answer:
    output_ids: list[int]
    text: str = "by engine"
    log_probs: list[float] = dataclasses.field(default_factory=lambda: [-0.5])
    finish_reason: str = "stop"
    spans: list[VersionSpan] = dataclasses.field(default_factory=lambda: [VersionSpan(0, 0, 1)])


class Engine:
    async def agenerate(self, rid: str, input_ids: Sequence[int], sampling_params: dict[str, Any]) -> Answer:
        return Answer([5])


def source(kind: str, prefix: str, body: str = "") -> str:
    return f"{prefix} {HEADERS[kind]}:{body or BODIES[kind]}\n"


def reference(place: Any, route: str, kind: str, text: str) -> str:
    """Put the code where the route finds it; the reference that leads there."""
    if route == "entry point":
        place.install("matrix-party", {f"buffer_rl.{kind}": {"plugged": "matrix_party:plug"}}, matrix_party=text)
        return "plugged"
    place.write("matrix_code.py", text)
    return {"path string": "matrix_code.plug", "colon": "matrix_code:plug", "file path": "./matrix_code.py:plug"}[route]


async def run(kind: str, path: str) -> FakeBuffer:
    """One rollout of one group, two rows offered, with the plugin in its place."""
    named = {OPTIONS[kind]: path} if kind in OPTIONS else {}
    args = compose(CORE_SECTIONS)(**{"rm_type": "exact_match", **named})
    groups = []
    for row in range(2):
        uid = GroupUid("source", row, 0)
        samples = [Sample(uid=uid, sample_index=i, prompt="ab", label="x") for i in range(2)]
        groups.append(SampleGroup(uid=uid, samples=samples, attempt=3, incarnation="inc"))
    buffer = FakeBuffer(groups, Ticket(rollout_id=0, evaluation=False, num_groups=1, version=0, incarnation="inc"))
    registry = PluginRegistry()
    engine: Any = Engine()
    function = registry.resolve("rollout", path) if kind == "rollout" else DefaultRollout(args)
    context = RolloutContext.build(args, registry=registry, engine=engine, tokenizer=make_char_tokenizer())
    try:
        with context.active():
            output = await run_user_rollout(function, args, buffer, where=f"train_0, {path}")
    finally:
        await context.aclose()
    for group in output.groups:
        buffer.finish(group)
    return buffer


@pytest.mark.parametrize("prefix", ["def", "async def"])
@pytest.mark.parametrize("route", ["path string", "colon", "file path", "entry point"])
@pytest.mark.parametrize("kind", KINDS_HERE)
async def test_it_is_found_called_and_has_its_effect(place: Any, kind: str, route: str, prefix: str) -> None:
    buffer = await run(kind, reference(place, route, kind, source(kind, prefix)))
    (group,) = buffer.finished
    assert group.uid.row == (1 if kind == "filter" else 0)
    assert [reason for _, reason in buffer.rejected] == (["filtered"] if kind == "filter" else [])
    made = "by plug" if kind in ("rollout", "generate") else "by engine"
    assert [sample.response for sample in group] == [made] * 2
    rewards = {"rollout": 1.0, "reward": 0.25}
    assert [sample.reward for sample in group] == [rewards.get(kind, 0.0)] * 2


@pytest.mark.parametrize("route", ["path string", "file path", "entry point"])
@pytest.mark.parametrize("kind", KINDS_HERE)
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def other(): ...\n", "has no 'plug'"),
        ("plug = 3\n", "int is not callable; found 3 (int)"),
        ("def plug(one): ...\n", "it cannot be called with"),
    ],
    ids=["missing", "not callable", "wrong signature"],
)
def test_what_is_wrong_with_the_object_is_said_before_a_run(
    place: Any, kind: str, route: str, text: str, problem: str
) -> None:
    path = reference(place, route, kind, text)
    with pytest.raises(PluginError) as caught:
        PluginRegistry().resolve(kind, path)
    message = str(caught.value)
    assert message.startswith(f"{kind} {path!r}")
    assert problem in message
    assert ".py" in message
    assert f"expected: {KINDS[kind].signature}, for {KINDS[kind].flags[0]}" in message
    if problem.startswith("it cannot"):
        assert "found plug(one)" in message


@pytest.mark.parametrize("prefix", ["def", "async def"])
@pytest.mark.parametrize("kind", KINDS_HERE)
async def test_what_it_raises_is_shown_with_its_place(place: Any, kind: str, prefix: str) -> None:
    path = reference(place, "file path", kind, source(kind, prefix, "\n    raise KeyError('my bug')"))
    with pytest.raises(BufferRLError) as caught:
        await run(kind, path)
    message = str(caught.value)
    assert "KeyError: 'my bug'" in message
    assert path in message
    if kind != "rollout":
        assert "matrix_code.py" in message
        assert "line 2" in message
        assert "source:0:0" in message
    else:
        assert "train_0" in message


@pytest.mark.parametrize("prefix", ["def", "async def"])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("rollout", "expected: RolloutOutput"),
        ("generate", "expected: a Sample, or a list of them"),
        ("reward", "expected: a finite number"),
        ("filter", "expected: FilterDecision"),
    ],
)
async def test_what_it_returns_is_checked(place: Any, kind: str, expected: str, prefix: str) -> None:
    path = reference(place, "file path", kind, source(kind, prefix, "\n    return 'nonsense'"))
    with pytest.raises(BufferRLError) as caught:
        await run(kind, path)
    message = str(caught.value)
    assert expected in message
    assert "str" in message
    assert path in message
