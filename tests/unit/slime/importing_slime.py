"""Functions that import slime, as its users write them: search, tools, agents, an environment, whole rollouts."""

from __future__ import annotations

import asyncio
import random
import re
from copy import deepcopy

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import DynamicFilterOutput, MetricGatherer, call_dynamic_filter
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.rm_hub.math_dapo_utils import compute_score
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm, generate_and_rm_group
from slime.rollout.sglang_rollout import generate as one_turn
from slime.rollout.sglang_rollout import generate_rollout as whole_rollout
from slime.utils.async_utils import run
from slime.utils.data import Dataset
from slime.utils.http_utils import get, post
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.misc import load_function
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

ROUTER = "http://{ip}:{port}/generate"


def _router(args):
    return ROUTER.format(ip=args.sglang_router_ip, port=args.sglang_router_port)


def _end(sample, reason):
    ends = {"length": Sample.Status.TRUNCATED, "abort": Sample.Status.ABORTED, "stop": Sample.Status.COMPLETED}
    sample.status = ends[reason]
    return sample


async def search_generate(args, sample: Sample, sampling_params) -> Sample:
    """Turns by text: a search is what stands in tags, which a stop string ends and which must stay in the text."""
    assert not args.partial_rollout
    tokenizer = GenerateState(args).tokenizer
    prompt_ids = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tokens, sample.loss_mask, written = list(prompt_ids), [], ""
    sample.rollout_top_p_token_ids = None
    stops = [*(sampling_params.get("stop") or []), "</search>", "</answer>"]
    for _ in range(3):
        payload = {"text": sample.prompt + written, "sampling_params": {**sampling_params, "stop": stops}}
        output = await post(_router(args), {**payload, "return_logprob": True})
        meta = output["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            return _end(sample, "abort")
        pairs = meta["output_token_logprobs"]
        sample.append_response_tokens(
            args, tokens=[p[1] for p in pairs], log_probs=[p[0] for p in pairs], trainable=True, meta_info=meta
        )
        written += output["text"]
        found = re.search(r"<(search|answer)>(.*?)</\1>", output["text"], re.DOTALL)
        if found and found[1] == "search":
            answer = await post(args.search_url, {"queries": [found[2]], "topk": 1})
            told = f"<information>{answer['result'][0][0]['document']['contents']}</information>"
        elif found:
            break
        else:
            told = "invalid"
        ids = tokenizer(told, add_special_tokens=False)["input_ids"]
        sample.append_response_tokens(args, tokens=ids, trainable=False)
        written += told
    sample.response = written
    return _end(sample, meta["finish_reason"]["type"])


async def search_reward(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("a Sample")
    text = sample.prompt + sample.response
    return 1.0 if f"<answer>{sample.label['ground_truth']}</answer>" in text else 0.1


async def tool_generate(args, sample, sampling_params):
    """Turns by tokens, an attribute of its own for the reward, and a second name of ``loss_mask``."""
    sample.rollout_log_probs, sample.response, sample.response_length, sample.loss_mask = None, "", 0, []
    tokenizer = GenerateState(args).tokenizer
    prompt_ids = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tokens, mask, calls = list(prompt_ids), sample.loss_mask, 0
    limit = args.rollout_max_context_len or args.context_parallel_size * args.max_tokens_per_gpu
    while calls < 2 and len(sample.tokens) < limit:
        params = dict(
            sampling_params, max_new_tokens=min(sampling_params["max_new_tokens"], limit - len(sample.tokens))
        )
        output = await post(
            _router(args), {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
        )
        pairs = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[p[1] for p in pairs],
            log_probs=[p[0] for p in pairs],
            meta_info=output["meta_info"],
            text=output["text"],
        )
        if "call" not in output["text"]:
            break
        calls += 1
        ids = tokenizer("[7]", add_special_tokens=False)["input_ids"]
        sample.append_response_tokens(args, tokens=ids, trainable=False, text="[7]")
    sample.loss_mask = mask
    sample.tool_call_count = calls
    sample.payload_text = sample.prompt + sample.response
    if sample.status is Sample.Status.PENDING:
        _end(sample, output["meta_info"]["finish_reason"]["type"])
    return sample


async def tool_reward(args, sample, **kwargs):
    result = compute_score(sample.prompt + sample.response, sample.label, strict_box_verify=True)
    if result["score"] < 0:
        result["score"] = min(-0.6, result["score"] + (sample.tool_call_count - 2) / 2 * 0.1)
    result["pred"] = result["pred"] or ""
    return result


async def agents_generate(args, sample, sampling_params, evaluation=False) -> list[Sample]:
    """Several agents, which find what they need on ``args`` and leave their samples there."""
    args.sampling_params, args.tokenizer, args.weight = sampling_params, GenerateState(args).tokenizer, 0.5
    args.rollout_max_context_len = args.eval_max_context_len if evaluation else args.rollout_max_context_len
    args = deepcopy(args)
    args.sample, args.results = sample, {"solver": [], "critic": []}
    await asyncio.gather(_agent(args, "solver"), _agent(args, "critic"))
    rewards = await batched_async_rm(args, [*args.results["solver"], *args.results["critic"]])
    made = [*args.results["solver"], *args.results["critic"]]
    for one, reward in zip(made, rewards, strict=True):
        one.reward = reward * args.weight
        one.rollout_id = sample.index
    random.shuffle(made)
    return made


async def _agent(args, key):
    sample = deepcopy(args.sample)
    sample.prompt = f"{key}: {sample.prompt}"
    sample.tokens = args.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    payload = {"input_ids": sample.tokens, "sampling_params": args.sampling_params, "return_logprob": True}
    output = await post(_router(args), payload)
    pairs = output["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args, tokens=[p[1] for p in pairs], log_probs=[p[0] for p in pairs], meta_info=output["meta_info"]
    )
    sample.response, sample.reason_content = output["text"], None
    args.results[key].append(sample)


async def compact_generate(args, sample, sampling_params):
    """Fan-out by siblings that share the id of their rollout."""
    sample.rollout_id = sample.index
    first = await one_turn(args, sample, dict(sampling_params))
    second = deepcopy(first)
    for part in (first, second):
        part.reward = None
    return [first, second]


async def environment_generate(args, sample, sampling_params):
    """An environment: the prompt is the number of a task, the statuses are text, the reward is the environment's."""
    task = int(sample.prompt)
    sample.tokens, sample.response_length, sample.loss_mask = [3, 4, 5 + task], 2, [1, 1]
    sample.response, sample.rollout_log_probs = "done", [-0.1, -0.2]
    sample.weight_versions.append("3")
    sample.reward, sample.status = float(task), "truncated" if task % 2 else "completed"
    return sample


def keep_or_stay(args, samples, **kwargs):
    return DynamicFilterOutput(keep=False, reason="never", keep_when_insufficient=True)


def count_on_args(args, all_samples, data_source):
    args.processed_group_count = getattr(args, "processed_group_count", 0) + len(all_samples)


def log_on_args(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    rollout_extra_metrics["processed"] = args.processed_group_count


# Whole rollouts.


async def _groups(args, data_source, wanted):
    state = GenerateState(args)
    gatherer, kept = MetricGatherer(), []
    dynamic_filter = load_function(args.dynamic_sampling_filter_path) if args.dynamic_sampling_filter_path else None
    while len(kept) < wanted:
        while state.remaining_batch_size < wanted:
            state.submit_generate_tasks(data_source(args.over_sampling_batch_size))
        done, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            group = task.result()
            decision = call_dynamic_filter(dynamic_filter, args, group)
            if not decision.keep:
                gatherer.on_dynamic_filter_drop(decision.reason)
                state.remaining_batch_size -= 1
            elif len(kept) < wanted:
                kept.append(group)
    state.aborted = True
    assert (await get(_router(args).replace("/generate", "/workers")))["workers"] == []
    unfinished = [await task for task in state.pendings]
    state.reset()
    return RolloutFnTrainOutput(samples=kept, metrics=gatherer.collect()), unfinished


def own_rollout(args, rollout_id, data_source, evaluation=False):
    """Submits, waits, filters, and gives back what it does not need."""
    assert args.rollout_global_dataset
    output, unfinished = run(_groups(args, data_source.get_samples, args.rollout_batch_size))
    if unfinished:
        data_source.add_samples(unfinished)
    return output


def around_the_default(args, rollout_id, data_source, evaluation=False):
    """Changes what the default rollout returns."""
    output = whole_rollout(args, rollout_id, data_source, evaluation=evaluation)
    if evaluation:
        return output
    for group in output.samples:
        for sample in group:
            sample.reward += 10.0
    return output


async def _evaluated(args, groups):
    params = dict(GenerateState(args).sampling_params, temperature=0.0)
    samples = [s for group in groups for s in group]
    return await asyncio.gather(*(generate_and_rm(args, s, dict(params), evaluation=True) for s in samples))


def own_evaluation(args, rollout_id, data_source, evaluation=False):
    assert evaluation
    samples = run(_evaluated(args, data_source.get_samples(2)))
    rewards = [sample.reward for sample in samples]
    truncated = [sample.status == Sample.Status.TRUNCATED for sample in samples]
    return RolloutFnEvalOutput(data={"mine": {"rewards": rewards, "truncated": truncated, "samples": samples}})


def reads_data_sets(args, rollout_id, data_source, evaluation=False):
    """As slime's own evaluation: it reads the sets of ``args.eval_datasets`` itself."""
    data = {}
    for config in args.eval_datasets:
        made = Dataset(
            path=config.path,
            tokenizer=GenerateState(args).tokenizer,
            processor=None,
            max_length=args.eval_max_prompt_len,
            prompt_key=config.input_key,
            label_key=config.label_key,
            metadata_key=config.metadata_key,
            tool_key=config.tool_key,
            apply_chat_template=args.apply_chat_template,
        )
        samples = [deepcopy(row) for row in made for _ in range(config.n_samples_per_eval_prompt)]
        for sample in samples:
            sample.metadata = config.inject_metadata(sample.metadata)
        params = {"max_new_tokens": config.max_response_len, "temperature": config.temperature}
        run(_all_of(generate_and_rm(args, sample, dict(params), evaluation=True) for sample in samples))
        data[config.name] = {"rewards": [sample.reward for sample in samples], "samples": samples}
    return RolloutFnEvalOutput(data=data)


async def _all_of(calls):
    return await asyncio.gather(*calls)


def groups_at_once(args, rollout_id, data_source, evaluation=False):
    groups = data_source.get_samples(args.rollout_batch_size)

    async def all_of_them():
        params = GenerateState(args).sampling_params
        return await asyncio.gather(*(generate_and_rm_group(args, group, params) for group in groups))

    return run(all_of_them())


def conversations(args, rollout_id, data_buffer, evaluation=False):
    masks = MultiTurnLossMaskGenerator(load_tokenizer(args.hf_checkpoint), tokenizer_type=args.loss_mask_type)
    groups = data_buffer.get_samples(args.rollout_batch_size)
    for (sample,) in groups:
        ids, mask = masks.get_loss_mask(sample.prompt, tools=sample.metadata.get("tools"))
        length = masks.get_response_lengths([mask])[0]
        sample.tokens, sample.response_length, sample.reward = ids, length, 0
        sample.loss_mask = mask[-length:]
    return groups


async def scored_by_the_run(args, sample, sampling_params):
    sample = await one_turn(args, sample, sampling_params)
    sample.metadata["reward"] = await async_rm(args, sample)
    return sample
