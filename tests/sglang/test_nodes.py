"""SGLang servers on the nodes of a cluster: three Ray nodes on this machine, with an address each."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from harness.nodes import Nodes

from .conftest import QUICKSTART, ROOT, TIMEOUT_S, command, metrics_of

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(TIMEOUT_S)]
HEAD, SECOND, THIRD = "127.0.0.2", "127.0.0.3", "127.0.0.4"


@pytest.mark.parametrize("mode", ["disk", "distributed"])
@pytest.mark.usefixtures("nothing_left", "warm")
def test_servers_run_on_their_nodes_and_agree_with_the_trainer(mode: str, sglang_python: str, tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "nodes")
    nodes.environment["PYTHONPATH"] += os.pathsep + str(ROOT / "plugins")
    with nodes:
        for address in (HEAD, SECOND, THIRD):
            nodes.add(address, cpus=1)
        flags = ["--config", str(QUICKSTART / "train.yaml"), "--run-dir", str(tmp_path / "run"), "--num-rollout", "4"]
        flags += ["--ray-address", nodes.address, "--num-train-ranks", "1", "--rollout-num-engines", "2"]
        flags += ["--rollout-engine", "sglang", "--sglang-python", sglang_python, "--engine-max-running-requests", "64"]
        flags += ["--weight-sync-mode", mode, "--skip-eval-before-train", "--progress", "plain"]
        run = command("train", *flags)
        ended = subprocess.run(
            run, env=nodes.environment, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        engines = [line.split()[-1] for line in ended.stdout.splitlines() if line.startswith("engine ")]
        assert [address for address in engines if address.startswith("127.")] == [SECOND, THIRD]
        assert nodes.processes("server_process") == []
    differences = metrics_of(tmp_path / "run", "train/train_rollout_logprob_abs_diff")
    assert len(differences) == 4
    assert max(differences) < 1e-4
