"""A checkout of slime, and rollouts of its functions on this library with a scripted server in an engine's place."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.engines.client import GenerateResult
from buffer_rl.options.section import compose
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import GroupUid, Sample, SampleGroup, Ticket, VersionSpan
from buffer_rl.rollout.context import RolloutContext
from buffer_rl.rollout.default import DefaultRollout
from buffer_rl.rollout.user_rollout import run_user_rollout
from buffer_rl.testing.fake_buffer import FakeBuffer
from buffer_rl.testing.tiny import make_char_tokenizer
from harness.fake_client import client_of
from harness.scripted_server import ScriptedServer

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
KEY = "key"


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """A checkout of slime. folder: of the tokenizer that examples load."""

    path: Path
    folder: str

    def ref(self, file: str, name: str) -> str:
        return f"{self.path / file}:{name}"

    @property
    def commit(self) -> str:
        asked = subprocess.run(["git", "-C", self.path, "rev-parse", "HEAD"], capture_output=True, text=True)
        return asked.stdout.strip()[:9] or "unknown commit"


class Engine:
    """The client of an engine that writes what the script says, for slime's ``generate`` inside a lease."""

    def __init__(self, server: ScriptedServer) -> None:
        self.server = server

    async def agenerate(self, rid: str, input_ids: list[int], params: dict[str, Any], **more: Any) -> GenerateResult:
        ids = self.server.tokenizer.encode(self.server.say(self.server.tokenizer.decode(input_ids)))
        return GenerateResult(
            output_ids=ids,
            text=self.server.tokenizer.decode(ids),
            log_probs=[-0.5] * len(ids),
            finish_reason="stop",
            spans=[VersionSpan(3, 0, len(ids))],
        )

    async def abort(self, rids: Any = None) -> None:
        return None


@asynccontextmanager
async def trial(checkout: Checkout, say: Callable[[str], str], groups: list[SampleGroup], **options: Any) -> Any:
    """A rollout: the function that runs it, its server, buffer and options."""
    evaluation, wanted, name = (
        options.pop(key, value) for key, value in (("evaluation", False), ("wanted", 1), ("name", None))
    )
    tokenizer = make_char_tokenizer()
    tokenizer.chat_template = TEMPLATE
    async with ScriptedServer(tokenizer=tokenizer, say=say, key=KEY).serving() as server:
        defaults = {
            "rollout_batch_size": wanted,
            "n_samples_per_prompt": len(groups[0]),
            "rollout_max_context_len": 4096,
        }
        own = {"hf_checkpoint": checkout.folder, "router_url": server.url, "engine_api_key": KEY}
        args = compose(CORE_SECTIONS)(**{**defaults, **own, **options})
        ticket = Ticket(
            rollout_id=3, evaluation=evaluation, num_groups=wanted, version=3, incarnation="i", max_staleness=0
        )
        buffer, registry, engine = FakeBuffer(groups, ticket), PluginRegistry.from_flags(["slime"]), Engine(server)
        context = RolloutContext.build(args, registry=registry, engine=engine, tokenizer=tokenizer)  # type: ignore[arg-type]
        function: Any = name if callable(name) else registry.resolve("rollout", name) if name else DefaultRollout(args)

        async def run() -> Any:
            with context.active():
                output = await run_user_rollout(function, args, client_of(buffer, context), where="the example")
                for group in output.groups:
                    buffer.finish(group)
                return output

        try:
            yield run, server, buffer, args
        finally:
            await context.aclose()


def groups_of(prompt: Any, label: Any, count: int = 4, samples: int = 2, **metadata: Any) -> list[SampleGroup]:
    made = []
    for row in range(count):
        uid = GroupUid("source", row, 0)
        own = [
            Sample(
                uid=uid,
                sample_index=i,
                group_index=row,
                index=samples * row + i,
                prompt=prompt,
                label=label,
                metadata=dict(metadata),
            )
            for i in range(samples)
        ]
        made.append(SampleGroup(uid=uid, samples=own, attempt=1, incarnation="i"))
    return made


def expect(found: Any, wanted: Any) -> None:
    if found != wanted:
        raise AssertionError(f"found {found!r:.300}, expected {wanted!r:.300}")
