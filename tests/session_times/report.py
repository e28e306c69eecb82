"""Where the time of a test session goes: starts of processes, imports, work, waiting.

    python tests/session_times/report.py tests/integration -k storage

runs pytest with these arguments. Every Python process that the session starts notes the processor time of its start and
of its imports; that of all processes is sampled from outside, since killed ones never report. What the cores did not
work is waiting. Linux only.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
POLL_S = 0.2
TICKS = os.sysconf("SC_CLK_TCK")
_ROLES = (
    (r"-m pytest\b", "pytest"),
    (r"ray::(\w+)", r"\1"),
    (r"fork_server serve", "fork server"),
    (r"setup_worker|fork_server\.py", "ray worker, starting"),
    (r"embedded\.server", "embedded engine"),
    (r"sglang_router|router_process", "router"),
    (r"reward_process", "reward process"),
    (r"default_worker", "ray worker, idle"),
    (r"raylet|gcs_server|ray/", "ray daemons"),
    (r"buffer_rl\.cli|buffer-rl|-c ", "command lines and drivers"),
)


@dataclass(slots=True)
class Seen:
    """A process as it was last seen: its command line, processor seconds, and own start and import seconds."""

    command: str = ""
    cpu_s: float = 0.0
    start_s: float = 0.0
    import_s: float = 0.0

    @property
    def role(self) -> str:
        """What the process is for, read off its command line."""
        for pattern, name in _ROLES:
            if found := re.search(pattern, self.command):
                return found.expand(name)
        return "others"


def sample(root: int, seen: dict[int, Seen]) -> None:
    """Update ``seen`` with the processes that descend from ``root``, itself included."""
    table = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parts = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it ended meanwhile
            continue
        table[int(stat.parent.name)] = (int(parts[1]), (int(parts[11]) + int(parts[12])) / TICKS, command)
    for pid, (_, cpu_s, command) in table.items():
        if pid in seen or _descends(pid, root, table):
            one = seen.setdefault(pid, Seen())
            one.cpu_s, one.command = max(cpu_s, one.cpu_s), command or one.command


def _descends(pid: int, root: int, table: dict[int, tuple[int, float, str]]) -> bool:
    while pid in table:
        if pid == root:
            return True
        pid = table[pid][0]
    return False


def print_report(seen: dict[int, Seen], wall_s: float) -> None:
    """Two tables: processes by role, and the whole session."""
    rows: defaultdict[str, list[Seen]] = defaultdict(list)
    for one in seen.values():
        rows[one.role].append(one)
    print(f"\n{'role':28}{'processes':>10}{'start s':>10}{'import s':>10}{'other CPU s':>13}")
    totals: Counter[str] = Counter()
    for role, members in sorted(rows.items(), key=lambda item: -sum(one.cpu_s for one in item[1])):
        start, imports = sum(one.start_s for one in members), sum(one.import_s for one in members)
        work = max(0.0, sum(one.cpu_s for one in members) - start - imports)
        totals.update(start=start, imports=imports, work=work, cpu=sum(one.cpu_s for one in members))  # type: ignore[call-overload]
        print(f"{role:28}{len(members):>10}{start:>10.1f}{imports:>10.1f}{work:>13.1f}")
    capacity = wall_s * (os.cpu_count() or 1)
    print(f"\n{len(seen)} processes, {wall_s:.0f} s on {os.cpu_count()} cores")
    for name, what in (("start", "starts of processes"), ("imports", "imports"), ("work", "everything else")):
        print(f"  {what:24}{totals[name]:8.0f} s  {totals[name] / capacity:6.1%} of the cores' time")
    idle = max(0.0, capacity - totals["cpu"])
    print(f"  {'waiting, cores idle':24}{idle:8.0f} s  {idle / capacity:6.1%}")


def main() -> int:
    """Returns pytest's exit status."""
    seen: dict[int, Seen] = {}
    with tempfile.TemporaryDirectory(prefix="session-times-") as folder:
        path = os.pathsep.join(filter(None, (str(HERE / "hook"), os.environ.get("PYTHONPATH"))))
        environ = {**os.environ, "SESSION_TIMES": folder, "PYTHONPATH": path}
        started = time.monotonic()
        session = subprocess.Popen([sys.executable, "-m", "pytest", *sys.argv[1:]], cwd=ROOT, env=environ)
        try:
            while session.poll() is None:
                sample(session.pid, seen)
                time.sleep(POLL_S)
        finally:
            if session.poll() is None:
                session.terminate()
        wall_s = time.monotonic() - started
        for note in Path(folder).iterdir():
            pid, start, imports = note.read_text().split()
            one = seen.setdefault(int(pid), Seen())
            one.start_s, one.import_s = float(start), float(imports)
    print_report(seen, wall_s)
    return session.returncode


if __name__ == "__main__":
    sys.exit(main())
