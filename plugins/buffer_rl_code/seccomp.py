"""A seccomp filter for the sandbox, as the classic BPF program that ``bwrap --seccomp`` reads.

A system call of another architecture ends the process. The calls of ``REFUSED`` fail with EPERM: they reach parts of
the kernel that no test program needs (tracing, new namespaces, mounts, keys, io_uring, BPF). ``clone`` is refused with
flags of namespaces, ``socket`` for all families but AF_UNIX. ``ABSENT`` fail with ENOSYS, so that libraries fall back.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping
from types import MappingProxyType

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
AT_NUMBER, AT_ARCH, AT_ARGUMENT = 0, 4, 16  # in struct seccomp_data, little-endian
NEW_NAMESPACES = 0x7E020080  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET,TIME}
AF_UNIX = 1
X32_BIT = 0x40000000
NONE = -1

ARCHITECTURES: Mapping[str, int] = MappingProxyType({"x86_64": 0xC000003E, "aarch64": 0xC00000B7})

# Numbers of (x86_64, aarch64); NONE where the architecture has no such call.
_CLONE, _SOCKET = (56, 220), (41, 198)
REFUSED: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "ptrace": (101, 117),
        "process_vm_readv": (310, 270),
        "process_vm_writev": (311, 271),
        "kcmp": (312, 272),
        "pidfd_getfd": (438, 438),
        "process_madvise": (440, 440),
        "unshare": (272, 97),
        "setns": (308, 268),
        "mount": (165, 40),
        "umount2": (166, 39),
        "pivot_root": (155, 41),
        "chroot": (161, 51),
        "open_tree": (428, 428),
        "move_mount": (429, 429),
        "fsopen": (430, 430),
        "fsconfig": (431, 431),
        "fsmount": (432, 432),
        "fspick": (433, 433),
        "mount_setattr": (442, 442),
        "name_to_handle_at": (303, 264),
        "open_by_handle_at": (304, 265),
        "quotactl": (179, 60),
        "swapon": (167, 224),
        "swapoff": (168, 225),
        "acct": (163, 89),
        "syslog": (103, 116),
        "reboot": (169, 142),
        "kexec_load": (246, 104),
        "kexec_file_load": (320, 294),
        "init_module": (175, 105),
        "finit_module": (313, 273),
        "delete_module": (176, 106),
        "iopl": (172, NONE),
        "ioperm": (173, NONE),
        "modify_ldt": (154, NONE),
        "settimeofday": (164, 170),
        "clock_settime": (227, 112),
        "adjtimex": (159, 171),
        "clock_adjtime": (305, 266),
        "bpf": (321, 280),
        "perf_event_open": (298, 241),
        "userfaultfd": (323, 282),
        "fanotify_init": (300, 262),
        "add_key": (248, 217),
        "request_key": (249, 218),
        "keyctl": (250, 219),
        "io_uring_setup": (425, 425),
        "io_uring_enter": (426, 426),
        "io_uring_register": (427, 427),
        "move_pages": (279, 239),
        "migrate_pages": (256, 238),
        "mbind": (237, 235),
        "set_mempolicy": (238, 237),
        # Memory that no limit of a process counts once it is unmapped.
        "shmget": (29, 194),
        "msgget": (68, 186),
        "semget": (64, 190),
        "mq_open": (240, 180),
        "vmsplice": (278, 75),
        # Shares of the processor beyond its own.
        "sched_setscheduler": (144, 119),
        "sched_setattr": (314, 274),
    }
)
ABSENT: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"clone3": (435, 435), "memfd_create": (319, 279), "memfd_secret": (447, 447), "landlock": (444, 444)}
)


def filter_program(machine: str) -> bytes:
    """The filter for ``machine`` (``platform.machine()``), a key of ``ARCHITECTURES``."""
    column = list(ARCHITECTURES).index(machine)
    code = [
        _op(LOAD, AT_ARCH),
        _op(JUMP_EQUAL, ARCHITECTURES[machine], if_true=1),
        _op(RETURN, KILL),
        _op(LOAD, AT_NUMBER),
    ]
    if machine == "x86_64":
        code += [_op(JUMP_AT_LEAST, X32_BIT, if_false=1), _op(RETURN, KILL)]
    for table, number in ((REFUSED, errno.EPERM), (ABSENT, errno.ENOSYS)):
        for numbers in table.values():
            if (call := numbers[column]) != NONE:
                code += [_op(JUMP_EQUAL, call, if_false=1), _op(RETURN, ERRNO | number)]
    code += [
        _op(JUMP_EQUAL, _CLONE[column], if_false=4),
        _op(LOAD, AT_ARGUMENT),
        _op(JUMP_BITS, NEW_NAMESPACES, if_false=1),
        _op(RETURN, ERRNO | errno.EPERM),
        _op(RETURN, ALLOW),
        _op(JUMP_EQUAL, _SOCKET[column], if_false=3),
        _op(LOAD, AT_ARGUMENT),
        _op(JUMP_EQUAL, AF_UNIX, if_true=1),
        _op(RETURN, ERRNO | errno.EACCES),
        _op(RETURN, ALLOW),
    ]
    return b"".join(code)


def _op(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction. if_true, if_false: how many instructions a jump skips."""
    return struct.pack("<HBBI", code, if_true, if_false, value)
