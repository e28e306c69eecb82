"""Fifty writers and two readers, and a service that is killed among them: every trajectory is accounted for."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from buffer_rl.cluster.process import reserved_port
from buffer_rl_rollout_service.client import ServiceClient
from harness.rollout_service import TOKEN, ServiceProcess

WRITERS, PROBLEMS, GROUP_SIZE, KILLS = 50, 75, 4, 3
MISSING = range(0, PROBLEMS, 5)  # problems of which one trajectory is never written
LIMIT_S = 120.0


def planned() -> list[tuple[str, str]]:
    return [(f"p{p}", f"u{p}-{m}") for m in range(GROUP_SIZE) for p in range(PROBLEMS) if m or p not in MISSING]


async def write_all(
    url: str, share: list[tuple[str, str]], written: list[tuple[str, str]], progress: asyncio.Event
) -> None:
    """One writer: what the service answered is in ``written``. Every fifth is written twice."""
    async with ServiceClient(url, TOKEN) as service:
        for instance_id, uid in share:
            messages = [{"role": "user", "content": instance_id}, {"role": "assistant", "content": uid}]
            item = {"instance_id": instance_id, "uid": uid, "reward": len(written) % 2, "messages": messages}
            for _ in range(1 + (len(written) % 5 == 0)):
                assert (await service.write(item, timeout_s=LIMIT_S))["success"]
            written.append((instance_id, uid))
            progress.set()


async def read_all(url: str, reader: str, got: list[tuple[str, str]], done: asyncio.Event) -> None:
    """One reader, which takes what is ready until the writers are done and nothing is left."""
    async with ServiceClient(url, TOKEN) as service:
        position = 0
        while True:
            answer = await service.read(reader, 3, position=position, keep_from=position, timeout_s=1.0)
            groups = answer["groups"]
            await service.acknowledge(reader, delivered=[group["group"] for group in groups], timeout_s=LIMIT_S)
            got += [(group["instance_id"], item["uid"]) for group in groups for item in group["items"]]
            position += 1
            left = (await service.statistics(timeout_s=LIMIT_S))["groups"]
            if done.is_set() and not groups and not left["open"] and not left["ready"]:
                return


@pytest.mark.slow
async def test_fifty_writers_and_a_service_that_is_killed_lose_and_double_nothing(tmp_path: Path) -> None:
    plan, written, got = planned(), [], []
    done, progress = asyncio.Event(), asyncio.Event()
    flags = {"group_size": GROUP_SIZE, "min_group_size": GROUP_SIZE - 1, "group_timeout_s": 8.0, "capacity": PROBLEMS}
    with ServiceProcess(tmp_path / "store", **flags) as process:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            readers = [tasks.create_task(read_all(process.url, f"run{n}", got, done)) for n in range(2)]
            shares = [plan[n::WRITERS] for n in range(WRITERS)]
            writers = [tasks.create_task(write_all(process.url, share, written, progress)) for share in shares]
            for number in range(1, KILLS + 1):
                while len(written) < len(plan) * number // (KILLS + 1):
                    progress.clear()
                    await progress.wait()
                process.kill()
                await asyncio.to_thread(process.start)
            await asyncio.gather(*writers)
            done.set()
            await asyncio.gather(*readers)
        async with ServiceClient(process.url, TOKEN) as service:
            statistics = await service.statistics(timeout_s=LIMIT_S)
    assert sorted(written) == sorted(plan)
    assert Counter(got) == Counter(plan)  # each exactly once
    numbers = statistics["trajectories"]
    assert numbers == {"written": len(plan), "open": 0, "ready": 0, "leased": 0, "delivered": len(plan), "dropped": 0}
    assert statistics["partial_groups"] >= len(MISSING)


def test_the_commands_of_the_page_work(tmp_path: Path) -> None:
    """Those that start the service and write to it, on a free port."""
    page = (Path(__file__).parents[3] / "plugins" / "buffer_rl_rollout_service" / "README.md").read_text(
        encoding="utf-8"
    )
    with reserved_port("127.0.0.1") as held:
        port = str(held.getsockname()[1])
        blocks = re.findall(r"^```(python)?\n(.*?)^```$", page.replace("8889", port), flags=re.DOTALL | re.MULTILINE)
        start, curl = (next(text for _, text in blocks if text.startswith(word)) for word in ("python -m", "curl"))
        write = next(text for language, text in blocks if language == "python")
        environment = {name: value for name, value in os.environ.items() if "ROLLOUT_SERVICE" not in name}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"

        def run(*command: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)

        with subprocess.Popen(shlex.split(start), cwd=tmp_path, env=environment, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                assert f"rollout service on http://127.0.0.1:{port}," in process.stdout.readline().decode()
                assert (tmp_path / "store" / "token").stat().st_mode & 0o777 == 0o600
                written = run(sys.executable, "-c", f"{write}\nprint(answer)")
                assert "'size': 1" in written.stdout, written.stderr
                written = run("bash", "-c", curl)
                assert json.loads(written.stdout)["size"] == 2, written.stderr
                again = run(*shlex.split(start))
                assert again.returncode == 1
                assert (
                    "error: store/trajectories.sqlite: the store cannot be opened: database is locked" in again.stderr
                )
            finally:
                process.terminate()
    assert process.returncode == 0
