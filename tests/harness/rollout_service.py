"""The rollout service as a process that can be killed and started again, at the same address."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from buffer_rl.cluster.process import base_url, reserved_port
from harness.processes import holds_within

TOKEN = "the-token-of-the-tests-of-the-service"
START_S = 60.0


class ServiceProcess:
    """A service in ``folder`` on a free port. flags: of its command line, with underscores."""

    def __init__(self, folder: Path, **flags: Any) -> None:
        self._port = reserved_port("127.0.0.1")
        port = self._port.getsockname()[1]
        self.url = base_url("127.0.0.1", port)
        given = {"dir": folder, "port": port, **flags}
        words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        self._command = [sys.executable, "-m", "buffer_rl_rollout_service", *words]
        self._log = folder.with_name("service.log")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServiceProcess:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._port.close()

    def start(self) -> None:
        """Returns when the service answers."""
        environment = {**os.environ, "BUFFER_RL_ROLLOUT_SERVICE_TOKEN": TOKEN}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)
        assert holds_within(START_S, self._answers), self._log.read_text()

    def kill(self) -> None:
        """SIGKILL, in whatever it does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(START_S)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False
