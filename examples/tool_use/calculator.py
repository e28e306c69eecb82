"""A model that may use a calculator: it writes ``<12*7>``, the tool puts ``84=`` behind it, and the model goes on."""

from __future__ import annotations

import ast
import operator
from typing import Any

from buffer_rl.records.groups import Sample
from buffer_rl.rollout.generate import add_observation, generate_turn

CALL_START, CALL_END, ANSWER_END = "<", ">", "="
MAX_CALLS = 3
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Turns until the model ends its answer without a call, or has no room or no calls left."""
    params = sampling_params | {"stop": [CALL_END]}
    calls = 0
    while True:
        text = await generate_turn(args, sample, params)
        if sample.status != "completed" or not text.endswith(CALL_END):
            break
        if calls == MAX_CALLS:
            sample.status = sample.Status.TRUNCATED
            break
        calls += 1
        expression = text.rpartition(CALL_START)[2].removesuffix(CALL_END)
        add_observation(sample, calculate(expression) + ANSWER_END)
    sample.metadata["tool_calls"] = calls
    return sample


def calculate(expression: str) -> str:
    """The value of a sum, difference or product of whole numbers; ``?`` for anything else."""
    try:
        return str(_value(ast.parse(expression, mode="eval").body))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return "?"


def score(args: Any, sample: Sample) -> float:
    """1 if the text behind the tool's last answer, or all of it where there is none, is the label."""
    answer = sample.response.rpartition(ANSWER_END)[2]
    return float(sample.status == "completed" and answer == sample.label)


def log_calls(
    rollout_id: int, args: Any, samples: list[Sample], rollout_extra_metrics: dict[str, float], rollout_time: float
) -> None:
    """How often a sample calls the tool, and the share of its tokens that came from it."""
    masks = [bit for sample in samples for bit in sample.loss_mask or ()]
    rollout_extra_metrics["rollout/tool_calls"] = sum(s.metadata["tool_calls"] for s in samples) / len(samples)
    rollout_extra_metrics["rollout/tool_tokens"] = 1 - sum(masks) / max(1, len(masks))


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 10**6:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        value: int = OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        if abs(value) < 10**12:
            return value
    raise ValueError("not a sum, difference or product of whole numbers")
