# ruff: noqa: E501
"""Programs that try to leave a sandbox, or to harm the machine. Each prints what it reached on lines ``REACHED ...``.

They begin with PROLOGUE, which prints the process namespace that they run in.
"""

from __future__ import annotations

PROLOGUE = """
import ctypes, errno, os, signal, socket, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
print(os.readlink("/proc/self/ns/pid"), flush=True)
def reached(what):
    print("REACHED", what, flush=True)
def tried(what, act):
    try:
        value = act()
    except (OSError, MemoryError, ValueError, AttributeError):
        return
    reached("%s: %r" % (what, value))
def call(number, *args):
    if libc.syscall(number, *args) < 0:
        raise OSError(ctypes.get_errno(), "refused")
"""

ESCAPES = {
    "host files": """
for path in ("/etc/passwd", "/etc/shadow", "/root", "/home", "/var/log", "/sys/kernel", "/proc/1/root/etc/passwd", "/work", "/run"):
    tried(path, lambda: os.stat(path))
""",
    "environment of the parent": """
for pid in (name for name in os.listdir("/proc") if name.isdigit()):
    try:
        text = open("/proc/%s/environ" % pid, "rb").read()
    except OSError:
        continue
    if b"SECRET" in text or (pid == "1" and text.strip(b"\\0")):
        reached(text)
if any("SECRET" in name for name in os.environ): reached("os.environ")
""",
    "open files of the parent": """
for name in os.listdir("/proc/self/fd"):
    if int(name) > 2 and os.path.exists("/proc/self/fd/" + name): reached(os.readlink("/proc/self/fd/" + name))
""",
    "writing outside of the temporary folders": """
for folder, _, _ in os.walk("/"):
    if folder.startswith(("/tmp", "/dev/shm", "/proc")): continue
    tried(folder, lambda: open(folder + "/escape", "w").close())
for path in ("/program.py", "/usr/bin/python3", "/etc/ld.so.cache"):
    tried(path, lambda: open(path, "a").close())
tried("remount", lambda: call(165, None, b"/", None, 32 | 0x1000, None))
""",
    "kernel settings": """
for folder, _, files in os.walk("/proc/sys"):
    for name in files:
        path = folder + "/" + name
        tried(path, lambda: os.close(os.open(path, os.O_WRONLY)))
for path in ("/proc/sysrq-trigger", "/proc/self/oom_score_adj", "/proc/self/mem", "/proc/1/mem", "/proc/self/uid_map"):
    tried(path, lambda: os.close(os.open(path, os.O_WRONLY)))
""",
    "loopback": """
tried("127.0.0.1", lambda: socket.create_connection(("127.0.0.1", PORT), timeout=2))
tried("::1", lambda: socket.create_connection(("::1", PORT), timeout=2))
""",
    "internet": """
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET, 38, 40):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        tried("socket %d %d" % (family, kind), lambda: socket.socket(family, kind))
tried("dns", lambda: socket.getaddrinfo("example.com", 80))
""",
    "sockets of the host": """
def connect(name):
    s = socket.socket(socket.AF_UNIX); s.connect(name); return name
tried("abstract", lambda: connect("\\0" + "ABSTRACT"))
tried("path", lambda: connect("UNIX_PATH"))
for path in ("/run/docker.sock", "/var/run/docker.sock", "/run/dbus/system_bus_socket"):
    tried(path, lambda: connect(path))
""",
    "kill and trace": """
for pid in range(2, 40000, 1):
    if pid != os.getpid():
        try: os.kill(pid, 0)
        except OSError: continue
        reached("signal to %d" % pid)
try: os.kill(1, 9)
except OSError: pass
tried("ptrace", lambda: call(101, 16, 1, 0, 0))
tried("process_vm_readv", lambda: call(310, 1, 0, 0, 0, 0, 0))
tried("pidfd_getfd", lambda: call(438, 0, 0, 0))
""",
    "nested namespaces": """
for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x08000000, 0x02000000, 0x80):
    tried("unshare %x" % flag, lambda: call(272, flag))
    tried("clone %x" % flag, lambda: call(56, flag | 17, 0, 0, 0, 0))
tried("clone3", lambda: call(435, ctypes.create_string_buffer((0x10000000).to_bytes(8, "little") + bytes(80)), 88))
tried("setns", lambda: call(308, os.open("/proc/1/ns/mnt", os.O_RDONLY), 0))
tried("chroot", lambda: os.chroot("/tmp"))
""",
    "setuid": """
tried("setuid", lambda: os.setuid(0))
tried("setgid", lambda: os.setgid(0))
tried("setgroups", lambda: os.setgroups([0]))
for folder in ("/usr/bin", "/bin"):
    for name in ("su", "mount", "passwd", "newgrp", "chsh"):
        try: done = subprocess.run([folder + "/" + name, "-c", "id -u"], capture_output=True, stdin=subprocess.DEVNULL, timeout=2)
        except (OSError, subprocess.TimeoutExpired): continue
        if done.stdout.strip() == b"0": reached(name)
open("/tmp/s", "w").write("x")
tried("chown", lambda: os.chown("/tmp/s", 0, 0))
if "CapEff:\\t0000000000000000" not in open("/proc/self/status").read(): reached("capabilities")
if "CapBnd:\\t0000000000000000" not in open("/proc/self/status").read(): reached("bounding set")
""",
    "devices": """
import stat
for name in os.listdir("/dev"):
    if name not in ("null", "zero", "urandom", "random", "shm", "stdin", "stdout", "stderr"): reached(name)
for kind, number in ((stat.S_IFBLK, os.makedev(8, 0)), (stat.S_IFCHR, os.makedev(1, 1))):
    tried("mknod", lambda: os.mknod("/tmp/node%d" % kind, 0o666 | kind, number))
""",
    "terminal": """
import fcntl, termios
tried("/dev/tty", lambda: os.open("/dev/tty", os.O_RDWR))
for number in (0, 1, 2):
    tried("TIOCSTI", lambda: fcntl.ioctl(number, termios.TIOCSTI, b"x"))
if os.getsid(0) == 0: reached("session of the host")
tried("/dev/ptmx", lambda: os.open("/dev/ptmx", os.O_RDWR))
""",
    "kernel interfaces": """
buffer = ctypes.create_string_buffer(256)
for name, number, args in (
    ("bpf", 321, (0, buffer, 128)), ("perf_event_open", 298, (buffer, 0, -1, -1, 0)), ("keyctl", 250, (0, -3, 1)),
    ("add_key", 248, (b"user", b"x", b"y", 1, -3)), ("io_uring_setup", 425, (8, buffer)), ("userfaultfd", 323, (0,)),
    ("open_by_handle_at", 304, (-100, buffer, 0)), ("mount", 165, (b"x", b"/tmp", b"tmpfs", 0, 0)),
    ("fsopen", 430, (b"tmpfs", 0)), ("init_module", 175, (buffer, 1, b"")), ("syslog", 103, (3, buffer, 10)),
    ("settimeofday", 164, (buffer, 0)), ("reboot", 169, (0, 0, 0, 0)), ("swapon", 167, (b"/tmp/x", 0)),
    ("memfd_create", 319, (b"x", 0)), ("shmget", 29, (0, 4096, 0o1600)), ("x32 getpid", 0x40000000 + 500, ()),
):
    if name.startswith("x32"): continue
    ctypes.set_errno(0)
    value = libc.syscall(number, *args)
    if value >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS): reached("%s %d errno %d" % (name, value, ctypes.get_errno()))
""",
    "limits that it raises": """
import resource
for name in ("NPROC", "AS", "FSIZE", "NOFILE", "CPU", "CORE"):
    which = getattr(resource, "RLIMIT_" + name)
    tried(name, lambda: resource.setrlimit(which, (resource.RLIM_INFINITY,) * 2))
tried("nice", lambda: os.nice(-5))
tried("scheduler", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
""",
}
"""Those that end by themselves, and must reach nothing."""

HARMS = {
    "fork bomb": """
made = 0
for _ in range(200):
    try: pid = os.fork()
    except OSError: break
    if pid == 0: time.sleep(60)
    made += 1
print("made", made, flush=True)
if made > 8: reached("%d processes" % made)
""",
    "threads": """
import threading
made = 0
for _ in range(200):
    try: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    except RuntimeError: break
    made += 1
if made > 8: reached("%d threads" % made)
os._exit(0)
""",
    "memory in one process": """
blocks = []
try:
    while len(blocks) < 1000: blocks.append(b"x" * (1 << 20))
    reached("%d MiB" % len(blocks))
except MemoryError:
    if len(blocks) > 260: reached("%d MiB" % len(blocks))
""",
    "memory in many processes": """
made, ends = 0, []
for _ in range(40):
    reader, writer = os.pipe()
    try: pid = os.fork()
    except OSError: break
    if pid == 0:
        blocks = []
        try:
            while len(blocks) < 1000: blocks.append(b"x" * (1 << 20))
        except MemoryError: pass
        os.write(writer, b"%06d" % len(blocks)); time.sleep(3); os._exit(0)
    ends.append(reader)
total = sum(int(os.read(end, 6)) for end in ends)
print("total", total, flush=True)
if total > 2048: reached("%d MiB" % total)
""",
    "full disk": """
total = 0
for number in range(40):
    try:
        with open("/tmp/%d" % number, "wb", buffering=0) as file:
            while total < 1 << 30: total += file.write(b"x" * (1 << 20))
    except OSError: continue
if total > 65 << 20: reached("%d MiB" % (total >> 20))
""",
    "full shared memory": """
total = 0
for number in range(40):
    try:
        with open("/dev/shm/%d" % number, "wb", buffering=0) as file:
            while total < 1 << 30: total += file.write(b"x" * (1 << 20))
    except OSError: continue
if total > 17 << 20: reached("%d MiB" % (total >> 20))
""",
}
"""Those that end by themselves, at a limit."""

ENDLESS = {
    "files without number": ("for number in range(1 << 30): open('/dev/shm/%d' % number, 'w').close()", "memory"),
    "endless output": ("while True: os.write(1, b'x' * 65536)", "output"),
    "endless errors": ("while True: os.write(2, b'x' * 65536)", "timeout"),
    "ignored signals": (
        "for number in range(1, 65):\n    try: signal.signal(number, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "while True: time.sleep(1)",
        "timeout",
    ),
    "sleep": ("time.sleep(3600)", "timeout"),
    "work": ("while True: pass", "timeout"),
    "work in many processes": ("for _ in range(2): os.fork()\nwhile True: pass", "timeout"),
    "processes after processes": (
        "while True:\n    try: pid = os.fork()\n    except OSError: continue\n    if pid: os._exit(0)\n    os.setsid()",
        "exited",
    ),
    "daemon": ("if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(3600)\nprint('left')", "exited"),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "timeout"),
}
"""Those that go on, with how they must end."""
