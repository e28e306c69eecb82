"""Generalised advantage estimation, for runs with a value function."""

from __future__ import annotations

from buffer_rl.algo.returns import discounted_sums, masks_of, spread, token_rewards, unmasked
from buffer_rl.args import Args
from buffer_rl.kinds.marks import scoped
from buffer_rl.records.groups import TrainBatch


@scoped("row", needs=("values",))
def gae(args: Args, batch: TrainBatch) -> None:
    """Advantages of response tokens from their values, with ``--gamma`` and ``--lambd``.

    Schulman et al. (arXiv 1506.02438): ``delta_t = r_t + gamma V_(t+1) - V_t`` and ``A_t = delta_t +
    gamma lambda A_(t+1)``, with value 0 after the last unmasked token, of a truncated response as well. The next token
    is the next unmasked one. Returns are ``A_t + V_t``, the targets of the value function. The advantages are not
    normalised (in PPO they often are: ``--normalize-advantages``).

    The column ``values`` has ``[response_length]`` for each row. Raises DataError for a missing column, one of another
    shape, or a reward that is not finite.
    """
    values, rewards = unmasked(batch, "values"), token_rewards(args, batch)
    deltas = [reward_u - value_u for reward_u, value_u in zip(rewards, values, strict=True)]
    for delta_u, value_u in zip(deltas, values, strict=True):
        delta_u[:-1] += args.gamma * value_u[1:]
    advantages = discounted_sums(deltas, args.gamma * args.lambd)
    returns = [advantage_u + value_u for advantage_u, value_u in zip(advantages, values, strict=True)]
    batch.columns["advantages"] = spread(advantages, masks_of(batch))
    batch.columns["returns"] = spread(returns, masks_of(batch))
