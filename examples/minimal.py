"""GRPO in one flat file, for reading: the library's parts without Ray, servers and plugins around them.

    python examples/minimal.py [--steps 60] [--seed 0]

A 176k-parameter model learns to spell words backwards: ``snarleyyow=`` is answered by ``woyyelrans`` and the end
token. It is warmed up on right answers until one sampled answer in four is right, then trained by GRPO. One process
does in turn what a real run's processes do beside each other:

    data source ──► Buffer ──► engine ──► reward, filter ──► Buffer ──► trainer ──► new weights for the engine
                    lease      generate   score the group    finish     train       publish
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.buffer.ledger import Ledger
from buffer_rl.buffer.state import BufferState
from buffer_rl.data.source import EvalSource, PromptDataSource
from buffer_rl.embedded.fast_decoder import FastDecoder
from buffer_rl.embedded.sampling import SamplingParams
from buffer_rl.embedded.scheduler import Request, Scheduler
from buffer_rl.options.section import Options, compose
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import Sample, SampleGroup, Status, Ticket, VersionSpan
from buffer_rl.rollout.conversion import GroupConverter
from buffer_rl.rollout.requests import sampling_seed
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl.trainer.objective import Objective
from buffer_rl.trainer.pretrained import prepare_torch
from buffer_rl.trainer.torch_trainer import TorchTrainer

MAX_NEW_TOKENS = 12  # the longest word has 10 letters, then the end token, and one to spare
MODEL: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 24,
}


# -- the task ------------------------------------------------------------------------------------------------


def write_words(folder: Path, seed: int) -> dict[str, str]:
    """JSONL files of prompts and labels without a common word: to train on, to stop the warm-up by, to report."""
    import reasoning_gym

    words = reasoning_gym.create_dataset("spell_backward", size=1, seed=0).words
    words = sorted({word for word in words if word.isascii() and word.isalpha() and word.islower()})
    random.Random(seed).shuffle(words)
    paths = {}
    for name, size in (("heldout", 400), ("dev", 256), ("train", 20_000)):
        part, words = words[:size], words[size:]
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"{word}=", "label": word[::-1]}) + "\n" for word in part))
        paths[name] = str(path)
    return paths


def reward(sample: Sample) -> float:
    """1 for the whole answer followed by the end token. Anything softer would be exploited."""
    return float(sample.status is Status.COMPLETED and sample.response == sample.label)


# -- the engine ----------------------------------------------------------------------------------------------


class Engine:
    """Generates by continuous batching: every step decodes one token for each running sample."""

    def __init__(self, model_folder: str, seed: int) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model_folder)
        self._model = AutoModelForCausalLM.from_pretrained(model_folder)
        self._decoder = FastDecoder(self._model, self._model.config.max_position_embeddings)
        self._scheduler = Scheduler(
            self._decoder, max_running_requests=512, eos_token_ids=[self.tokenizer.eos_token_id]
        )
        self._seed = seed

    def update_weights(self, trainer: TorchTrainer, version: int) -> None:
        """Take over the trainer's weights. Tied weights come once, hence not strict."""
        for bucket in trainer.export():
            self._model.load_state_dict(bucket, strict=False)
        self._decoder.load(self._model)
        self._scheduler.weights_changed(str(version))

    @torch.inference_mode()
    def generate(self, samples: list[Sample], version: int) -> None:
        """Fill every sample's response, tokens, log-probabilities, version and status."""
        params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=1.0)
        for number, sample in enumerate(samples):
            assert sample.uid is not None
            prompt_ids = tuple(self.tokenizer.encode(sample.prompt))
            seed = sampling_seed(self._seed + version, sample.uid, sample.sample_index)
            self._scheduler.add(Request(rid=str(number), prompt_ids=prompt_ids, params=params, seed=seed, tag=sample))
        while not self._scheduler.idle:
            for request in self._scheduler.step():
                self._fill(request.tag, request, version)

    def _fill(self, sample: Sample, request: Request, version: int) -> None:
        sample.tokens = [*request.prompt_ids, *request.output_ids]
        sample.response_length = len(request.output_ids)
        sample.response = str(self.tokenizer.decode(request.output_ids, skip_special_tokens=True))
        sample.rollout_log_probs = list(request.log_probs)
        sample.weight_versions = [VersionSpan(version, 0, len(request.output_ids))]
        stopped = request.finish_reason is not None and request.finish_reason["type"] == "stop"
        sample.status = Status.COMPLETED if stopped else Status.TRUNCATED


# -- rollouts: lease groups, fill them, report what became of each ---------------------------------------------

Fill = Callable[[list[Sample]], None]


def run_rollout(buffer: BufferState, ticket: Ticket, converter: GroupConverter, fill: Fill, keep_all: bool) -> float:
    """Fill and report groups until the step has as many as it wants; returns the mean reward before filtering."""
    rewards: list[float] = []
    missing = ticket.num_groups
    while missing > 0:
        groups = buffer.get_samples(ticket, missing)
        fill([sample for group in groups for sample in group])
        for group in groups:
            scores = [reward(sample) for sample in group]
            for sample, score in zip(group, scores, strict=True):
                sample.reward = score
            rewards += scores
            if keep_all or max(scores) > min(scores):  # equal rewards give equal advantages: nothing to learn from
                buffer.finish(ticket, group.uid, group.attempt, *converter.encode(group, ticket.evaluation))
                missing -= 1
            else:
                buffer.reject(ticket, group.uid, group.attempt, "equal rewards")
    buffer.end_ticket(ticket)
    buffer.close_selection(ticket.rollout_id)
    return statistics.fmean(rewards)


def fill_from_label(tokenizer: Any, samples: list[Sample]) -> None:
    """Supervised fine-tuning as a rollout: the response is the label and the end token."""
    for sample in samples:
        answer = [*tokenizer.encode(sample.label), tokenizer.eos_token_id]
        sample.tokens = [*tokenizer.encode(sample.prompt), *answer]
        sample.response, sample.response_length = sample.label, len(answer)
        sample.status = Status.COMPLETED


def accuracy(engine: Engine, groups: list[SampleGroup], version: int) -> float:
    """Share of right answers, one sampled answer a prompt."""
    samples = [sample for group in groups for sample in group.as_prompts()]
    engine.generate(samples, version)
    return statistics.fmean(reward(sample) for sample in samples)


# -- training ------------------------------------------------------------------------------------------------


def make_buffer(args: Any) -> BufferState:
    """The Buffer's logic; a real run puts it into a Ray actor of its own."""
    return BufferState(
        PromptDataSource(args),
        ledger=Ledger.in_memory(),
        groups_per_step=args.rollout_batch_size,
    )


def make_trainer(args: Any) -> TorchTrainer:
    """One rank with the loss that the options name."""
    prepare_torch(args, args.seed)
    return TorchTrainer(args, rank=0, world_size=1, objective=Objective(args, PluginRegistry()))


def steps(args: Any, engine: Engine, trainer: TorchTrainer, fill: Fill | None) -> Iterator[tuple[int, float]]:
    """The loop: rollout, train, commit, publish, release. Yields the number of steps done and the mean reward.

    fill: what produces the responses; the engine with the newest weights where it is None.
    """
    buffer, objective = make_buffer(args), Objective(args, PluginRegistry())
    converter = GroupConverter(args)
    for rollout_id in range(args.num_rollout):
        ticket = buffer.generate(rollout_id)
        produce = fill or partial(engine.generate, version=rollout_id)
        mean_reward = run_rollout(buffer, ticket, converter, produce, keep_all=fill is not None)

        batch = buffer.get_data(rollout_id)
        objective.compute_advantages(batch)
        sums = trainer.accumulate(batch)
        trainer.optimizer_step(1 / sums.divisor)
        buffer.commit(rollout_id, step=rollout_id + 1)

        engine.update_weights(trainer, version=rollout_id + 1)
        buffer.release(rollout_id + 1)
        yield rollout_id + 1, mean_reward


def warm_up(args: Any, engine: Engine, dev: list[SampleGroup], target: float) -> TorchTrainer:
    """Fine-tune on right answers until sampled accuracy reaches ``target``."""
    trainer = make_trainer(args)
    for done, _ in steps(args, engine, trainer, lambda samples: fill_from_label(engine.tokenizer, samples)):
        if done % 10 == 0 and accuracy(engine, dev, done) >= target:
            print(f"warm-up: {done} steps")
            break
    return trainer


def options(common: dict[str, Any], **own: Any) -> Options:
    """The same frozen options that the command line makes."""
    return compose(CORE_SECTIONS).model_validate({**common, **own})


def run(folder: Path, num_steps: int, seed: int, warm_up_steps: int = 600) -> tuple[float, float]:
    """Prepare, warm up, train; returns held-out accuracy before and after GRPO."""
    words = write_words(folder, seed)
    model_folder = make_tiny_model(folder / "model", seed=seed, init_scale=0.02, max_position_embeddings=64, **MODEL)
    eval_sets = [f"{name}={words[name]}" for name in ("dev", "heldout")]
    common = {"prompt_data": words["train"], "eval_prompt_data": eval_sets, "seed": seed}
    common |= {"rollout_seed": seed, "rollout_max_response_len": MAX_NEW_TOKENS}
    engine = Engine(model_folder, seed)

    sft = {"hf_checkpoint": model_folder, "rollout_batch_size": 64, "n_samples_per_prompt": 1}
    sft |= {"loss_type": "sft_loss", "lr": 2e-3, "lr_warmup_iters": 50, "num_rollout": warm_up_steps}
    sft_args = options(common, **sft)
    evaluation = EvalSource(sft_args)
    heldout = evaluation.groups("heldout")
    warm_up(sft_args, engine, evaluation.groups("dev"), target=0.25).save_hf(str(folder / "warm"))

    grpo = {"hf_checkpoint": str(folder / "warm"), "rollout_batch_size": 32, "n_samples_per_prompt": 16}
    grpo |= {"lr": 3e-4, "lr_warmup_iters": 5, "eps_clip_high": 0.28, "use_rollout_logprobs": True}
    grpo_args = options(common, **grpo, num_rollout=num_steps)
    trainer = make_trainer(grpo_args)
    before = accuracy(engine, heldout, version=0)
    print(f"held-out accuracy before: {before:.3f}")
    for done, mean_reward in steps(grpo_args, engine, trainer, fill=None):
        if done % 10 == 0 or done == num_steps:
            print(f"step {done:3d}  mean reward {mean_reward:.3f}", flush=True)
    after = accuracy(engine, heldout, version=num_steps)
    print(f"held-out accuracy after:  {after:.3f}")
    return before, after


def main() -> None:
    """Read the flags and run in a temporary folder."""
    parser = argparse.ArgumentParser(description="GRPO in one flat file")
    parser.add_argument("--steps", type=int, default=60, help="GRPO steps")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), flags.steps, flags.seed)
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
