"""Rollouts in virtual time, under the name that tests import: ``buffer_rl.testing.virtual_rollouts``."""

from buffer_rl.testing.virtual_rollouts import VirtualEngines, VirtualRollouts, VirtualSelections, lognormal

__all__ = ["VirtualEngines", "VirtualRollouts", "VirtualSelections", "lognormal"]
