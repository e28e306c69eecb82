"""Generation and whole rollouts under slime's names (``slime.rollout.sglang_rollout``).

A function that the built-in rollout calls runs inside its lease: requests get the ids by which they are aborted, and
the seeds of their sample. ``generate_rollout`` is the built-in rollout function, whose groups come back to its caller
before they are reported, so that a function around it may change them.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from buffer_rl.engines.client import GenerateResult
from buffer_rl.errors import ConfigError
from buffer_rl.kinds.rollout import RolloutBuffer
from buffer_rl.options.section import required
from buffer_rl.plugin.signature import takes_evaluation
from buffer_rl.records.groups import Sample, SampleGroup, Status
from buffer_rl.rollout.context import RolloutContext, current_context
from buffer_rl.rollout.default import DefaultRollout
from buffer_rl.rollout.generate import sampling_params_for
from buffer_rl.rollout.lease import current_lease
from buffer_rl.rollout.requests import answer_for, sampling_seed
from buffer_rl.rollout.sft import SFTRollout
from buffer_rl.rollout.user_functions import call_user, eval_data
from buffer_rl_slime import http
from buffer_rl_slime.rewards import batched_async_rm
from buffer_rl_slime.tools import get_rollout_num_engines, run


@dataclass
class RolloutFnTrainOutput:
    """What a rollout function returns. samples: a list of groups, each the list of its samples."""

    samples: list[Any]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """What an evaluation returns. data: by data set ``rewards``, ``truncated`` and ``samples``."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def call_rollout_fn(fn: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any) -> Any:
    """The answer of a rollout function as one of the records above."""
    output = fn(*args, **kwargs, evaluation=evaluation)
    if hasattr(output, "data" if evaluation else "samples"):
        return output
    return RolloutFnEvalOutput(data=output) if evaluation else RolloutFnTrainOutput(samples=output)


class GenerateState:
    """What the functions of a rollout share, one for each rollout worker: ``GenerateState(args)`` gives the same again.

    tokenizer: that of ``--hf-checkpoint``. processor: None. semaphore: a place for each request in flight, beside that
    which the built-in rollout holds for each sample. sampling_params: those of training. aborted: whether the rollout
    has enough groups.
    """

    def __new__(cls, args: Any) -> GenerateState:
        context = current_context()
        found: GenerateState | None = context.shared.get(cls)
        if found is None:
            found = context.shared[cls] = super().__new__(cls)
            found._begin(context, args)
        return found

    def _begin(self, context: RolloutContext, args: Any) -> None:
        self.args = args
        self.tokenizer = context.tokenizer
        self.processor = None
        self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency * max(1, get_rollout_num_engines(args)))
        self.sampling_params = {
            "stop": None,
            "stop_token_ids": None,
            **sampling_params_for(context.args, evaluation=False),
            "spaces_between_special_tokens": False,
        }
        self.group_sampling_seeds = [context.seed + number for number in range(args.n_samples_per_prompt)]
        self.dp_rank = 0
        self.reset()

    def __deepcopy__(self, memo: Any) -> GenerateState:
        return self

    @property
    def aborted(self) -> bool:
        """Whether what is not generated yet must end as ``aborted``."""
        return self._aborted or current_lease().stopped

    @aborted.setter
    def aborted(self, value: bool) -> None:
        self._aborted = value

    @contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """The rank 0: the router chooses the engine."""
        yield 0

    def reset(self) -> None:
        """As before the first group."""
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task[Any]] = set()
        self._aborted = False

    def submit_generate_tasks(self, samples: Sequence[Any]) -> None:
        """Start a task for each group, in ``pendings``."""
        for group in samples:
            work = generate_and_rm_group(self.args, group, self.sampling_params.copy(), evaluation=False)
            self.pendings.add(asyncio.create_task(work))
        self.remaining_batch_size += len(samples)


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    """The router's address for ``endpoint``: there is one model."""
    return f"{required(current_context().args.router_url, 'router_url').rstrip('/')}{endpoint}"


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Continue the sample's tokens, or its prompt where it has none, by one request, and append what comes.

    ``max_new_tokens`` bounds the response with what it has already. Raises ValueError for a sample that is done,
    EngineError if the engine refuses."""
    if sample.status not in (Status.PENDING, Status.ABORTED):
        raise ValueError(f"sample {sample.index} is {sample.status}, expected: pending or aborted")
    lease = current_lease()
    if lease.stopped:
        sample.status = Status.ABORTED
        return sample
    sampling_params["max_new_tokens"] -= sample.response_length
    if sampling_params["max_new_tokens"] <= 0:
        sample.status = Status.TRUNCATED
        return sample
    if not sample.tokens:
        sample.tokens = lease.context.prompts.encode(sample)
    if sample.uid is None or lease.requests is None:  # outside of a lease: ``abort`` ends it
        params = dict(sampling_params)
        if sample.uid is not None:
            seed = sampling_seed(lease.context.seed, sample.uid, sample.sample_index, sample.part)
            params.setdefault("sampling_seed", seed)
        payload = {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
        output = await http.post(get_model_url(args, "default"), payload)
        meta, text = output["meta_info"], output["text"]
    else:
        answer = await answer_for(sample, list(sample.tokens), sampling_params, lease=lease)
        meta, text = _meta_of(answer), answer.text
    pairs = meta.get("output_token_logprobs") or []
    tokens, log_probs = [pair[1] for pair in pairs], [pair[0] for pair in pairs]
    sample.append_response_tokens(args, tokens=tokens, log_probs=log_probs, meta_info=meta, text=text)
    return sample


async def generate_and_rm(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Generate one sample, by ``--custom-generate-function-path`` where there is one, and score it unless a group's
    reward is computed for all its samples. Returns the sample, or the list of its parts."""
    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout and sample.response_length:
        sample.loss_mask = [0] * sample.response_length
    if sample.status in (Status.COMPLETED, Status.TRUNCATED):
        return sample
    state = GenerateState(args)
    async with state.semaphore:
        if state.aborted:
            sample.status = Status.ABORTED
            return sample
        made = await _generated(args, sample, sampling_params, evaluation)
    if args.group_rm:
        return made
    parts = made if isinstance(made, list) else [made]
    if any(part.status == Status.ABORTED for part in parts):
        return made
    if unscored := [part for part in parts if part.reward is None]:
        for part, reward in zip(unscored, await batched_async_rm(args, unscored), strict=True):
            part.reward = reward
    return made


async def generate_and_rm_group(
    args: Any, group: Sequence[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> Any:
    """Generate and score all samples of a group at a time; each has a copy of ``sampling_params``."""
    state = GenerateState(args)
    if state.aborted:
        return group
    work = (generate_and_rm(args, sample, dict(sampling_params), evaluation=evaluation) for sample in group)
    made = list(await asyncio.gather(*work))
    if args.group_rm and not state.aborted:
        for entry, reward in zip(made, await batched_async_rm(args, made), strict=True):
            parts = entry if isinstance(entry, list) else [entry]
            for part, value in zip(parts, reward if isinstance(entry, list) else [reward], strict=True):
                part.reward = value
    return made


async def abort(args: Any, rollout_id: int) -> list[Any]:
    """End the requests of ``GenerateState``'s tasks, and wait for these. Returns the groups that were not done, where
    they are continued later (``--partial-rollout``)."""
    state = GenerateState(args)
    state.aborted = True
    await http.abort_running()
    unfinished: list[Any] = []
    while state.pendings:
        done, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
        unfinished += [task.result() for task in done if args.partial_rollout]
    return unfinished


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """The built-in rollout, or evaluation, for a synchronous rollout function around it."""
    return run(_rollout(args, rollout_id, data_source, evaluation))


async def generate_rollout_async(
    args: Any, rollout_id: int, data_source: Any
) -> tuple[RolloutFnTrainOutput, list[Any]]:
    """The built-in rollout, and no groups to give back: it gave them back itself. data_source: the rollout's buffer, or
    its method ``get_samples``."""
    buffer = getattr(data_source, "__self__", data_source)
    return await _rollout(args, rollout_id, buffer, False), []


async def eval_rollout(args: Any, rollout_id: int) -> Any:
    """Refused: the evaluation's samples come from the buffer, which this signature lacks."""
    where = "slime.rollout.sglang_rollout.eval_rollout"
    hint = "call generate_rollout(args, rollout_id, data_source, evaluation=True)"
    raise ConfigError("an evaluation needs the buffer", where=where, hint=hint)


async def _rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool) -> Any:
    collected = _Collected(data_source)
    answer = await DefaultRollout(args)(args, rollout_id, cast("RolloutBuffer", collected), evaluation)
    if not evaluation:
        return RolloutFnTrainOutput(samples=[list(group) for group in collected.groups], metrics=answer.metrics)
    data: dict[str, dict[str, Any]] = {**eval_data(current_context().args, collected.groups)}
    return RolloutFnEvalOutput(data=data, metrics=answer.metrics)


@dataclass(slots=True)
class _Collected:
    """A rollout's buffer that keeps finished groups in place of reporting them: the framework does so with what the
    rollout function returns."""

    buffer: Any
    groups: list[SampleGroup] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.buffer, name)

    async def afinish(self, group: SampleGroup, encoded: Any = None) -> None:
        """Keep the group."""
        self.groups.append(group)


async def _generated(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool) -> Any:
    if sample.generate_function_path is not None:
        what = f"a sample names the code that is to generate it: {sample.generate_function_path!r:.80}"
        expected = "None: --custom-generate-function-path chooses it"
        raise ConfigError(what, where="sample.generate_function_path", expected=expected)
    function = current_context().generate
    if function is None:
        return await generate(args, sample, sampling_params)
    keywords = {"evaluation": evaluation} if takes_evaluation(function) else {}
    return await call_user(function, lambda: function(args, sample, sampling_params, **keywords))


def _meta_of(answer: GenerateResult) -> dict[str, Any]:
    """``meta_info`` of ``/generate`` for an answer that was read already."""
    meta: dict[str, Any] = {
        "finish_reason": {"type": answer.finish_reason, "matched": answer.matched},
        "output_token_logprobs": [[p, t, None] for p, t in zip(answer.log_probs, answer.output_ids, strict=True)],
        "weight_versions": [{"version": str(s.version), "start": s.start, "end": s.end} for s in answer.spans],
        "cached_tokens": answer.cached_tokens,
    }
    kept = getattr(answer, "kept", None)
    if kept is not None:
        offsets = np.cumsum([0, *(len(ids) // 4 for ids in kept)]).astype("<i4")
        meta["top_p_token_ids"] = base64.b64encode(b"".join(kept)).decode()
        meta["top_p_token_offsets"] = base64.b64encode(offsets.tobytes()).decode()
    return meta


async def abort_servers_until_idle(urls: Sequence[str]) -> None:
    """End the running requests of the rollout function. urls: of the engines, as the router lists them."""
    await http.abort_running()


def generate_sft_rollout(args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> Any:
    """Supervised fine-tuning (``slime.rollout.sft_rollout``): the built-in function ``sft``, which reports its groups
    itself."""
    return run(SFTRollout(args)(args, rollout_id, data_buffer, evaluation))
