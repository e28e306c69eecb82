"""A sandbox of bubblewrap (``bwrap``): new namespaces of everything, without privileges, under limits.

plugins/buffer_rl_code/README.md says what holds, and why each part is there. The order matters: this process, if it is
root, becomes an unprivileged user *before* bwrap starts, and bwrap starts with an empty environment, which the program
can read.
"""

from __future__ import annotations

import os
import platform
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, cast

from buffer_rl.errors import ConfigError, RewardError
from buffer_rl_code.probe import PROBE, PROBE_ANSWER
from buffer_rl_code.sandbox import Ended, Program, ProgramRun
from buffer_rl_code.seccomp import ARCHITECTURES, filter_program
from buffer_rl_code.watch import end_tree, has_ended, usage_of

NOBODY = 65534
MAX_PROCESSES = 8
MAX_FILES = 64
TMP_MB, SHM_MB, FILE_MB = 64, 16, 32
STDERR_BYTES = 1 << 14
TEMPORARY = ("/tmp", "/dev/shm")
CHECK_S = 2.0
TICK_S = 0.02
MAX_TICKS = 5  # that a wait counts between two looks
MAX_WALL_TIMES = 20  # of the time allowed: the last resort
INSTALL = "apt-get install bubblewrap (0.8 or newer; dnf install bubblewrap), or --code-sandbox URL of a SandboxFusion"
FORBIDDEN = (
    "unprivileged user namespaces are off here, as in most containers and Kubernetes pods: run outside of one, "
    "or name a sandbox server with --code-sandbox URL; on Ubuntu 24.04 an AppArmor profile of bwrap is needed"
)

# In the sandbox, before the program: limits that only hold for processes of its own user namespace.
_START = """
import resource as r
for name, value in {limits!r}:
    r.setrlimit(getattr(r, "RLIMIT_" + name), (value, value))
source = open("/program.py", "rb").read()
exec(compile(source, "/program.py", "exec"), {{"__name__": "__main__"}})
"""


class Bubblewrap:
    """Runs each program in a sandbox of its own, with the standard library of the interpreter that runs this."""

    def __init__(self, args: Any = None) -> None:
        del args  # a sandbox is built with the options of the run; this one needs none

    def check(self) -> None:
        """Raises ConfigError if bwrap is missing, does not work here, or lets the probe through."""
        where = "--code-sandbox bubblewrap"
        if sys.platform != "linux" or platform.machine() not in ARCHITECTURES:
            what = f"bubblewrap does not run on {sys.platform} {platform.machine()}"
            expected, hint = f"Linux on {' or '.join(ARCHITECTURES)}", "name a sandbox server: --code-sandbox URL"
            raise ConfigError(what, where=where, expected=expected, hint=hint)
        if shutil.which("bwrap") is None:
            raise ConfigError("bwrap is not installed", where=where, hint=INSTALL)
        began = time.monotonic()
        run = self.run(Program(code=PROBE, timeout_s=CHECK_S, memory_mb=512))
        if run.stdout == PROBE_ANSWER:
            return
        said = (run.stdout.decode(errors="replace") + run.stderr).strip()
        if run.stdout:
            raise ConfigError(f"the sandbox does not hold: {said[-400:]}", where=where, hint=INSTALL)
        old = "unknown option" in said.casefold()
        reason = said[-400:] or f"nothing was answered in {time.monotonic() - began:.1f} s ({run.ended})"
        raise ConfigError(f"bwrap does not work: {reason}", where=where, hint=INSTALL if old else FORBIDDEN)

    def run(self, program: Program) -> ProgramRun:
        """Run the program. Raises RewardError if bwrap cannot be started."""
        with _memory_file(program.code.encode()) as code, _memory_file(self._filter) as seccomp:
            try:
                child = subprocess.Popen(
                    [*self._command, *_inside(program, code.fileno(), seccomp.fileno()), *self._python(program)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={},
                    cwd="/",
                    pass_fds=(code.fileno(), seccomp.fileno()),
                    start_new_session=True,
                    **_unprivileged(),
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise RewardError(f"bwrap cannot be started: {error}", where="--code-sandbox", hint=INSTALL) from error
        with child:
            try:
                return _Watched(child, program).to_the_end()
            finally:
                end_tree(child.pid)

    @cached_property
    def _filter(self) -> bytes:
        return filter_program(platform.machine())

    @cached_property
    def _interpreter(self) -> str:
        """The base interpreter of this environment, or else the system's if the sandbox's user cannot reach it."""
        candidates = [os.path.realpath(sys._base_executable), shutil.which("python3", path="/usr/bin") or ""]  # type: ignore[attr-defined]
        found = next((path for path in candidates if path and _reaches(path)), None)
        if found is None:
            what = f"the user that programs run as cannot read the interpreter {candidates[0]}"
            where, expected = "--code-sandbox bubblewrap", "a Python that every user can read"
            hint = "apt-get install python3, or start the run as a user who is not root"
            raise ConfigError(what, where=where, expected=expected, hint=hint)
        return str(os.path.realpath(found))

    @cached_property
    def _command(self) -> list[str]:
        return [shutil.which("bwrap") or "bwrap", *_namespaces(), *_system(Path(self._interpreter).parents[1])]

    def _python(self, program: Program) -> list[str]:
        each = (program.memory_mb - TMP_MB - SHM_MB << 20) // MAX_PROCESSES
        limits = (
            ("AS", each),
            ("NPROC", MAX_PROCESSES),
            ("CPU", int(program.timeout_s) + 2),  # the watcher is first
            ("FSIZE", FILE_MB << 20),
            ("NOFILE", MAX_FILES),
            ("CORE", 0),
            ("MEMLOCK", 0),
            ("MSGQUEUE", 0),
        )
        return ["--", self._interpreter, "-I", "-S", "-B", "-X", "utf8", "-c", _START.format(limits=limits)]


def _namespaces() -> Iterator[str]:
    yield from ("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts")
    yield from ("--unshare-cgroup-try", "--disable-userns", "--die-with-parent", "--new-session")
    yield from ("--cap-drop", "ALL", "--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox")
    for name, value in {"PATH": "/usr/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}.items():
        yield from ("--setenv", name, value)


def _system(prefix: Path) -> Iterator[str]:
    """Read-only system: libraries, programs and the interpreter's own folders; no /etc, no /home, no /var."""
    folders = ["/usr/lib", "/usr/lib64", "/usr/bin", "/lib", "/lib64", "/bin", "/etc/ld.so.cache"]
    folders += [str(prefix / name) for name in ("bin", "lib", "lib64")]
    for folder in dict.fromkeys(folders):
        if os.path.islink(folder):
            yield from ("--symlink", os.readlink(folder), folder)
        elif os.path.exists(folder):
            yield from ("--ro-bind", folder, folder)


def _inside(program: Program, code: int, seccomp: int) -> Iterator[str]:
    """Mounts of its own, the last of them read-only; sizes in bytes."""
    yield from ("--proc", "/proc", "--remount-ro", "/proc", "--size", "65536", "--tmpfs", "/dev")
    for device in ("null", "zero", "urandom", "random"):
        yield from ("--dev-bind", f"/dev/{device}", f"/dev/{device}")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        yield from ("--symlink", f"/proc/self/fd/{number}", f"/dev/{name}")
    yield from ("--perms", "1777", "--size", str(SHM_MB << 20), "--tmpfs", "/dev/shm", "--remount-ro", "/dev")
    yield from ("--perms", "1777", "--size", str(TMP_MB << 20), "--tmpfs", "/tmp", "--chdir", "/tmp")
    yield from ("--perms", "0444", "--ro-bind-data", str(code), "/program.py")
    yield from ("--remount-ro", "/", "--seccomp", str(seccomp))


def _unprivileged() -> dict[str, Any]:
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}


def _reaches(path: str) -> bool:
    """Whether the user that programs run as can run ``path``."""
    if os.geteuid() != 0:
        return os.access(path, os.X_OK)
    return all(folder.exists() and folder.stat().st_mode & 0o001 for folder in (Path(path), *Path(path).parents))


@contextmanager
def _memory_file(data: bytes) -> Iterator[IO[bytes]]:
    with open(os.memfd_create("program"), "r+b", buffering=0) as file:
        file.write(data)
        file.seek(0)
        yield file


class _Watched:
    """One run: feeds standard input, keeps what is written up to the limits, and stops what exceeds one."""

    def __init__(self, child: subprocess.Popen[bytes], program: Program) -> None:
        self._child = child
        self._program = program
        self._unsent = memoryview(program.stdin)
        self._stdout, self._stderr = bytearray(), bytearray()
        self._began = self._looked = time.monotonic()
        self._waited = 0.0

    def to_the_end(self) -> ProgramRun:
        ended = self._watch()
        end_tree(self._child.pid)
        code = self._child.wait()
        stderr = self._stderr.decode(errors="replace")
        stdout = bytes(self._stdout[: self._program.output_bytes])
        return ProgramRun(ended=ended, exit_code=code, stdout=stdout, stderr=stderr)

    def _watch(self) -> Ended:
        streams = {
            self._child.stdout: partial(_read, self._child.stdout, self._stdout, self._program.output_bytes + 1),
            self._child.stderr: partial(_read, self._child.stderr, self._stderr, STDERR_BYTES),
        }
        with selectors.DefaultSelector() as selector:
            for stream, act in (*streams.items(), (self._child.stdin, self._write)):
                assert stream is not None
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_WRITE if act == self._write else selectors.EVENT_READ, act)
            while any(key.data != self._write for key in selector.get_map().values()):
                for key, _ in selector.select(TICK_S):
                    if not cast("Callable[[], bool]", key.data)():
                        selector.unregister(key.fileobj)
                        cast("IO[bytes]", key.fileobj).close()
                if len(self._stdout) > self._program.output_bytes:
                    return Ended.OUTPUT
                if (now := time.monotonic()) - self._looked >= TICK_S:
                    if (ended := self._exceeded(now)) is not None:
                        return ended
                    self._looked = now
        return Ended.EXITED

    def _exceeded(self, now: float) -> Ended | None:
        if has_ended(self._child.pid):
            return None  # only the end of its output is left to read
        usage, limit = usage_of(self._child.pid, TEMPORARY), self._program.timeout_s
        if usage.memory_bytes > self._program.memory_mb << 20:
            return Ended.MEMORY
        # A program that waits for a core of a busy machine is not slow; neither is one that was seldom looked at.
        self._waited += min(now - self._looked, MAX_TICKS * TICK_S) if usage.waits else 0.0
        late = usage.cpu_s > limit or self._waited > limit or now - self._began > MAX_WALL_TIMES * limit
        return Ended.TIMEOUT if late else None

    def _write(self) -> bool:
        assert self._child.stdin is not None
        try:
            self._unsent = self._unsent[os.write(self._child.stdin.fileno(), self._unsent[: 1 << 16]) :]
        except BlockingIOError:
            return True
        except OSError:
            return False  # it does not read on
        return bool(self._unsent)


def _read(stream: IO[bytes] | None, kept: bytearray, limit: int) -> bool:
    """Read what is there; what exceeds ``limit`` is dropped. False at the end of the stream."""
    assert stream is not None
    try:
        block = os.read(stream.fileno(), 1 << 16)
    except BlockingIOError:
        return True
    kept += block[: max(0, limit - len(kept))]
    return bool(block)
