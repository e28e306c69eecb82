"""DPO: the policy itself as a reward model, on pairs of a prompt's samples (arXiv 2305.18290)."""

from __future__ import annotations

from buffer_rl.algo.aggregation import mask_out
from buffer_rl.args import Args
from buffer_rl.kinds.marks import Unit, loss_unit
from buffer_rl.kinds.token_loss import LossInputs, Metric, Reduction, TokenLoss
from buffer_rl.records.groups import equal_rewards


@loss_unit(Unit.GROUP, needs=("reward", "ref_log_probs"))
def dpo(args: Args, inputs: LossInputs) -> TokenLoss:
    """``-log sigmoid(beta (d_chosen - d_rejected))`` (equation 7) for each prompt, with ``d = log pi(y) - log
    pi_ref(y)``, a sum over unmasked tokens of all parts of a sample; the mean over pairs.

    A prompt gives one pair: the sample whose ``reward`` is highest and the one whose is lowest, of equal ones the first
    by its number. A prompt whose rewards are all equal, or of one sample, gives none; nor does a sample that is masked
    entirely take part. The values are ``[num_rows]``, 0 but in the rows of chosen samples, which alone have a weight:
    the divisor of a step is its number of pairs. Advantages and the clip range are not read.

    Metrics, means over pairs: ``dpo_accuracy``, the share whose margin is positive; ``dpo_margin``, ``beta (d_chosen -
    d_rejected)``.
    """
    import torch
    from torch.nn.functional import logsigmoid

    shift_b = mask_out(inputs.log_probs - inputs.ref_log_probs, inputs.loss_mask).sum(-1)
    weights_b = torch.zeros_like(shift_b)
    source: list[torch.Tensor] = list(shift_b * 0)  # a gradient of 0 where there is no pair
    margins: list[torch.Tensor] = list(torch.zeros_like(shift_b))
    for chosen, rejected in _pairs(inputs):
        margin = args.dpo_beta * (shift_b[chosen].sum() - shift_b[rejected].sum())
        for row in chosen:
            source[row], margins[row], weights_b[row] = -logsigmoid(margin), margin, 1 / len(chosen)
    values_b = torch.stack(source) if source else shift_b
    margins_b = torch.stack(margins) if margins else shift_b
    metrics = {"dpo_accuracy": margins_b > 0, "dpo_margin": margins_b}
    return TokenLoss(
        values_b, weights=weights_b, metrics={name: Metric(m, Reduction.LOSS) for name, m in metrics.items()}
    )


def _pairs(inputs: LossInputs) -> list[tuple[list[int], list[int]]]:
    """The rows of the chosen and of the rejected sample of each prompt that has a pair."""
    rewards, counted = inputs["reward"].tolist(), (inputs.loss_mask != 0).any(-1).tolist()
    prompts: dict[object, dict[int, list[int]]] = {}
    for index, row in enumerate(inputs.row_ids):
        if counted[index]:
            prompts.setdefault(row.uid, {}).setdefault(row.sample_index, []).append(index)
    found = []
    for samples in prompts.values():
        by_number = [samples[number] for number in sorted(samples)]
        values = [rewards[rows[0]] for rows in by_number]
        if not equal_rewards(values):
            best, worst = (
                next(rows for rows, value in zip(by_number, values, strict=True) if equal_rewards((value, extreme)))
                for extreme in (max(values), min(values))
            )
            found.append((best, worst))
    return found
