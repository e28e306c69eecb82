"""What user functions receive as ``args``."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.options.section import compose, dump_args, load_args
from buffer_rl.options.user_args import user_args


def make(**options: Any) -> Any:
    return compose(CORE_SECTIONS)(**options)


def test_what_is_written_stays_in_the_copy_and_every_function_sees_the_same_copy() -> None:
    args = make(rollout_stop=["a"], rollout_batch_size=4)
    own = user_args(args)
    own.mine, own.rollout_batch_size = 1, 99
    own.rollout_stop.append("b")
    assert user_args(args) is own
    assert (args.rollout_batch_size, args.rollout_stop) == (4, ["a"])
    assert not hasattr(args, "mine")
    assert load_args(dump_args(args)) == args
    assert user_args(load_args(dump_args(args))).rollout_batch_size == 4


def test_options_that_are_changed_have_a_copy_of_their_own() -> None:
    args = make(rollout_batch_size=4)
    user_args(args).mine = 1
    changed = args.model_copy(update={"rollout_batch_size": 5})
    assert user_args(changed).rollout_batch_size == 5
    assert "mine" not in user_args(changed)
    assert user_args(args).mine == 1


def test_names_of_custom_config_path_are_there_also_in_another_process() -> None:
    args = make(custom_config_path={"max_turns": 3, "env": {"a": [1]}, "router_policy": "mine"})
    own = user_args(load_args(dump_args(args)))
    assert (own.max_turns, own.env, own.router_policy) == (3, {"a": [1]}, "mine")
    own.env["a"].append(2)
    assert args.custom_config_path["env"] == {"a": [1]}
    assert not hasattr(args, "max_turns")


def test_slimes_names_have_its_meaning_and_types() -> None:
    own = user_args(
        make(
            router_url="http://10.0.0.7:3000",
            prompt_data=["a.jsonl"],
            eval_prompt_data=["aime=b.jsonl", "math=c.jsonl"],
            custom_group_rm_path="my.rewards:score",
            rollout_batch_size=8,
            rollout_num_engines=2,
            rollout_concurrency=64,
            reward_key="acc",
            rollout_max_context_len=512,
            deterministic=True,
        )
    )
    assert (own.sglang_router_ip, own.sglang_router_port) == ("10.0.0.7", 3000)
    assert own.sglang_server_concurrency * own.rollout_num_engines == 64
    assert own.prompt_data == "a.jsonl"
    assert own.eval_prompt_data == ["aime", "b.jsonl", "math", "c.jsonl"]
    assert (own.group_rm, own.custom_rm_path) == (True, "my.rewards.score")
    assert own.over_sampling_batch_size == 8
    assert (own.eval_reward_key, own.eval_max_context_len) == ("acc", 512)
    assert own.sglang_enable_deterministic_inference is True
    assert own.loss_mask_type == "qwen"
    assert (own.rollout_stop, own.apply_chat_template_kwargs) == (None, {})
    assert own.rollout_global_dataset is True


@pytest.mark.parametrize(
    ("url", "host", "port"), [("http://[::1]:80", "[::1]", 80), ("http://host", "host", 80), (None, None, None)]
)
def test_the_routers_address_is_taken_apart(url: str | None, host: str | None, port: int | None) -> None:
    own = user_args(make(router_url=url))
    assert (own.sglang_router_ip, own.sglang_router_port) == (host, port)


def test_a_name_that_is_not_there_is_an_attribute_error_that_says_where_to_read() -> None:
    own = user_args(make())
    with pytest.raises(AttributeError, match=r"plugins/buffer_rl_slime/README\.md"):
        _ = own.tis_level
    assert getattr(own, "tis_level", 2) == 2


def test_it_is_copied_and_pickled_with_what_was_written_and_shows_no_key() -> None:
    own = user_args(make(engine_api_key="very-secret"))
    own.mine = [1]
    assert copy.deepcopy(own).mine == pickle.loads(pickle.dumps(own)).mine == [1]
    assert "very-secret" not in repr(own)
