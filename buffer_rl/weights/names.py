"""Checks what the trainer publishes against the model that the engines serve, before anything is sent.

An engine cannot be trusted with that: SGLang ignores names that it does not know, keeps weights that do not come, and
fits tensors of another shape as it can, all with success.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from buffer_rl.errors import TrainError

if TYPE_CHECKING:
    from buffer_rl.args import Args


Shapes = dict[str, tuple[int, ...]]
MAX_SHOWN = 5


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

    def checked(self, buckets: Iterable[Mapping[str, torch.Tensor]]) -> Iterator[Mapping[str, torch.Tensor]]:
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
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.core_model_loading import revert_weight_conversion

        read: Any = AutoConfig.from_pretrained
        build: Any = AutoModelForCausalLM.from_config
        try:
            config = read(self._path, local_files_only=True, trust_remote_code=self._trust)
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                model: Any = build(config, trust_remote_code=self._trust)
            state = model.state_dict()
            converted = revert_weight_conversion(model, state)
        except Exception:  # fault boundary: code of any architecture; the files are left
            return {}, set()
        own = {name for name in state if name not in converted}  # the checkpoint has them in another form
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        shapes = {name: tuple(tensor.shape) for name, tensor in (*state.items(), *converted.items())}
        return shapes, tied | own


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
