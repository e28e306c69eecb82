"""Sums of gradients that do not depend on their order.

In float32 a sum depends on the order of its terms, and Adam's first steps blow the difference up to the size of the
learning rate. Summed in float64 and rounded once, any order, and any split over ranks, gives the same float32 numbers
(but for ties that need 29 equal bits). It takes 8 bytes a parameter, so it is for ``--deterministic`` only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class GradientSum:
    """The float64 sum of what each backward pass left in ``grad``."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._sums: list[torch.Tensor] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing was absorbed since ``clear``."""
        return not self._sums

    def absorb(self) -> None:
        """Add the gradients of one backward pass, and remove them from the parameters."""
        if not self._sums:
            self._sums = [torch.zeros_like(p, dtype=torch.float64) for p in self._parameters]
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            if parameter.grad is not None:
                total += parameter.grad
                parameter.grad = None

    def flat(self) -> torch.Tensor:
        """All sums as one vector ``[num_weights]`` float64; zeros where nothing was absorbed."""
        if not self._sums:
            self._sums = [torch.zeros_like(p, dtype=torch.float64) for p in self._parameters]
        return torch.cat([total.reshape(-1) for total in self._sums])

    def clear(self) -> None:
        """Forget the sums."""
        self._sums = []
