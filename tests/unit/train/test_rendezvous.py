"""Trainer ranks meet at a socket that other machines do not reach."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from buffer_rl.train.group import Rendezvous

RANK = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from buffer_rl.train.group import Rendezvous

rank = int(sys.argv[1])
mine = Rendezvous()
place = mine.open("127.0.0.1")
if rank == 0:
    print(*place, flush=True)
address, port = input().split()
mine.join("gloo", address, int(port), rank=rank, world_size=2, timeout=timedelta(seconds=60))
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
print(int(total), flush=True)
input()
"""


def listeners(pid: int) -> list[str]:
    sockets = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [
        line.split()
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
    ]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc")
def test_two_ranks_meet_and_listen_on_the_loopback_interface_alone() -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        assert ranks[0].stdout is not None
        place = ranks[0].stdout.readline()
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write(place)
            rank.stdin.flush()
        assert [rank.stdout.readline() for rank in ranks if rank.stdout is not None] == ["3\n", "3\n"]
        found = [address for rank in ranks for address in listeners(rank.pid)]
        assert found
        assert set(found) == {"0100007F"}
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_the_port_is_taken_before_it_is_told() -> None:
    mine = Rendezvous()
    place = mine.open("127.0.0.1")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(place)
