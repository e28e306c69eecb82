"""What user functions receive as ``args``: a copy of the options that they may write to, with slime's names besides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy, deepcopy
from typing import Any, Self
from urllib.parse import urlsplit

from buffer_rl.options.redaction import mask_secrets


class UserArgs:
    """The options of a run by name, and slime's names for them (``slime_values``), with the values and types that
    slime's functions expect; and the names of ``--custom-config-path``. There is one a process, so what one function
    writes another reads; nothing that is written reaches the run, another process, or the options themselves.

    references: the names of the options that hold plugin references.
    """

    def __init__(self, options: Mapping[str, Any], references: Iterable[str] = ()) -> None:
        values = {name: deepcopy(value) for name, value in options.items()}
        for name in references:
            values[name] = dotted(values.get(name))
        self.__dict__.update(_ABSENT | values | slime_values(values))
        self.__dict__.update(values.get("custom_config_path") or {})

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """A copy with the values of ``update``, as options have."""
        copied = copy(self)
        copied.__dict__.update(update or {})
        return copied

    def __repr__(self) -> str:
        return f"UserArgs({mask_secrets(self.__dict__)})"

    def __contains__(self, name: str) -> bool:
        return name in self.__dict__

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"args has no {name!r}: it is no option of this run (buffer-rl train --help all lists them), nor a name of "
            "slime's that has a meaning here (plugins/buffer_rl_slime/README.md)"
        )


def user_args(args: Any) -> Any:
    """The ``UserArgs`` of options, always the same for the same options; any other value, such as a namespace that a
    test made, as it is."""
    return getattr(args, "for_user_code", args)


def dotted(reference: Any) -> Any:
    """``module.attr`` for the reference ``module:attr``, which slime's own ``load_function`` cannot read; any other
    value as it is."""
    if isinstance(reference, str) and reference.count(":") == 1 and "/" not in reference and ".py:" not in reference:
        return reference.replace(":", ".")
    return reference


def slime_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """slime's names, with its meaning and types; where an option has the same name, in its place."""
    values = _of_engines(options) | _of_data(options) | _of_evaluation(options)
    sglang = options.get("sglang_args") or {}
    return values | {f"sglang_{name}": value for name, value in sglang.items() if f"sglang_{name}" not in values}


_ABSENT: dict[str, Any] = {
    **dict.fromkeys(("ci_test", "use_wandb", "use_tensorboard", "wandb_always_use_train_step"), False),
    "use_rollout_routing_replay": False,
    **dict.fromkeys(("context_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"), 1),
    "sglang_dp_size": 1,
    **dict.fromkeys(("dump_details", "rollout_sample_hook_path", "rollout_data_postprocess_path", "router_policy")),
    **dict.fromkeys(("sglang_model_routers", "sglang_speculative_algorithm", "sglang_tool_call_parser")),
    **dict.fromkeys(("sglang_reasoning_parser", "eval_min_new_tokens")),
}
"""What slime has and this program may not have, such as routing replay: switched off, unless it is an option of a
plugin."""


def _of_engines(options: Mapping[str, Any]) -> dict[str, Any]:
    router = urlsplit(options.get("router_url") or "")
    host = router.hostname and (f"[{router.hostname}]" if ":" in router.hostname else router.hostname)
    engines = options.get("rollout_num_engines") or 1
    return {
        "sglang_router_ip": host,
        "sglang_router_port": router.port or (80 if host else None),
        "sglang_server_concurrency": max(1, (options.get("rollout_concurrency") or engines) // engines),
        "sglang_enable_deterministic_inference": bool(options.get("deterministic")),
    }


def _of_data(options: Mapping[str, Any]) -> dict[str, Any]:
    prompts = options.get("prompt_data")
    group_reward = options.get("custom_group_rm_path")
    mask_type = options.get("loss_mask_type")
    return {
        "rollout_global_dataset": True,
        "prompt_data": prompts[0] if isinstance(prompts, list) and len(prompts) == 1 else prompts,
        "apply_chat_template_kwargs": options.get("apply_chat_template_kwargs") or {},
        "loss_mask_type": "qwen" if mask_type == "auto" else mask_type,
        "group_rm": group_reward is not None,
        "custom_rm_path": dotted(group_reward or options.get("custom_rm_path")),
        "over_sampling_batch_size": options.get("over_sampling_batch_size") or options.get("rollout_batch_size"),
        "rollout_stop": options.get("rollout_stop") or None,
        "rollout_stop_token_ids": options.get("rollout_stop_token_ids") or None,
    }


def _of_evaluation(options: Mapping[str, Any]) -> dict[str, Any]:
    pairs = [text.partition("=") for text in options.get("eval_prompt_data") or ()]
    values = {
        f"eval_{name}": options.get(f"eval_{name}", options.get(f"rollout_{name}"))
        for name in ("max_context_len", "max_prompt_len")
    }
    return values | {
        "eval_prompt_data": [part for name, _, path in pairs for part in (name, path)] or None,
        "eval_reward_key": options.get("reward_key"),
    }
