"""What is equal for both systems of ``against_trl.py``; apart from ``comparison_tasks``, which imports torch, as the
driver of buffer_rl does not."""

from __future__ import annotations

from collections.abc import Mapping

PROMPTS, SAMPLES = 32, 16
"""Of a step."""
SETTINGS: Mapping[str, float] = {"lr": 3e-4, "adam_beta1": 0.9, "adam_beta2": 0.95, "eps_clip": 0.2, "clip_grad": 1.0}
"""Beside: GRPO with rewards normalised over a prompt's samples, mean over tokens, temperature 1, no Kullback-Leibler
term, no weight decay, a constant learning rate, one optimizer step a rollout, float32."""
