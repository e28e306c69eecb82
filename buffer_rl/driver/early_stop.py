"""``--early-stop``: the condition on an evaluation metric that ends a run."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass

from buffer_rl.errors import ConfigError

_OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_EXPRESSION = re.compile(r"\s*([\w./-]+)\s*(>=|<=|>|<)\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStop:
    """``metric op value``, for example ``eval/dev >= 0.25``; ``op`` is one of ``>= <= > <``."""

    metric: str
    op: str
    value: float

    def met(self, metrics: Mapping[str, float]) -> bool:
        """Whether the metric is there and fulfils the condition (NaN never does)."""
        found = metrics.get(self.metric)
        return found is not None and bool(_OPERATORS[self.op](found, self.value))


def parse_early_stop(text: str) -> EarlyStop:
    """Read the expression. Raises ConfigError."""
    match = _EXPRESSION.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{text!r} is no condition on a metric",
            where="--early-stop",
            expected="METRIC, one of >= <= > <, and a number, for example 'eval/dev>=0.25'",
        )
    metric, op, value = match.groups()
    return EarlyStop(metric=metric, op=op, value=float(value))
