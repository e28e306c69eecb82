"""Options of advantage estimators."""

from __future__ import annotations

from typing import ClassVar

from buffer_rl.options.section import Section, option


class AlgorithmOptions(Section):
    """Parameters of advantage estimators."""

    heading: ClassVar[str] = "Advantages"

    gamma: float = option(1.0, "discount of later token rewards (reinforce_plus_plus, gae)", gt=0, le=1)
    lambd: float = option(1.0, "lambda of generalised advantage estimation (gae)", ge=0, le=1)
    kl_coef: float = option(
        0.0,
        "subtract this times the log-ratio to the reference from token rewards (reinforce_plus_plus, remax, gae)",
        ge=0,
    )
    turn_rewards: bool = option(
        False,
        "token rewards at the end of each answer of an agent, as it or its environment gives them, in place of one at "
        "the end of the response (reinforce_plus_plus, gae, ppo)",
    )
    pass_at_k: int = option(4, "number of samples of which the best counts: k of pass@k (pass_at_k)", ge=1)
    use_opd: bool = option(False, "on-policy distillation: subtract the log-ratio to a teacher from token advantages")
    opd_kl_coef: float = option(1.0, "weight of the log-ratio of --use-opd", ge=0)
    normalize_advantages: bool = option(
        False, "normalise advantages to mean 0 and standard deviation 1 over the unmasked tokens of a rollout"
    )
