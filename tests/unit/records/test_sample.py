"""``Sample``: attributes of the user's own, appended response tokens, and the plain form."""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from copy import deepcopy

import numpy as np
import pytest

from buffer_rl.buffer.codec import for_queue, group_from_json, group_to_json
from buffer_rl.errors import RolloutError
from buffer_rl.records.groups import GroupUid, Sample, SampleGroup, Status, VersionSpan, prompt_copies

UID = GroupUid("data", 3, 1)


def answer(reason: str = "stop", version: object = 4, **more: object) -> dict[str, object]:
    return {"finish_reason": {"type": reason}, "weight_version": version, **more}


def with_response(**values: object) -> Sample:
    sample = Sample(uid=UID, prompt="hi", tokens=[5, 6])
    sample.append_response_tokens(tokens=[7, 8], log_probs=[-0.5, -0.25], meta_info=answer(), text="ab")
    for name, value in values.items():
        setattr(sample, name, value)
    return sample


def test_a_tool_call_lies_between_two_turns_with_mask_zero_and_no_version() -> None:
    sample = with_response()
    mask, tokens = sample.loss_mask, sample.tokens
    sample.append_response_tokens(tokens=np.array([9]), trainable=False, text="!")
    sample.append_response_tokens(tokens=[10], log_probs=[-1.0], meta_info=answer("length", "5"), text="c")
    assert sample.tokens == [5, 6, 7, 8, 9, 10]
    assert tokens is sample.tokens
    assert mask is sample.loss_mask == [1, 1, 0, 1]
    assert sample.rollout_log_probs == [-0.5, -0.25, 0.0, -1.0]
    assert sample.weight_versions == [VersionSpan(4, 0, 2), VersionSpan(5, 3, 4)]
    assert (sample.response, sample.response_length, sample.prompt_length) == ("ab!c", 4, 2)
    assert sample.status is Status.TRUNCATED
    assert sample.effective_response_length == 3


def test_spans_of_an_answer_are_moved_behind_the_response_and_end_with_the_tokens() -> None:
    sample = with_response()
    spans = [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 3}]
    sample.append_response_tokens(tokens=[1, 2], log_probs=[0.0, 0.0], meta_info={"weight_versions": spans})
    assert sample.weight_versions == [VersionSpan(4, 0, 2), VersionSpan(4, 2, 3), VersionSpan(5, 3, 4)]


@pytest.mark.parametrize("of", ["ours", "SGLang"])
def test_kept_tokens_of_an_answer_are_appended_and_empty_for_an_observation(of: str) -> None:
    import base64

    def encoded(values: list[int]) -> str:
        return base64.b64encode(np.array(values, dtype="<i4").tobytes()).decode()

    ours = {"top_p_token_ids": encoded([7, 9, 8]), "top_p_token_offsets": encoded([0, 2, 3])}
    kept = ours if of == "ours" else {"output_token_sampling_mask": [[7, 9], [8]]}
    sample = Sample(tokens=[5])
    sample.append_response_tokens(tokens=[7, 8], log_probs=[0.0, 0.0], meta_info=answer(**kept))
    sample.append_response_tokens(tokens=[3], trainable=False)
    assert [np.frombuffer(ids, "<i4").tolist() for ids in sample.rollout_kept_tokens or ()] == [[7, 9], [8], []]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"tokens": [1, 2], "log_probs": [0.0]}, "1 log_probs for 2 tokens"),
        ({"tokens": [1]}, "need their log_probs"),
        ({"tokens": [1], "log_probs": [0.0], "trainable": False}, "no model generated"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(arguments: dict, what: str) -> None:
    sample = with_response()
    before = deepcopy(vars(sample))
    with pytest.raises(ValueError, match=what):
        sample.append_response_tokens(**arguments)
    assert vars(sample) == before


def test_a_reason_that_is_unknown_leaves_the_status() -> None:
    sample = Sample()
    sample.append_response_tokens(meta_info=answer("elsewhere"))
    assert sample.status is Status.PENDING


def test_counts_add_up_over_requests() -> None:
    sample = Sample()
    for cached in (0, 50):
        sample.append_response_tokens(meta_info=answer(prompt_tokens=100, cached_tokens=cached))
    assert sample.prefix_cache_info.to_dict() == {"cached_tokens": 50, "total_prompt_tokens": 200}
    assert Sample().prefix_cache_info.total_prompt_tokens == 0


def test_the_plain_form_has_every_attribute_and_is_read_back() -> None:
    sample = with_response(tool_calls=2, rollout_id=9, reward={"score": 1.0})
    sample.spec_info.spec_verify_ct = 3
    plain = json.loads(json.dumps(sample.to_dict()))
    again = Sample.from_dict(plain)
    assert vars(again) == vars(sample)
    assert again.spec_info.spec_verify_ct == 3
    assert Sample.from_dict({"status": "aborted"}).status is Status.ABORTED


def test_own_attributes_go_with_copies_pickles_and_prompts() -> None:
    sample = with_response(tool_calls=2, notes=["x"])
    assert pickle.loads(pickle.dumps(sample)).tool_calls == 2
    assert deepcopy(sample).notes == ["x"]
    assert sample.changed(reward=1.0).tool_calls == 2
    assert sample.as_prompt().tool_calls == 2
    first, second = prompt_copies(sample.as_prompt(), 2)
    assert first.notes == ["x"]
    assert first.notes is not second.notes
    assert second.tokens == []


def test_own_attributes_and_the_fields_of_slime_are_in_the_saved_queue() -> None:
    experts = np.arange(6, dtype=np.int32).reshape(2, 3)
    sample = with_response(
        calls=(1, 2), raw=b"\0", rollout_id=9, rollout_routed_experts=experts, non_generation_time=0.5
    )
    group = SampleGroup(uid=UID, samples=[sample])
    text = json.dumps(group_to_json(for_queue([group])[0]))
    (again,) = group_from_json(json.loads(text))
    assert (again.calls, again.raw, again.rollout_id, again.non_generation_time) == ([1, 2], b"\0", 9, 0.5)
    assert again.rollout_routed_experts.dtype == np.int32
    assert (again.rollout_routed_experts == experts).all()


@pytest.mark.parametrize("value", [OrderedDict(a=object()), {1: 2}, np.array(["x"]), lambda: 0])
def test_an_attribute_that_no_queue_can_hold_is_refused_by_name(value: object) -> None:
    group = SampleGroup(uid=UID, samples=[with_response(mine=value)])
    with pytest.raises(RolloutError, match=r"sample\.mine"):
        for_queue([group])


def test_a_tensor_becomes_an_array() -> None:
    import torch

    group = SampleGroup(uid=UID, samples=[with_response(mine=torch.tensor([1.5]))])
    for_queue([group])
    assert group[0].mine.tolist() == [1.5]


def test_a_missing_reward_names_the_sample_that_has_no_uid() -> None:
    with pytest.raises(ValueError, match="sample 7: no reward"):
        Sample(index=7).get_reward_value(None)
