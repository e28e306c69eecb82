"""The trainer's side of a weight transport: its sender in each rank, and the calls to it from the driver.

What is sent is checked before against the model that the engines serve. An engine cannot be trusted with that: SGLang
ignores names that it does not know, keeps weights that do not come, and fits tensors of another shape as it can, all
with success.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from buffer_rl.args import Args
from buffer_rl.cluster.calling import Call
from buffer_rl.cluster.dispatch import Ts
from buffer_rl.errors import PluginError, TrainError
from buffer_rl.plugin.calls import call, place
from buffer_rl.records.groups import Topology

if TYPE_CHECKING:
    from torch import Tensor

    from buffer_rl.weights.delta import DeltaSource, Encoded


R = TypeVar("R")
Buckets = Iterator[Mapping[str, Any]]

KIND = "weight_transport"
Shapes = dict[str, tuple[int, ...]]
MAX_SHOWN = 5


class Senders:
    """The senders of the trainer's ranks: ``trainer`` of ``WeightTransport.connect``.

    A call names a method of the transport's sender: ``trainer.send(DiskSender.write, folder)``.

    start_call: starts ``send_weights`` of every rank with its arguments.
    """

    def __init__(self, start_call: Callable[..., Call]) -> None:
        self._start_call = start_call

    def start(self, method: Callable[[Any, Buckets, *Ts], object], *arguments: *Ts) -> Call:
        """Have every rank's sender do ``method`` with the rank's weights and ``arguments``; does not wait for it. The
        call's answer has those of the ranks, in order."""
        return replace(self._start_call(method.__name__, *arguments), method=method.__name__)

    def send(self, method: Callable[[Any, Buckets, *Ts], R], *arguments: *Ts) -> list[R]:
        """``start`` and wait for the answers, in rank order. Raises DeadlineError, or a rank's error, named."""
        return cast("list[R]", self.start(method, *arguments).wait())


class RankSender:
    """The sender of one rank, whose errors name the transport.

    factory: what ``--weight-sync-mode``, here ``name``, resolves to. Raises PluginError if it has no sender.
    """

    def __init__(self, name: str, factory: Any, args: Args, topology: Topology) -> None:
        self._name = name
        sender = getattr(factory, "sender", None)
        if not callable(sender):
            raise PluginError("it has no sender", where=place(KIND, name), expected="a class attribute `sender`")
        self._sender = call(KIND, name, sender, args, topology, at="its sender")

    def __call__(self, method: str, buckets: Iterator[Mapping[str, Any]], *arguments: Any) -> Any:
        """What ``method`` answers."""
        return call(KIND, self._name, getattr(self._sender, method), buckets, *arguments, at=f"sender.{method}")


class HoldsVersion:
    """Base of the senders that hold the newest version, and what changed in it: ``--publish-delta``."""

    def __init__(self, args: Args, topology: Topology) -> None:
        self._args, self._is_source = args, topology.is_source
        self._held: DeltaSource | None = None

    def encode(self, buckets: Buckets) -> Encoded | None:
        """Hold the weights and what changed in them; None on other ranks than the source."""
        from buffer_rl.weights.delta import DeltaSource

        if not self._is_source:
            drained(buckets)
            return None
        if self._held is None:
            self._held = DeltaSource(cast_for_engines(self._args))
        return self._held.advance(buckets)


def drained(buckets: Iterable[Any]) -> None:
    """Iterate to the end, as all ranks do or none, and send nothing."""
    for _ in buckets:
        pass


class PublishedNames:
    """The weights of ``args.hf_checkpoint``, which the engines serve, and the check of others against them.

    Missing weights are those of the model that the folder's configuration describes, where transformers can build it,
    tied ones excepted; else those of the folder's files. Known are all of both, so what a folder has beyond its model
    (buffers of older versions, another modality) may come or not.
    """

    def __init__(self, args: Args) -> None:
        self._path = str(args.hf_checkpoint)
        self._trust: bool = args.trust_remote_code
        self._checked: Shapes | None = None

    def checked(self, buckets: Iterable[Mapping[str, Tensor]]) -> Iterator[Mapping[str, Tensor]]:
        """The buckets. Raises TrainError at their end if weights are missing, unknown or of another shape; the same
        names and shapes are compared once."""
        found: Shapes = {}
        for bucket in buckets:
            found.update((name, tuple(tensor.shape)) for name, tensor in bucket.items())
            yield bucket
        if found != self._checked:
            self._require(found)
            self._checked = found

    def _require(self, found: Shapes) -> None:
        in_files = _shapes_of_files(Path(self._path))
        of_model, tied = self._shapes_of_model()
        known = in_files | of_model
        missing = (of_model or in_files).keys() - tied - found.keys()
        faults = {
            "missing": [name for name in known if name in missing],
            "unknown": [name for name in found if name not in known],
            "of another shape": [
                f"{name} {list(shape)} (expected: {list(known[name])})"
                for name, shape in found.items()
                if name in known and shape not in (in_files.get(name), of_model.get(name))
            ],
        }
        differences = [f"{what}: {_shown(names)}" for what, names in faults.items() if names]
        if known and differences:
            raise TrainError(
                f"the trainer's weights are not those of the model that the engines serve; {'; '.join(differences)}",
                where="the weights that it publishes",
                expected=f"the names and shapes of {self._path}",
                hint="the export of the model provider, the converter or the trainer backend makes them",
            )

    def _shapes_of_model(self) -> tuple[Shapes, set[str]]:
        """By their names in the model and in its checkpoint, and the names that a checkpoint leaves out as tied ones;
        nothing where transformers cannot build the model."""
        from transformers.core_model_loading import revert_weight_conversion

        try:
            model = empty_model(self._path, trust=self._trust)
            state = model.state_dict()
            converted = revert_weight_conversion(model, state)
        except Exception:  # fault boundary: code of any architecture; the files are left
            return {}, set()
        own = {name for name in state if name not in converted}  # the checkpoint has them in another form
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        shapes = {name: tuple(tensor.shape) for name, tensor in (*state.items(), *converted.items())}
        return shapes, tied | own


def empty_model(path: str, *, trust: bool) -> Any:
    """The model of a folder's configuration, on no device. Raises whatever the code of its architecture does."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    read: Any = AutoConfig.from_pretrained
    build: Any = AutoModelForCausalLM.from_config
    config = read(path, local_files_only=True, trust_remote_code=trust)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return build(config, trust_remote_code=trust)


def cast_for_engines(args: Args) -> Callable[[str, Tensor], Tensor]:
    """Brings a weight, by its name, to ``--engine-dtype``, if engines would do the same to it: they keep what is of
    less precision, and the parts that the architecture computes in float32. Where it cannot be asked, none is cast."""
    import torch

    dtype: Any = getattr(torch, args.engine_dtype)
    wide = {torch.float64, torch.float32} - {dtype}
    try:
        model = empty_model(str(args.hf_checkpoint), trust=args.trust_remote_code)
    except Exception:  # fault boundary: code of any architecture
        return lambda name, tensor: tensor
    parts = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}

    def cast(name: str, tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.dtype in wide and not any(part in name for part in parts) else tensor

    return cast


def _shapes_of_files(folder: Path) -> Shapes:
    """By the headers of the folder's safetensors files."""
    from safetensors import SafetensorError, safe_open

    shapes: Shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        except (SafetensorError, OSError):
            return {}
    return shapes


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return ", ".join(names[:MAX_SHOWN]) + more
