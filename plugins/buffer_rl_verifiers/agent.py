"""``--agent-path verifiers``: the programs that play episodes, which each rollout worker starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from buffer_rl.agents.command import max_processes
from buffer_rl.agents.programs import Program
from buffer_rl.agents.remote import Remote
from buffer_rl_verifiers.options import command, environ

if TYPE_CHECKING:
    from buffer_rl_verifiers.options import VerifiersArgs


class Episodes(Remote):
    """An agent whose samples are episodes of the tasksets that the rows name."""

    def programs(self, args: VerifiersArgs) -> list[Program]:
        """``--verifiers-programs`` of them."""
        number = args.verifiers_programs
        at_once = args.verifiers_episodes or max(1, max_processes(args) // number)
        words = [*command(args), "episodes", "--at-once", str(at_once), "--reward-key", args.reward_key or ""]
        return [Program(option="--verifiers-python", words=words, environ=environ(args))] * number


episodes = Episodes()
