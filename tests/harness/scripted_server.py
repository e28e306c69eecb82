"""A SGLang server whose model is a function of the text, and a search server, for functions that post to them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(kw_only=True)
class ScriptedServer:
    """Answers ``/generate`` as SGLang does, with one token a character of what ``say(text so far)`` writes.

    A stop string ends it and stays in the text only under ``no_stop_trim``; the tokens keep it. Requests without
    ``key`` as bearer are refused. bodies: what was asked.
    """

    tokenizer: Any
    say: Callable[[str], str]
    key: str = ""
    version: int = 3
    bodies: list[dict[str, Any]] = field(default_factory=list)
    searches: list[str] = field(default_factory=list)
    url: str = ""
    search_url: str = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[ScriptedServer]:
        """Serve on free ports of 127.0.0.1 for the length of the block."""
        engine = [web.post("/generate", self._generate), web.get("/workers", self._workers)]
        async with served(engine) as self.url, served([web.post("/retrieve", self._retrieve)]) as address:
            self.search_url = f"{address}/retrieve"
            yield self

    async def _generate(self, request: web.Request) -> web.Response:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "no key"}, status=401)
        body = await request.json()
        self.bodies.append(body)
        given = body["text"] if "text" in body else self.tokenizer.decode(body["input_ids"])
        params = body["sampling_params"]
        said, reason = self.say(given), {"type": "stop"}
        ends = [(said.find(stop) + len(stop), stop) for stop in params.get("stop") or [] if stop in said]
        end, stop = min(ends, default=(len(said), ""))
        ids = self.tokenizer.encode(said[:end], add_special_tokens=False)
        if len(ids) > params["max_new_tokens"]:
            ids, reason, stop = ids[: params["max_new_tokens"]], {"type": "length"}, ""
        text = self.tokenizer.decode(ids)
        meta = {
            "finish_reason": reason,
            "weight_version": str(self.version),
            "weight_versions": [{"version": str(self.version), "start": 0, "end": len(ids)}],
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "prompt_tokens": len(given),
            "cached_tokens": 0,
        }
        trimmed = text if params.get("no_stop_trim") or not stop else text.removesuffix(stop)
        return web.json_response({"text": trimmed, "output_ids": ids, "meta_info": meta})

    async def _retrieve(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert "Authorization" not in request.headers, "the engines' key went to another server"
        self.searches += body["queries"]
        found = [[{"document": {"contents": f"Title\nthe answer is {len(q)}"}}] for q in body["queries"]]
        return web.json_response({"result": found})

    async def _workers(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": []})


@asynccontextmanager
async def served(routes: list[web.RouteDef]) -> AsyncIterator[str]:
    """Serve the routes on a free port of 127.0.0.1; yields the address."""
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
