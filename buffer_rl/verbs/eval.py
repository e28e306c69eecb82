"""``buffer-rl eval``: the evaluation of a training run and nothing else, of a model or of a checkpoint.

It is ``train`` for no step: the same options, checks, files and rewards.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from buffer_rl.data.eval_sets import eval_sets_of
from buffer_rl.driver.folders import AUTO
from buffer_rl.options.checks import refuse
from buffer_rl.options.help import given_flags, keep_in_help, set_flag
from buffer_rl.options.sources import resolve_namespace
from buffer_rl.verbs import train

_DESCRIPTION = """\
Evaluate a model (--hf-checkpoint), or a checkpoint (--load), on --eval-prompt-data or --eval-config.

The options are those of train, and so may be the file of --config; what is about training changes nothing. The
results go to --run-dir, or to eval/ in the run-dir of the file, so that a run's own files stay as they are.
"""
# What --help leaves out: what only training reads.
_IDLE_SECTIONS = ("Optimizer", "Critic", "Loss", "Advantages", "Debugging")
_IDLE = """num_rollout num_epoch schedule keep_last keep_best save_interval save_timeout_s async_save save_dtype
early_stop prompt_data prompt_data_weights data_source_path data_source_timeout_s accept_changed_rows rollout_shuffle
prompt_order difficulty_weights
loss_mask_type rollout_batch_size over_sampling_batch_size partial_rollout mask_offpolicy_in_partial_rollout
n_samples_per_prompt rollout_max_prompt_len dynamic_sampling_filter_path dynamic_sampling_max_drops
buffer_filter_path rollout_sample_filter_path custom_rollout_log_function_path rollout_all_samples_process_path
custom_reward_post_process_path custom_convert_samples_to_train_data_path grpo_std_normalization
disable_rewards_normalization overlong_buffer_len overlong_penalty_factor length_penalty reward_clip reward_scale
eval_interval skip_eval_before_train ref_load opd_teacher_load ref_update_interval num_steps_per_rollout
global_batch_size num_passes_per_rollout max_tokens_per_gpu num_ref_workers num_teacher_workers num_actor_fwd_workers
num_advantage_workers role_path fuse_roles balance_data stream_gradients max_non_finite_steps max_logprob_diff"""
# What would train, or compare evaluations, is taken back.
_TAKEN_BACK = ("num_epoch", "early_stop", "eval_interval", "save", "save_interval", "keep_last", "keep_best")


def add_parser(subparsers: argparse._SubParsersAction[Any], argv: Sequence[str]) -> None:
    """Add the verb, with the flags of ``train``."""
    usage = "buffer-rl eval [--config FILE] [--OPTION VALUE ...]"
    parser = train.add_parser(subparsers, argv, name="eval", description=_DESCRIPTION, usage=usage)
    keep_in_help(parser, lambda heading, name: heading not in _IDLE_SECTIONS and name not in _IDLE.split())
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    """Evaluate. Returns the exit status; raises BufferRLError."""
    flags = given_flags(namespace)
    args = resolve_namespace(namespace).args
    sets = eval_sets_of(args)
    refuse(not sets, "--eval-prompt-data: there is nothing to evaluate on", "add --eval-prompt-data NAME=PATH")
    set_flag(namespace, "num_rollout", "0")
    if args.load == AUTO and args.save is not None:
        set_flag(namespace, "load", args.save)
    for name in _TAKEN_BACK:
        set_flag(namespace, name, "none")
    set_flag(namespace, "async_save", "false")
    if "run_dir" not in flags:
        set_flag(namespace, "run_dir", str(Path(args.run_dir) / "eval"))
    if not args.prompt_data and args.data_source_path is None:  # the Buffer wants some, though none is asked for
        set_flag(namespace, "prompt_data", [sets[0].path])
    return train.run(namespace)
