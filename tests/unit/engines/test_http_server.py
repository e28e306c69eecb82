"""What the project's HTTP servers bear of clients: sizes, deadlines, idle connections, and who has no key."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from buffer_rl.data.json_text import MAX_DEPTH, JSONError, read_json
from buffer_rl.engines import http_server
from buffer_rl.engines.http_server import Front
from harness.asgi import serving_app

LIMIT_S = 30
HEAD = b"POST /size HTTP/1.1\r\nHost: x\r\nKey: right\r\n"


class Sizes:
    """An application that answers with the size of each body; ``/wait`` once ``let_go`` is set."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.let_go = asyncio.Event()
        self.front = Front(self, refusal=refuse, max_body_bytes=1000, allows=has_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
            return
        self.num_calls += 1
        message = await receive()
        assert not message["more_body"]
        if scope["path"] == "/wait":
            await self.let_go.wait()
        await JSONResponse({"size": len(message["body"])})(scope, receive, send)


def refuse(scope: Scope, status: int, what: str) -> JSONResponse:
    return JSONResponse({"what": what, "path": scope["path"]}, status)


def has_key(scope: Scope) -> bool:
    return (b"key", b"right") in scope["headers"]


class Client:
    """A connection whose bytes a test chooses."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, url: str) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2])))

    async def ask(self, sent: bytes) -> tuple[int, Any]:
        """Status and body of the answer to ``sent``."""
        self.writer.write(sent)
        async with asyncio.timeout(LIMIT_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            size = next(int(line[15:]) for line in head.lower().splitlines() if line.startswith(b"content-length:"))
            body = await self.reader.readexactly(size)
        return int(head[9:12]), json.loads(body) if body else None

    async def closed(self) -> bool:
        """Waits for the end of the connection, which comes without another byte."""
        async with asyncio.timeout(LIMIT_S):
            try:
                return await self.reader.read() == b""
            except ConnectionResetError:
                return True


async def test_a_body_reaches_the_application_whole_and_one_beyond_the_bound_does_not() -> None:
    app = Sizes()
    async with serving_app(app.front) as url:
        client = await Client.open(url)
        for size in (0, 1, 1000):  # over one connection
            assert await client.ask(HEAD + b"Content-Length: %d\r\n\r\n" % size + b"x" * size) == (200, {"size": size})
        chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1f4\r\n" + b"x" * 500 + b"\r\n"
        assert await client.ask(chunked + b"1f4\r\n" + b"x" * 500 + b"\r\n0\r\n\r\n") == (200, {"size": 1000})
        assert app.num_calls == 4
        status, answer = await client.ask(HEAD + b"Content-Length: 1001\r\n\r\n" + b"x" * 1001)
        assert (status, answer["what"]) == (413, "the body is larger than 1000 bytes")
        assert await client.closed()
        other = await Client.open(url)
        assert (await other.ask(chunked + (b"1f4\r\n" + b"x" * 500 + b"\r\n") * 2 + b"0\r\n\r\n"))[0] == 413
        assert await other.closed()
        assert app.num_calls == 4


async def test_who_has_no_key_is_refused_before_the_body_comes_and_gets_to_read_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "LINGER_S", 0.2)
    app = Sizes()
    async with serving_app(app.front) as url:
        client = await Client.open(url)
        head = b"POST /size HTTP/1.1\r\nHost: x\r\nKey: wrong\r\nContent-Length: 900\r\n\r\n"
        assert await client.ask(head) == (401, {"what": "the key is missing or wrong", "path": "/size"})
        assert await client.closed()
        assert app.num_calls == 0


async def test_a_body_that_does_not_come_in_time_is_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "BODY_TIMEOUT_S", 0.1)
    monkeypatch.setattr(http_server, "LINGER_S", 0.1)
    app = Sizes()
    async with serving_app(app.front) as url:
        client = await Client.open(url)
        assert (await client.ask(HEAD + b"Content-Length: 900\r\n\r\nx"))[0] == 408
        assert await client.closed()
        assert app.num_calls == 0


async def test_headers_have_a_deadline_that_a_byte_now_and_then_does_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEADER_TIMEOUT_S", 0.3)
    app = Sizes()
    async with serving_app(app.front) as url:
        silent, slow, kept = [await Client.open(url) for _ in range(3)]

        async def drip() -> None:
            for byte in HEAD * 100:
                slow.writer.write(bytes([byte]))
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        assert (await kept.ask(HEAD + b"Content-Length: 1\r\n\r\nx"))[0] == 200
        kept.writer.write(HEAD[:9])
        assert [(await client.ask(b""))[0] for client in (slow, kept)] == [408, 408]
        assert await silent.closed()
        dripping.cancel()


async def test_a_request_under_way_outlives_the_deadline_of_headers_and_the_bound_on_idle_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "HEADER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(http_server, "MAX_IDLE_CONNECTIONS", 2)
    app = Sizes()
    async with serving_app(app.front) as url:
        busy = await Client.open(url)
        answer = asyncio.create_task(busy.ask(HEAD.replace(b"size", b"wait") + b"Content-Length: 1\r\n\r\nx"))
        first, *later = [await Client.open(url) for _ in range(3)]
        assert await first.closed()  # the third came
        assert all([await client.closed() for client in later])  # their time is out
        app.let_go.set()
        assert await answer == (200, {"size": 1})


async def test_the_connection_that_is_idle_longest_makes_room_for_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_IDLE_CONNECTIONS", 3)
    app = Sizes()
    async with serving_app(app.front) as url:
        clients = [await Client.open(url) for _ in range(3)]
        request = HEAD + b"Content-Length: 1\r\n\r\nx"
        assert (await clients[0].ask(request))[0] == 200  # idle again, and later than the others
        newest = await Client.open(url)
        assert await clients[1].closed()
        for client in (clients[0], clients[2], newest):
            assert (await client.ask(request))[0] == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nkey: " + b"x" * 200_000,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 30_000,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n" + b"trailer: x\r\n" * 30_000,
    ],
    ids=["one", "many", "trailers"],
)
async def test_headers_beyond_their_bound_are_431_before_they_end(sent: bytes) -> None:
    async with serving_app(Sizes().front) as url:
        client = await Client.open(url)
        client.writer.write(sent)
        async with asyncio.timeout(LIMIT_S):
            try:
                answer = await client.reader.read()
            except ConnectionResetError:
                answer = b""
        assert answer in (
            b"",
            b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n",
        )


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_json_of_more_levels_than_any_use_is_refused(opening: str) -> None:
    def nested(levels: int) -> str:
        return opening * levels + "1" + {"[": "]", '{"a":': "}"}[opening] * levels

    assert read_json(nested(MAX_DEPTH)) == json.loads(nested(MAX_DEPTH))
    wide = "[" + ",".join([nested(MAX_DEPTH - 1)] * 3) + "]"
    assert read_json(wide.encode()) == json.loads(wide)
    for levels in (MAX_DEPTH + 1, 1000, 100_000):
        with pytest.raises(JSONError):
            read_json(nested(levels).encode())
