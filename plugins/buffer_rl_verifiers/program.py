"""Rows and episodes of verifiers. Run by its path, in an environment that has verifiers and not buffer_rl.

    program.py rows TASKSET FILE [--limit N]   writes the tasks of a taskset as JSON lines
    program.py episodes [--at-once N]          leases samples, and plays for each the episode of its row

``BUFFER_RL_VERIFIERS_ARGS`` has the ``[env]`` block of verifiers as JSON, but for the taskset's id;
``BUFFER_RL_LEASE_URL``, ``BUFFER_RL_LEASE_API_KEY`` and ``BUFFER_RL_REMOTE_CLIENT``: see ``buffer_rl.agents.programs``.

An episode asks its sample's session, whose tokens are trained. verifiers keeps an HTTP client for each endpoint that it
has seen, so episodes share a few: each has a lane of ``Relay``, at the same address for one episode after another.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.generic import concrete_type
from verifiers.v1.utils.loaders import default_harness_id, environment_class, harness_class

NAME = "verifiers"
"""Of the entry of a row's metadata that names its taskset and has its task."""
CONTEXT = {"x-buffer-rl-train": "false"}
"""The header of requests whose answers are not trained."""
NO_KEY = "BUFFER_RL_NO_KEY"
"""A variable that is not set: the relay has the keys of the sessions."""
LOOK_S = 0.2
ANSWER_S = 10.0
"""In which the event loop does something once an episode is cancelled; else it is blocked, and the program ends."""
BLOCKED = 70
"""Exit status of a program whose event loop an episode blocks."""
MAX_BODY_BYTES = 64 << 20
OWN_HEADERS = frozenset({"authorization", "host", "content-length", "transfer-encoding", "connection", "x-api-key"})


class EpisodeError(Exception):
    """An episode that gave no reward."""


def environment(taskset: str, given: Mapping[str, Any]) -> vf.Env[Any]:
    """The environment of a taskset. given: the ``[env]`` block.

    A role without a harness has the taskset's own, or the ``null`` harness, which gives the model no shell. One whose
    harness runs no code that the model writes, and that has no runtime, runs on this machine."""
    block = {**given, "taskset": {**given.get("taskset", {}), "id": taskset}}
    env_class = environment_class(taskset, block.get("id", ""))
    config_class: Any = concrete_type(env_class, vf.EnvConfig, origin=vf.Env) or vf.EnvConfig
    for role, entry in config_class.model_fields.items():
        if isinstance(entry.default, vf.AgentConfig):
            block[role] = _local(taskset, entry.default, block.get(role) or {})
    env: vf.Env[Any] = env_class(config_class.model_validate(block))
    return env


def _local(taskset: str, default: vf.AgentConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(given)
    own = default.harness.id if default.harness is not None else default_harness_id(taskset)
    if "harness" not in found and default.harness is None:
        found["harness"] = {"id": "null" if own == "bash" else own}
    name = (found.get("harness") or {}).get("id") or own
    if "runtime" not in {*found, *default.model_fields_set} and not harness_class(name).EXECUTES_CODE:
        found["runtime"] = {"type": "subprocess"}
    return found


def write_rows(taskset: str, file: str, given: Mapping[str, Any], limit: int | None) -> None:
    """Write a row a task: its prompt as text, and the task itself in the metadata."""
    tasks = environment(taskset, given).taskset
    if limit is not None:
        tasks = tasks.take(limit)
    if not tasks.bounded:
        raise SystemExit(f"the taskset {taskset} is infinite: take a part of it, verifiers://{taskset}@[0:1000]")
    if excluded := [name for name, entry in tasks.task_type().data_type().model_fields.items() if entry.exclude]:
        raise SystemExit(f"tasks of {taskset} cannot be written: {', '.join(excluded)} are excluded from JSON")
    with open(file, "w", encoding="utf-8") as lines:
        for task in tasks:
            prompt = task.data.prompt_text or task.data.description or task.data.name or f"task {task.data.idx}"
            own = {"taskset": taskset, "task": task.data.model_dump(mode="json")}
            lines.write(json.dumps({"prompt": prompt, "metadata": {NAME: own}}) + "\n")


@dataclass(slots=True)
class Lane:
    """A place for one episode at a time. base_url, api_key: of the session that it has now; empty between episodes."""

    number: int
    base_url: str = ""
    api_key: str = ""


class Relay:
    """An endpoint on the loopback interface for each lane, which passes requests on to the lane's session."""

    def __init__(self, at_once: int) -> None:
        self.lanes = [Lane(number) for number in range(at_once)]
        self._secret = secrets.token_urlsafe(16)
        self._url = ""
        self._client: Any = None

    async def __aenter__(self) -> Relay:
        self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False)
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", f"/{self._secret}/{{lane:\\d+}}/v1/{{path:.*}}", self._pass)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/{self._secret}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._client.close()

    def endpoint(self, lane: Lane) -> Any:
        """A lane's endpoint, as verifiers takes it."""
        return vf.EvalClientConfig(base_url=f"{self._url}/{lane.number}/v1", api_key_var=NO_KEY)

    def is_of(self, client: Any) -> bool:
        """Whether an endpoint is one of a lane."""
        return str(client.base_url).startswith(self._url)

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        lane = self.lanes[int(request.match_info["lane"])]
        if not lane.base_url:
            error = {"message": "the session has ended", "code": "session_ended"}
            return web.json_response({"error": error}, status=410)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in OWN_HEADERS}
        headers["Authorization"] = f"Bearer {lane.api_key}"
        url, body = f"{lane.base_url}/{request.match_info['path']}", await request.read()
        try:
            async with self._client.request(request.method, url, data=body or None, headers=headers) as answer:
                response = web.StreamResponse(status=answer.status)
                for name, value in answer.headers.items():
                    if name.lower() not in OWN_HEADERS:
                        response.headers[name] = value
                await response.prepare(request)
                async for block in answer.content.iter_any():
                    await response.write(block)
                await response.write_eof()
                return response
        except aiohttp.ClientConnectionError as error:
            return web.json_response({"error": {"message": f"the run is not reached: {error}"}}, status=503)


class Player:
    """Plays episodes. Belongs to the event loop of the program; ``serve`` holds the environments open."""

    def __init__(self, given: Mapping[str, Any], relay: Relay, reward_key: str) -> None:
        self._given, self._relay, self._reward_key = given, relay, reward_key
        self._envs: dict[str, asyncio.Future[vf.Env[Any]]] = {}
        self._asked: asyncio.Queue[str] = asyncio.Queue()

    async def serve(self) -> None:
        """Open each environment that is asked for, until this is cancelled. Their servers are entered and left here:
        a cancel scope belongs to one task."""
        async with AsyncExitStack() as opened:
            while True:
                taskset = await self._asked.get()
                try:
                    env = environment(taskset, self._given)
                    _note_standing(env, self._relay)
                    await opened.enter_async_context(env.serving())
                except Exception as error:  # fault boundary: a taskset's own code
                    self._envs.pop(taskset).set_exception(error)
                else:
                    self._envs[taskset].set_result(env)

    async def play(self, lane: Lane, sample: Mapping[str, Any]) -> float | dict[str, float]:
        """The reward of an episode. Raises EpisodeError if it has none."""
        row = (sample.get("metadata") or {}).get(NAME)
        if not row:
            raise EpisodeError("the row is of no taskset: --prompt-data verifiers://TASKSET")
        env = await self._env(row["taskset"])
        task_class: Any = type(env.taskset).task_type()
        task = task_class(task_class.data_type().model_validate(row["task"]), env.config.taskset.task)
        (slot,) = env.slots(task)
        episode = await env.run_slot(slot, vf.ModelContext(model="policy", client=self._relay.endpoint(lane)))
        return reward_of(episode, self._reward_key)

    async def _env(self, taskset: str) -> vf.Env[Any]:
        if taskset not in self._envs:
            self._envs[taskset] = asyncio.get_running_loop().create_future()
            self._asked.put_nowait(taskset)
        return await asyncio.shield(self._envs[taskset])


def _note_standing(env: Any, relay: Relay) -> None:
    """Have requests of agents that the environment does not train say so."""
    setup = env.setup

    async def with_standing(agents: Any) -> None:
        await setup(agents)
        for name in agent_config_fields(env.config):
            agent = getattr(agents, name)
            if not agent.trainable and relay.is_of(agent.ctx.client):
                agent.ctx = replace(agent.ctx, client=agent.ctx.client.model_copy(update={"headers": CONTEXT}))

    env.setup = with_standing


def reward_of(episode: Any, reward_key: str) -> float | dict[str, float]:
    """The mean reward of the traces that are trained; with a key, a mapping of it, and of the means of their rewards
    and metrics by name. Raises EpisodeError, with what went wrong, for an episode that is not valid."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        shown = "; ".join(f"{error.type}: {error.message}" for error in errors)
        raise EpisodeError(shown[-2000:] or "an episode without an error is not valid")
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if not traces:
        raise EpisodeError("none of its agents is trained")
    reward = sum(trace.reward for trace in traces) / len(traces)
    if not reward_key:
        return float(reward)
    named: dict[str, list[float]] = {}
    for trace in traces:
        scores = {name: each.score for name, each in trace.rewards.items() if each is not None}
        for name, value in {**trace.metrics, **scores}.items():
            if value is not None:
                named.setdefault(name, []).append(float(value))
    return {name: sum(values) / len(values) for name, values in named.items()} | {reward_key: float(reward)}


async def _contained(work: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:  # of a taskset's own code; it would end the loop
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def lease_episodes(leases: Any, player: Player, lane: Lane, loop: asyncio.AbstractEventLoop) -> None:
    """Play one episode after another in a lane. Runs in a thread of its own, until the run ends."""
    for episode in leases:
        with episode:
            lane.base_url, lane.api_key = episode.base_url, episode.api_key
            done = threading.Event()
            playing = asyncio.run_coroutine_threadsafe(player.play(lane, episode.sample), loop)
            playing.add_done_callback(lambda _, done=done: done.set())  # type: ignore[misc]
            while not done.wait(LOOK_S) and not episode.ended.is_set():
                pass
            lane.base_url = ""
            if done.is_set():
                episode.finish(playing.result())
            else:
                _cancel(playing, loop)
                episode.fail("its session has ended")


def _cancel(playing: Any, loop: asyncio.AbstractEventLoop) -> None:
    playing.cancel()
    answered = threading.Event()
    loop.call_soon_threadsafe(answered.set)
    if not answered.wait(ANSWER_S):
        print("an episode blocks the event loop: the program ends", file=sys.stderr, flush=True)
        os._exit(BLOCKED)


async def play_episodes(given: Mapping[str, Any], at_once: int, reward_key: str, leases: Callable[[], Any]) -> None:
    """Play episodes, ``at_once`` at a time, until the run ends or SIGTERM."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.set_task_factory(lambda loop, work, **options: asyncio.Task(_contained(work), loop=loop, **options))
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    async with Relay(at_once) as relay:
        player = Player(given, relay, reward_key)
        serving = loop.create_task(player.serve())
        lanes = [partial(lease_episodes, leases(), player, lane, loop) for lane in relay.lanes]
        running = loop.create_task(_all_of(lanes))
        waits = {serving, running, loop.create_task(ended.wait())}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


async def _all_of(work: Sequence[Callable[[], None]]) -> None:
    """Return once each function has returned, in a daemon thread of its own."""
    loop = asyncio.get_running_loop()
    ends = [loop.create_future() for _ in work]

    def run(function: Callable[[], None], end: asyncio.Future[None]) -> None:
        try:
            function()
        finally:
            loop.call_soon_threadsafe(end.set_result, None)

    for function, end in zip(work, ends, strict=True):
        threading.Thread(target=run, args=(function, end), daemon=True).start()
    await asyncio.gather(*ends)


def _client() -> Any:
    """The module ``remote_client`` of the run."""
    spec = importlib.util.spec_from_file_location("buffer_rl_remote_client", os.environ["BUFFER_RL_REMOTE_CLIENT"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="program.py")
    verbs = parser.add_subparsers(dest="verb", required=True)
    rows = verbs.add_parser("rows")
    rows.add_argument("taskset")
    rows.add_argument("file")
    rows.add_argument("--limit", type=int)
    episodes = verbs.add_parser("episodes")
    episodes.add_argument("--at-once", type=int, default=1)
    episodes.add_argument("--reward-key", default="")
    given = parser.parse_args(argv)
    block = json.loads(os.environ.pop("BUFFER_RL_VERIFIERS_ARGS", "{}"))
    # The programs that harnesses start are made with uv, which is beside this Python.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if given.verb == "rows":
        write_rows(given.taskset, given.file, block, given.limit)
        return 0
    client, url, key = _client(), os.environ.pop("BUFFER_RL_LEASE_URL"), os.environ.pop("BUFFER_RL_LEASE_API_KEY", "")
    asyncio.run(play_episodes(block, given.at_once, given.reward_key, lambda: client.leases(url, key)))
    os._exit(0)  # threads that wait for a lease are let go


if __name__ == "__main__":
    sys.exit(main())
