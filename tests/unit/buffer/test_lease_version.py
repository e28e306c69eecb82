"""The version at a group's lease: who sets it, and that its tokens are compared with it, whoever built the group."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.queue import RequeueRule
from buffer_rl.buffer.rollout_client import RolloutClient
from buffer_rl.buffer.state import BufferState
from buffer_rl.errors import RolloutError
from buffer_rl.options.section import compose
from buffer_rl.records.groups import GroupUid, Sample, SampleGroup, Status, Ticket, VersionSpan
from buffer_rl.rollout.conversion import GroupConverter
from harness.local_buffer import local_client, local_state


class Publishing(BufferState):
    """A Buffer that leases while ``published`` is published, which is newer than its tickets."""

    published = 2

    def get_samples(
        self, ticket: Ticket, num_samples: int, chosen: Sequence[GroupUid] | None = None
    ) -> list[SampleGroup]:
        return self._rollouts.lease(ticket, num_samples, chosen, self.published)


class Kit:
    """A Buffer of two groups a step, one sample each."""

    def __init__(self, folder: Path, rule: RequeueRule | None = None) -> None:
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"p{i}", "label": "1"}) + "\n" for i in range(4)))
        self.args: Any = compose(CORE_SECTIONS)(
            prompt_data=str(path), n_samples_per_prompt=1, rollout_batch_size=2, rollout_shuffle=False, rm_type="math"
        )
        self.state = local_state(self.args, Ledger.in_memory(), rule=rule)
        self.state.__class__ = Publishing

    def client(self, ticket: Ticket) -> RolloutClient:
        return local_client(self.state, ticket, GroupConverter(self.args))


def respond(sample: Sample, version: int, status: Status = Status.COMPLETED) -> Sample:
    """Two tokens of ``version`` more."""
    at = sample.response_length
    sample.tokens = [*(sample.tokens or [1, 2]), 10, 11]
    sample.rollout_log_probs = [*(sample.rollout_log_probs or []), -0.5, -0.5]
    sample.response, sample.response_length, sample.reward, sample.status = "xx", at + 2, 1.0, status
    sample.weight_versions = [*sample.weight_versions, VersionSpan(version, at, at + 2)]
    if sample.loss_mask is not None:
        sample.loss_mask = [*sample.loss_mask, 1, 1]
    return sample


def test_a_group_carries_the_version_at_its_lease_and_one_that_is_leased_again_the_newer_one(tmp_path: Path) -> None:
    kit = Kit(tmp_path)
    ticket = kit.state.generate(0)
    first, second = kit.state.get_samples(ticket, 2)
    assert (ticket.version, first.version, second.version) == (0, 2, 2)
    kit.state.add_samples(ticket, [(first.uid, first.attempt)], [])
    kit.state.published = 3  # type: ignore[attr-defined]
    (again,) = kit.state.get_samples(ticket, 1)
    assert (again.uid, again.attempt, again.version) == (first.uid, 2, 3)


def test_tokens_are_masked_that_are_older_than_the_lease_and_not_those_that_are_older_than_the_ticket(
    tmp_path: Path,
) -> None:
    kit = Kit(tmp_path, RequeueRule(keep_tokens=True, mask_older=True))
    ticket = kit.state.generate(0)
    assert ticket.keeps_tokens
    buffer = kit.client(ticket)
    (group,) = buffer.get_samples(1)
    respond(group[0], 2, Status.ABORTED)
    buffer.add_samples([group])
    kit.state.published = 3  # type: ignore[attr-defined]
    (again,) = buffer.get_samples(1)
    assert (again[0].response_length, again[0].loss_mask) == (2, [0, 0])
    respond(again[0], 3)
    buffer.finish(again)
    assert list(buffer.finished) == [group.uid]


@pytest.mark.parametrize("version", [0, 1, 3])
def test_a_group_that_a_function_built_itself_is_compared_with_the_version_at_the_lease_of_its_uid(
    tmp_path: Path, version: int
) -> None:
    kit = Kit(tmp_path)
    buffer = kit.client(kit.state.generate(0))
    (leased,) = buffer.get_samples(1)
    sample = respond(Sample(uid=leased.uid, prompt="p0", label="1"), version)
    own = SampleGroup(uid=leased.uid, samples=[sample], attempt=leased.attempt, version=version)
    with pytest.raises(RolloutError, match=rf"of weight version {version}(\n|.)*expected: version 2, which was"):
        buffer.finish(own)
    sample.weight_versions = [VersionSpan(2, 0, 2)]
    buffer.finish(own)
    assert list(buffer.finished) == [leased.uid]
