"""One run of TRL's GRPO for ``against_trl.py``: ``python comparison_trl.py SPEC.json`` (see ``comparison_ours.Spec``).

Settings that are equal for both systems are in ``comparison_settings``. What is TRL's own: generation by transformers,
gradient checkpointing off, float32 on the CPU, nothing logged, no checkpoints but the weights that are evaluated, whose
writing is not in the times.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import trl
from comparison_ours import Spec, seconds_of_process
from comparison_settings import PROMPTS, SAMPLES, SETTINGS
from comparison_tasks import load, read_rows
from datasets import Dataset
from transformers import TrainerCallback


class Clock(TrainerCallback):
    """Wall and CPU seconds of each step, and the weights that are evaluated, saved outside of these times."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self._since = (0.0, 0.0)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """The first step begins."""
        self._since = (time.monotonic(), time.process_time())

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        """A step has ended, and the next one begins."""
        self.seconds.append(time.monotonic() - self._since[0])
        self.cpu.append(time.process_time() - self._since[1])
        if state.global_step % self._spec.eval_every == 0:
            named["model"].save_pretrained(self._spec.weights(state.global_step))
            named["processing_class"].save_pretrained(self._spec.weights(state.global_step))
        self.on_train_begin()


def config(spec: Spec) -> Any:
    """One optimizer step on all samples of a rollout; in micro-batches of ``spec.micro_batch``."""
    parts = PROMPTS * SAMPLES // spec.micro_batch
    return trl.GRPOConfig(
        output_dir=str(spec.folder / "trl"),
        max_steps=spec.steps,
        seed=spec.seed,
        per_device_train_batch_size=spec.micro_batch,
        gradient_accumulation_steps=parts,
        steps_per_generation=parts,
        num_generations=SAMPLES,
        max_completion_length=spec.max_tokens,
        temperature=1.0,
        num_iterations=1,
        beta=0.0,
        loss_type="dapo",  # the mean over all tokens of the step
        scale_rewards="group",
        epsilon=SETTINGS["eps_clip"],
        learning_rate=SETTINGS["lr"],
        lr_scheduler_type="constant",
        adam_beta1=SETTINGS["adam_beta1"],
        adam_beta2=SETTINGS["adam_beta2"],
        weight_decay=0.0,
        max_grad_norm=SETTINGS["clip_grad"],
        shuffle_dataset=False,
        use_vllm=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    """Train, and write what it took."""
    spec = Spec.read(Path(sys.argv[1]))
    torch.set_num_threads(spec.threads)
    model, tokenizer = load(spec.start)
    eos = tokenizer.eos_token_id

    def reward(completion_ids: list[list[int]], label: list[str], **_: Any) -> list[float]:
        wanted = [[*tokenizer.encode(text), eos] for text in label]
        return [float(ids == right) for ids, right in zip(completion_ids, wanted, strict=True)]

    clock = Clock(spec)
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config(spec),
        train_dataset=Dataset.from_list([{"prompt": p, "label": a} for p, a in read_rows(spec.rows)]),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    start_s = seconds_of_process()
    trainer.train()
    spec.write_result(version=trl.__version__, start_s=start_s, seconds=clock.seconds, cpu={"trl": clock.cpu})


if __name__ == "__main__":
    main()
