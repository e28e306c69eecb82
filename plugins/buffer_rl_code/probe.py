"""The program that the check at start runs in a sandbox: the quick half of the escapes that the tests try."""

from __future__ import annotations

PROBE = """
import os, resource, socket, sys
sys.stdin.read()
held = []
def refused(name, act):
    try:
        act()
    except OSError:
        return
    held.append(name)
if open("/proc/1/environ", "rb").read().strip(b"\\0"):
    held.append("environment of its parent")
if os.getuid() == 0 or b"CapEff:\\t0000000000000000" not in open("/proc/self/status", "rb").read():
    held.append("privileges")
if b"NoNewPrivs:\\t1" not in open("/proc/self/status", "rb").read():
    held.append("setuid programs")
if b"Seccomp:\\t2" not in open("/proc/self/status", "rb").read():
    held.append("no seccomp filter")
for path in ("/escape", "/usr/bin/escape", "/dev/escape", "/proc/self/oom_score_adj", "/proc/sys/kernel/core_pattern"):
    refused("write " + path, lambda: open(path, "w").close())
for path in ("/etc/passwd", "/root", "/home", "/var", "/sys", "/etc/shadow"):
    refused("read " + path, lambda: os.stat(path))
refused("network", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
refused("nested namespace", lambda: os.unshare(os.CLONE_NEWUSER) if hasattr(os, "unshare") else refuse())
for name in ("NPROC", "AS", "FSIZE", "NOFILE", "CPU"):
    if resource.getrlimit(getattr(resource, "RLIMIT_" + name))[1] == resource.RLIM_INFINITY:
        held.append("no limit " + name)
if len([name for name in os.listdir("/proc") if name.isdigit()]) > 4:
    held.append("processes of others")
print("held" if not held else "reached: " + ", ".join(held))
""".replace("else refuse()", "else os.stat('/absent')")

PROBE_ANSWER = b"held\n"
