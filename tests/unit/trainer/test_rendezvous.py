"""Trainer ranks meet at a socket that other machines do not reach."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from buffer_rl.trainer.peers import Rendezvous

RANK = """
import sys
from datetime import timedelta
from buffer_rl.records.groups import Topology
from buffer_rl.errors import BufferRestartedError, TrainError
from buffer_rl.trainer.peers import Peers, Rendezvous, summed_over_ranks

rank = int(sys.argv[1])
mine = Rendezvous()
place = mine.open("127.0.0.1")
if rank == 0:
    print(*place, flush=True)
address, port = input().split()
mine.join("gloo", address, int(port), rank=rank, world_size=2, timeout=timedelta(seconds=60))
print(summed_over_ranks([rank + 1.0, 0.1]), flush=True)
tensor_parallel = Peers(Topology(dp_rank=0, dp_size=1, is_head=rank == 0))
alone = Peers(Topology(dp_rank=rank, dp_size=2))
in_step = Peers(Topology(dp_rank=rank, dp_size=2, in_step=True))
lost = BufferRestartedError("train_0 was lost") if rank == 1 else None
for peers in (tensor_parallel, alone, in_step):
    peers.meet(None)
    try:
        peers.meet(lost)
        print("goes on", flush=True)
    except (BufferRestartedError, TrainError) as error:
        print(type(error).__name__, flush=True)
try:
    Peers(Topology(dp_rank=0, dp_size=1))
except TrainError as error:
    print(error.where, flush=True)
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
@pytest.mark.slow
def test_two_ranks_meet_on_the_loopback_interface_alone_and_leave_together() -> None:
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
        said = [[rank.stdout.readline().strip() for _ in range(5)] for rank in ranks if rank.stdout is not None]
        assert [lines[0] for lines in said] == ["[3.0, 0.2]"] * 2
        # The default backend's ranks, which meet in no forward pass, do not wait for one another.
        assert said[0][1:4] == ["TrainError", "goes on", "TrainError"]
        assert said[1][1:4] == ["BufferRestartedError"] * 3
        assert [lines[4] for lines in said] == ["topology of --train-backend"] * 2, "two heads in one replica"
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
