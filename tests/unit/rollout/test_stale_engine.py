"""An engine that missed a publication: its tokens are of versions before the lease, and are never trained on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from buffer_rl.records.groups import VersionSpan
from buffer_rl.rollout.default import DefaultRollout
from buffer_rl.testing.fake_buffer import FakeBuffer

AT_LEASE = 2


@pytest.mark.parametrize(
    ("mixes", "versions", "failures", "trained"),
    [
        (True, [1, 1, 2], 2.0, 2),  # within the bound of the ticket, whose version is 0, and yet too old
        (True, [3], 0.0, 3),  # a publication came between the lease and the request
        (True, [4, 3], 1.0, 3),  # that version is not published, nor on its way
        (False, [0, 2], 1.0, 2),
        (False, [3, 2], 1.0, 2),
    ],
)
async def test_what_an_engine_of_an_older_version_answers_is_a_failure_of_the_infrastructure(
    kit: Any, mixes: bool, versions: list[int], failures: float, trained: int
) -> None:
    left = list(versions)
    engine = kit.ScriptedEngine(lambda input_ids, params: kit.answer([3, 4, 1], version=left.pop(0)))
    ticket = replace(kit.make_ticket(1), max_staleness=2, mixes_versions=mixes)
    buffer = FakeBuffer([replace(kit.make_group(0, labels=["1"]), version=AT_LEASE)], ticket)
    async with kit.opened(engine, n_samples_per_prompt=1, custom_rm_path=kit.user("length_async")) as context:
        output = await DefaultRollout(context.args)(context.args, 0, buffer)
    assert output.metrics.get("infra_failures", 0.0) == failures
    assert [sample.weight_versions for sample in buffer.finished[0]] == [[VersionSpan(trained, 0, 3)]]
    assert (len(buffer.leased), left) == (len(versions), [])


async def test_the_greedy_response_of_a_group_is_of_the_version_at_its_lease_too(kit: Any) -> None:
    def respond(input_ids: list[int], params: dict[str, Any]) -> Any:
        greedy, again = params["temperature"] == 0, len(engine.calls) > 2
        return kit.answer([3, 4, 1], version=1 if greedy and not again else AT_LEASE)

    engine = kit.ScriptedEngine(respond)
    ticket = replace(kit.make_ticket(1), max_staleness=2, mixes_versions=True)
    buffer = FakeBuffer([replace(kit.make_group(0, labels=["1"]), version=AT_LEASE)], ticket)
    options = {"n_samples_per_prompt": 1, "advantage_estimator": "remax", "custom_rm_path": kit.user("length_async")}
    async with kit.opened(engine, **options) as context:
        output = await DefaultRollout(context.args)(context.args, 0, buffer)
    assert (output.metrics["infra_failures"], len(engine.calls)) == (1.0, 4)
