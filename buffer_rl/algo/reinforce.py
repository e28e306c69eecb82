"""REINFORCE++, REINFORCE++-baseline, ReMax and GPG: policy gradients without a value function."""

from __future__ import annotations

import numpy as np

from buffer_rl.algo.advantages import grpo, rewards_of
from buffer_rl.algo.returns import discounted_sums, masks_of, spread, token_rewards, whitened, whitened_tokens
from buffer_rl.args import Args
from buffer_rl.kinds.marks import scoped
from buffer_rl.records.groups import TrainBatch, equal_rewards


@scoped("rollout")
def reinforce_plus_plus(args: Args, batch: TrainBatch) -> None:
    """Discounted returns of token rewards, normalised over all unmasked tokens of the rollout.

    Hu et al. (arXiv 2501.03262): the token reward is the sample's reward at the end of the response, minus
    ``--kl-coef`` times the log-ratio to the reference; the advantage of a token is the sum of the rewards from it on
    (discounted by ``--gamma``, 1 in the paper), normalised over the global batch. Rewards are raw: there is no group
    baseline. Returns are those before the normalisation.

    Raises DataError for a missing column, or a reward that is not finite.
    """
    masks, returns = masks_of(batch), discounted_sums(token_rewards(args, batch), args.gamma)
    batch.columns["advantages"] = spread(whitened(returns), masks)
    batch.columns["returns"] = spread(returns, masks)


@scoped("rollout")
def reinforce_plus_plus_baseline(args: Args, batch: TrainBatch) -> None:
    """The reward minus the mean of its prompt, normalised over all unmasked tokens of the rollout.

    Hu et al. (arXiv 2501.03262), the variant with a baseline for several samples a prompt. The mean was subtracted when
    the rewards were post-processed. The paper puts its KL penalty into the loss: ``--use-kl-loss --kl-loss-type k2``.

    Raises DataError for a missing reward column, or a reward that is not finite.
    """
    grpo(args, batch)
    batch.columns["advantages"] = whitened_tokens(batch.columns["advantages"], masks_of(batch))


@scoped("row", needs=("baseline_reward",))
def remax(args: Args, batch: TrainBatch) -> None:
    """The sum of token rewards from each token on, minus the reward of the prompt's greedy response.

    Li et al. (arXiv 2310.10505), with the penalty of ``--kl-coef`` in the token rewards. The
    column ``baseline_reward``, ``[num_rows]``, is the reward of a response to the prompt at temperature 0
    (``buffer_rl.rollout.baseline``). Returns are those before the subtraction.

    Raises DataError for a missing column, or a reward that is not finite.
    """
    masks, returns = masks_of(batch), discounted_sums(token_rewards(args, batch), 1.0)
    baselines = rewards_of(batch, "baseline_reward")
    advantages = [row_u - baseline for row_u, baseline in zip(returns, baselines, strict=True)]
    batch.columns["advantages"] = spread(advantages, masks)
    batch.columns["returns"] = spread(returns, masks)


@scoped("rollout")
def gpg(args: Args, batch: TrainBatch) -> None:
    """The reward minus the mean of its prompt, times ``samples / samples of prompts whose rewards differ``.

    Chu et al. (arXiv 2504.02546), with ``F_norm = 1``: prompts whose samples are all right or all wrong have no
    gradient, and the factor ``alpha = B / (B - M)`` takes them out of the mean. ``B`` counts samples that have an
    unmasked token, ``M`` those of them whose prompt has equal rewards; a sample that fanned out counts once. The mean
    was subtracted when the rewards were post-processed. Where no prompt has different rewards all advantages are 0. The
    paper's loss is ``-A log pi``, of which ``policy_loss`` has the gradient where the ratio is 1.

    Raises DataError for a missing reward column, or a reward that is not finite.
    """
    grpo(args, batch)
    rewards, masks = rewards_of(batch), masks_of(batch)
    different = {
        row_id.uid for row_id, reward in zip(batch.row_ids, rewards, strict=True) if not equal_rewards((reward, 0.0))
    }
    counted = {
        (row_id.uid, row_id.sample_index) for row_id, mask in zip(batch.row_ids, masks, strict=True) if mask.any()
    }
    if not counted:
        return
    alpha = len(counted) / max(1, sum(uid in different for uid, _ in counted))
    for column in ("advantages", "returns"):
        batch.columns[column] = [row * np.float32(alpha) for row in batch.columns[column]]
