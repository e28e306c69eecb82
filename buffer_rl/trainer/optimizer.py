"""AdamW over a model's parameters: learning-rate schedule, reduction over ranks, clipping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from buffer_rl.args import Args
from buffer_rl.errors import CheckpointError, NonFiniteError, TrainError
from buffer_rl.observe.pulse import Waits, waiting
from buffer_rl.trainer.host_memory import HostMemory, wait_for_copies
from buffer_rl.trainer.learning_rate import learning_rate as learning_rate
from buffer_rl.trainer.sharding import local, whole


def non_finite_gradient(norm: float, step: int) -> NonFiniteError:
    """The error of optimizer step ``step``, whose gradient has this norm."""
    return NonFiniteError(
        f"the gradient norm is {norm}",
        where=f"optimizer step {step}",
        expected="a finite number",
        hint="look at the loss metrics of this step and at its rewards; a lower --lr often helps",
    )


class Optimizer:
    """AdamW (arXiv 1711.05101) with one step counter.

    world_size: ranks over which gradients are summed here; 1 for weights that are split over ranks, whose gradients are
    sums already.

    Under ``--deterministic`` call ``accumulate`` after each backward pass: gradients are then summed so that their
    order does not matter.

    Weight decay applies to matrices only: biases and norms, which have one dimension, are left out, as in
    nanoGPT.
    """

    def __init__(self, args: Args, model: torch.nn.Module, world_size: int) -> None:
        self.step_count = 0
        self._on_host = HostMemory()
        self._args = args
        self._world_size = world_size
        self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._sum = GradientSum([p for _, p in self._named]) if args.deterministic else None
        decayed = [p for _, p in self._named if p.ndim > 1]
        others = [p for _, p in self._named if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=args.lr,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_eps,
            # One kernel for each step in place of a dozen for each parameter; on CPU and CUDA alike.
            fused=True,
        )

    def zero_grad(self) -> None:
        """Forget the accumulated gradients."""
        self._adam.zero_grad(set_to_none=True)
        if self._sum is not None:
            self._sum.clear()

    def accumulate(self) -> None:
        """A backward pass has ended."""
        if self._sum is not None:
            self._sum.accumulate()

    @property
    def has_gradients(self) -> bool:
        """Whether a step was begun and not ended."""
        return any(p.grad is not None for _, p in self._named) or (self._sum is not None and not self._sum.is_empty)

    def step(self, scale: float) -> dict[str, float]:
        """Sum the gradients over ranks, multiply them by ``scale``, clip them to ``clip_grad``, step, and zero them.

        Returns ``grad_norm`` (before clipping) and ``lr``. Raises NonFiniteError if the norm is not finite; the
        parameters and the optimizer's state are then unchanged and the gradients are gone. The norm is that of the sum,
        so every rank raises or none.
        """
        gradients = self._reduced_gradients(scale)
        norm = whole(torch.nn.utils.get_total_norm(gradients))
        grad_norm = float(norm)
        if not torch.isfinite(norm):
            self.zero_grad()
            raise non_finite_gradient(grad_norm, self.step_count)
        if self._args.clip_grad > 0:
            torch.nn.utils.clip_grads_with_norm_([p for _, p in self._named], self._args.clip_grad, norm)
        lr = learning_rate(self._args, self.step_count)
        for group in self._adam.param_groups:
            group["lr"] = lr
        if self._args.optimizer_cpu_offload:
            self._move_moments(offload=False)
        self._adam.step()
        if self._args.optimizer_cpu_offload:
            self.follow_parameters()
        self.zero_grad()
        self.step_count += 1
        return {"grad_norm": grad_norm, "lr": lr}

    def sleep(self) -> None:
        """Move Adam's moments to the host. Raises TrainError if there are gradients."""
        if self.has_gradients:
            raise TrainError("there are gradients of an unfinished step", hint="sleep after optimizer_step")
        self._move_moments(offload=True)

    def follow_parameters(self) -> None:
        """Move Adam's moments to the devices of their parameters, or with ``--optimizer-cpu-offload`` to the host."""
        self._move_moments(offload=self._args.optimizer_cpu_offload)

    def _move_moments(self, *, offload: bool) -> None:
        for parameter, state in self._adam.state.items():
            for key, value in state.items():
                if not offload:
                    state[key] = value.to(parameter.device, non_blocking=True)
                else:
                    state[key] = self._on_host.copy_of((parameter, key), value)
        wait_for_copies()

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Adam's moments and step of each parameter, as ``{field}.{parameter name}``; empty before the first step, and
        under ``--no-save-optim``."""
        if not self._args.save_optim:
            return {}
        return {
            f"{key}.{name}": value
            for name, parameter in self._named
            for key, value in self._adam.state.get(parameter, {}).items()
        }

    def empty_state_tensors(self) -> dict[str, torch.Tensor]:
        """Memory for ``state_tensors`` after a step."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self._named:
            found[f"step.{name}"] = torch.zeros(())
            found |= {f"{field}.{name}": torch.zeros_like(parameter.detach()) for field in ("exp_avg", "exp_avg_sq")}
        return found

    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor], step_count: int) -> None:
        """The inverse of ``state_tensors``. Raises CheckpointError, with nothing changed, if something does not fit."""
        parameters = dict(self._named)
        states: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in tensors.items():
            field, _, name = key.partition(".")
            if name not in parameters:
                raise CheckpointError(f"optimizer state of {name!r}, which this model does not have")
            if field != "step" and tensor.shape != parameters[name].shape:
                raise CheckpointError(
                    f"optimizer state {key} has shape {tuple(tensor.shape)}",
                    expected=f"{tuple(parameters[name].shape)}",
                )
            states.setdefault(name, {})[field] = tensor
        expected = set() if step_count == 0 else set(parameters)
        fields = {"step", "exp_avg", "exp_avg_sq"}
        if set(states) != expected or any(set(state) != fields for state in states.values()):
            what = f"the optimizer state at step {step_count} covers {len(states)} parameters or lacks moments"
            raise CheckpointError(what, expected=f"{sorted(fields)} of {len(expected)} parameters")
        self.restart(step_count)
        for name, state in states.items():
            parameter = parameters[name]
            self._adam.state[parameter] = {key: _as_of(parameter, key, value) for key, value in state.items()}
        self.follow_parameters()

    def restart(self, step_count: int) -> None:
        """Forget Adam's moments; the learning rate is that of optimizer step ``step_count``."""
        self._adam.state.clear()
        self.step_count = step_count
        self.zero_grad()

    def _reduced_gradients(self, scale: float) -> list[torch.Tensor]:
        """The gradients of the step, summed over ranks and multiplied by ``scale``."""
        for _, parameter in self._named:
            if parameter.grad is None:  # a rank without rows still takes part in the sum
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for _, p in self._named if p.grad is not None]
        own = [local(gradient) for gradient in gradients]
        if self._sum is None and self._world_size == 1:
            torch._foreach_mul_(own, scale)
            return gradients
        flat = torch.cat([g.reshape(-1) for g in own]) if self._sum is None else self._sum.flat()
        if self._world_size > 1:
            with waiting(Waits.PEERS):
                dist.all_reduce(flat)
        parts = torch.split(flat.mul_(scale), [g.numel() for g in own])
        for gradient, part in zip(own, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        return gradients


def _as_of(parameter: torch.Tensor, key: str, value: torch.Tensor) -> torch.Tensor:
    """A copy of Adam's ``key``, on the ranks and the device of its parameter."""
    if key == "step":
        return value.to(parameter.device, copy=True)
    moment = torch.zeros_like(parameter, requires_grad=False)
    local(moment).copy_(local(value))
    return moment


class GradientSum:
    """The float64 sum of what each backward pass left in ``grad``, which does not depend on the order of the passes.

    In float32 a sum depends on the order of its terms, and Adam's first steps blow the difference up to the size of the
    learning rate. Summed in float64 and rounded once, any order, and any split over ranks, gives the same float32
    numbers (but for ties that need 29 equal bits). It takes 8 bytes a parameter, so it is for ``--deterministic`` only.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._sums: list[torch.Tensor] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing was accumulated since ``clear``."""
        return not self._sums

    def accumulate(self) -> None:
        """Add the gradients of one backward pass, and remove them from the parameters."""
        if not self._sums:
            self._sums = [torch.zeros_like(local(p), dtype=torch.float64) for p in self._parameters]
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            if parameter.grad is not None:
                total += local(parameter.grad)
                parameter.grad = None

    def flat(self) -> torch.Tensor:
        """All sums as one vector ``[num_weights]`` float64; zeros where nothing was accumulated."""
        if not self._sums:
            self._sums = [torch.zeros_like(local(p), dtype=torch.float64) for p in self._parameters]
        return torch.cat([total.reshape(-1) for total in self._sums])

    def clear(self) -> None:
        """Forget the sums."""
        self._sums = []
