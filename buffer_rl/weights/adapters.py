"""Publication of adapters alone: ``--lora-publish adapter``. The base stays as engines loaded it from
``--hf-checkpoint``.

Each version is a folder in peft's format, which engines load beside those before it, under a name of its own. Requests
name the newest. What runs in the pause goes on with the adapter that it began with, over the cache of that: nothing is
retracted, and no cache is flushed, as engines key it by adapter. So adapters stay until no request can name them: a
group that is leased at version v is trained at the latest in step v + M (``--max-staleness``), so that the publication
of v + M + 1 finds no request of version v. Engines have M + 2 adapters, one of them to spare, and one more while they
load it (``num_adapters``).

A server may confirm an adapter and serve the base. So after each publication every engine, whatever its kind, samples
with the adapter, and the trainer computes the same log-probabilities with it and without.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from buffer_rl.args import Args
from buffer_rl.engines.client import GenerateResult
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.engines.protocol import Adapter
from buffer_rl.errors import EngineError
from buffer_rl.files.hf_config import read_config, text_config
from buffer_rl.options.section import required
from buffer_rl.plan.schedule import num_adapters
from buffer_rl.weights.disk import DiskTransport, remove_versions
from buffer_rl.weights.publish import LogProbCheck, TrainerLogProbs, check_temperature
from buffer_rl.weights.sender import Senders
from buffer_rl.weights.tensor import tensor_parallel_ranks

EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
"""Distance from 1 to the next number, by ``--engine-dtype``."""


def tolerance(dtype: str, num_layers: int) -> float:
    """How far the log-probabilities of an engine may be from the trainer's, in nats a token on average.

    A residual stream is rounded twice a layer, each time by at most half an epsilon, independently: relative to it, the
    error after L layers is of the order of ``epsilon sqrt(2 L) / 2``, and that of a logit is this times its size, which
    is 10 and less. Four times that is allowed for other orders of summation."""
    return 20.0 * EPSILON[dtype] * math.sqrt(2 * num_layers)


class AdapterTransport(DiskTransport):
    """Brings adapters to the engines.

    write: has the trainer write its adapter into a folder. announce: has requests name the adapter from now on; called
    once all engines have it, before they go on.
    """

    staged = False
    keeps_requests = True

    def __init__(self, args: Args, write: Callable[[str], object], announce: Callable[[Adapter], object]) -> None:
        super().__init__(args)
        self._num_kept = num_adapters(args) - 1
        self._write = write
        self._announce = announce
        self._loaded: list[Adapter] = []
        self._is_announced = True

    @property
    def newest(self) -> Adapter:
        """What was loaded last."""
        return self._loaded[-1]

    def connect(self, trainer: Senders, engines: EngineControlClient) -> None:
        """Note both sides. Raises ConfigError for an engine of several data-parallel ones, which takes no adapter."""
        super().connect(trainer, engines)
        tensor_parallel_ranks(engines.server_info())

    def publish(self, version: int) -> None:
        """Have the engines load the version, under another name at each attempt: some may have what failed."""
        if self._loaded and not self._is_announced:  # no request runs with it
            self._unload(self._loaded.pop())
        self._loaded.append(Adapter(f"v{version}-{secrets.token_hex(4)}", version))
        self._is_announced = False
        self._engines.load_adapter(self.newest.name, str(self._target(version)), version)

    def announce(self) -> None:
        """All engines have the newest adapter."""
        self._announce(self.newest)
        self._is_announced = True

    def release(self, version: int) -> None:
        """All engines have the version: unload those that no request can name. One that an engine does not let go of is
        tried again for as many publications."""
        oldest = version - self._num_kept + 1
        kept = [adapter for adapter in self._loaded if adapter.version >= oldest]
        late = [adapter for adapter in self._loaded if adapter.version < oldest and not self._unload(adapter)]
        self._loaded = [*(each for each in late if each.version > oldest - self._num_kept), *kept]
        remove_versions(self._folder, [self._target(adapter.version) for adapter in kept])

    def _unload(self, adapter: Adapter) -> bool:
        with suppress(EngineError):  # one that replaced another engine never had it
            self._engines.unload_adapter(adapter.name)
            return True
        return False

    def _write_version(self, folder: str) -> None:
        self._write(folder)


@dataclass(eq=False)
class AdapterCheck(LogProbCheck):
    """Compares every engine with the trainer, with the adapter and without.

    newest: what engines have to serve. base_log_probs: the trainer's without adapter. max_diff: see ``tolerance``.
    """

    checks_all = True
    ends_run = True

    base_log_probs: TrainerLogProbs
    newest: Callable[[], Adapter]

    @classmethod
    def of(
        cls, args: Args, log_probs: TrainerLogProbs, base_log_probs: TrainerLogProbs, newest: Callable[[], Adapter]
    ) -> Self:
        """With the run's tolerance."""
        config = text_config(read_config("--hf-checkpoint", required(args.hf_checkpoint, "hf_checkpoint")))
        allowed = tolerance(args.engine_dtype, int(config.get("num_hidden_layers") or config["n_layer"]))
        if args.max_logprob_diff is not None:
            allowed = min(allowed, args.max_logprob_diff)
        temperature = check_temperature(args)
        return cls(log_probs, base_log_probs, newest, temperature=temperature, max_diff=allowed)

    def differing(self, engines: EngineControlClient, urls: Collection[str], version: int) -> dict[str, str]:
        """Those of the engines at ``urls`` that do not sample with the newest adapter, with what was found."""
        self._body = self.newest().named_in(self._body)
        return super().differing(engines, urls, version)

    def _expected(self, sequences: Sequence[Sequence[int]], num_tokens: int) -> list[Any]:
        with_adapter = super()._expected(sequences, num_tokens)
        return list(zip(with_adapter, self.base_log_probs(sequences, num_tokens), strict=True))

    def _difference(self, answer: GenerateResult, expected: Any, version: int) -> str:
        """Also of an adapter whose effect is smaller than the tolerance, an engine has to be nearer to the trainer with
        it than without, unless it is smaller than a quarter: rounding may be as large."""
        own, base = expected
        if found := super()._difference(answer, own, version):
            return f"{found}{_means(answer.log_probs, own, base)}"
        effect, to_base = _gap(own, base), _gap(answer.log_probs, base)
        if effect > self.max_diff / 4 and to_base < _gap(answer.log_probs, own):
            return f"log-probabilities of the base, not of the adapter{_means(answer.log_probs, own, base)}"
        return ""


def _gap(some: Sequence[float], others: Sequence[float]) -> float:
    return sum(abs(float(a) - float(b)) for a, b in zip(some, others, strict=True)) / len(some)


def _means(engine: Sequence[float], trainer: Sequence[float], base: Sequence[float]) -> str:
    found = {"the engine": engine, "the trainer": trainer, "the trainer without adapter": base}
    return "; on average " + ", ".join(f"{sum(map(float, v)) / len(v):.7g} by {name}" for name, v in found.items())


MOSTLY = 0.5


class MergedShare:
    """Measures, after each publication of merged adapters, how much of them the engines' number format drops.

    share: of the trainer (see ``TrainsAdapters.unchanged_share``). notice: called once with a line if it is most."""

    def __init__(self, args: Args, share: Callable[[], float], notice: Callable[[str], None]) -> None:
        self._args = args
        self._share = share
        self._notice: Callable[[str], None] | None = notice

    def __call__(self) -> dict[str, float]:
        """The share of the elements of adapted matrices that are the same numbers to the engines as before."""
        share = self._share()
        if share > MOSTLY and self._notice is not None:
            numbers = f"the same {self._args.engine_dtype} numbers as before"
            what = f"{share:.0%} of the elements of adapted matrices are to the engines {numbers}"
            self._notice(f"{what}: --lora-publish adapter publishes adapters without that rounding")
            self._notice = None
        return {"publish/unchanged_share": share}
