"""Which addresses a run's children reach without a proxy, and what stays of the user's own variables."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest

from buffer_rl.cluster.environment import direct_variables, drop_proxies, variables

PROXY = "http://proxy.example:3128"


def options(**changes: Any) -> Any:
    args: dict[str, Any] = {"engine_host": "127.0.0.1", "router_url": None, "engine_urls": []}
    return SimpleNamespace(**{**args, "rollout_external_engine_addrs": [], **changes})


@pytest.fixture(autouse=True)
def only_these_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("http_proxy", PROXY)
    monkeypatch.setenv("HTTPS_PROXY", PROXY)


def test_servers_of_the_run_are_reached_directly_and_all_other_addresses_through_the_users_proxy() -> None:
    args = options(
        engine_host="10.1.2.3",
        router_url="http://router.lab:30080/",
        engine_urls=["http://10.0.0.7:30000"],
        rollout_external_engine_addrs=["gpu-8:30000", "https://[fd00::9]:30000"],
    )
    with variables(direct_variables(args)):
        entries = os.environ["no_proxy"].split(",")
        assert entries == ["localhost", "127.0.0.1", "10.1.2.3", "router.lab", "10.0.0.7", "gpu-8", "fd00::9"]
        for host in ("127.0.0.1:8000", "localhost", "10.1.2.3:9", "router.lab:30080", "10.0.0.7:30000", "gpu-8:30000"):
            assert urllib.request.proxy_bypass(host), host
        for host in ("api.example.com", "10.0.0.70:30000", "other-gpu-8"):
            assert not urllib.request.proxy_bypass(host), host
        assert urllib.request.getproxies()["http"] == urllib.request.getproxies()["https"] == PROXY
    assert "no_proxy" not in os.environ
    assert "NO_PROXY" not in os.environ


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, "localhost,127.0.0.1"),
        ({"no_proxy": ""}, "localhost,127.0.0.1"),
        ({"NO_PROXY": " .corp , 127.0.0.1"}, ".corp,127.0.0.1,localhost"),
        ({"no_proxy": "a", "NO_PROXY": "b,a"}, "a,b,localhost,127.0.0.1"),
        ({"NO_PROXY": "*"}, "*"),
    ],
)
def test_the_users_own_exceptions_stay_in_both_spellings(own: dict[str, str], expected: str) -> None:
    assert direct_variables(options(), own) == {"no_proxy": expected, "NO_PROXY": expected}


def test_the_exceptions_that_grpc_prefers_name_the_servers_too_if_the_user_has_any() -> None:
    found = direct_variables(options(), {"no_grpc_proxy": "head", "no_proxy": "a"})
    assert found["no_grpc_proxy"] == "head,localhost,127.0.0.1"
    assert found["no_proxy"] == "a,localhost,127.0.0.1"


def test_a_process_without_proxies_keeps_its_other_variables() -> None:
    environ = {"http_proxy": "a", "ALL_PROXY": "b", "No_Proxy": "c", "grpc_proxy": "d", "PROXY_PORT": "1", "HOME": "/"}
    drop_proxies(environ)
    assert environ == {"PROXY_PORT": "1", "HOME": "/"}


READ_WHILE_SET = """
import ctypes, os, sys, threading
from buffer_rl.cluster.environment import set_variables

os.environ["SET_BEFORE"] = "1"  # the table is one of malloc's from here on, as in a worker of Ray
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
libc.malloc.restype = ctypes.c_void_p

def fill(size):
    ctypes.memset(libc.malloc(size), 255, size)  # as others use the memory that is free

def read():
    while not done:
        libc.getenv(b"IS_NOT_THERE")  # walks the whole table, without Python's lock

done = []
readers = [threading.Thread(target=read) for _ in range(2)]
for reader in readers:
    reader.start()
for number in range(2000):
    set_variables({f"NEW_{number}": str(number), "SET_BEFORE": str(number)})
    fill(8 * len(os.environ))
done.append(True)
for reader in readers:
    reader.join()
assert libc.getenv(b"NEW_1234") == b"1234" and libc.getenv(b"SET_BEFORE") == b"1999"
assert {f"NEW_{number}": str(number) for number in range(2000)}.items() <= os.environ.items()
os.environ["AFTER"] = "1"
assert libc.getenv(b"AFTER") == b"1"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's table of variables")
def test_variables_are_set_while_other_threads_read_them() -> None:
    subprocess.run([sys.executable, "-c", READ_WHILE_SET], check=True, timeout=120)
