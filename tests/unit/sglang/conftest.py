"""A Python whose environment has a package ``sglang``: a parser and a server of a few lines, in place of the real one.

The launcher, the check of arguments and the program that runs in the environment are the real ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.options.section import compose
from buffer_rl.testing.tiny import make_tiny_model
from buffer_rl_sglang.options import SglangOptions

SERVER_ARGS = """
import argparse
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        texts = ("model-path", "host", "dtype", "weight-version", "log-level", "device", "grammar-backend", "api-key")
        for name in texts:
            parser.add_argument(f"--{name}")
        for name in ("port", "tp-size", "max-running-requests", "context-length", "random-seed", "max-total-tokens"):
            parser.add_argument(f"--{name}", type=int)
        parser.add_argument("--mem-fraction-static", type=float)
        parser.add_argument("--cuda-graph-bs", type=int, nargs="+")
        parser.add_argument("--sleep-on-idle", action="store_true")
        parser.add_argument("--enable-memory-saver", action="store_true")
        parser.add_argument("--enable-return-routed-experts", action="store_true")

def prepare_server_args(argv):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(argv)
"""
LAUNCH_SERVER = """
import json, mmap, os
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing import get_context

def run_server(args):
    shared = f"/dev/shm/sglang_loads_{os.path.basename(os.environ['TMPDIR'])}"
    with open(shared, "w+b") as file:
        file.truncate(4096)
        held = mmap.mmap(file.fileno(), 4096)
    semaphore = get_context("spawn").Semaphore()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps({**vars(args), "shared": shared, "environ": dict(os.environ)}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        def log_message(self, *_):
            pass

    HTTPServer((args.host, args.port), Handler).serve_forever()
"""


@pytest.fixture(scope="session")
def sglang_python(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """``sglang_python("0.5.23")``: an executable that runs Python with that version of the package."""

    def make(version: str | None = "0.5.23") -> str:
        folder = tmp_path_factory.mktemp("sglang")
        if version is not None:
            files = {
                "sglang/__init__.py": "",
                "sglang/launch_server.py": LAUNCH_SERVER,
                "sglang/srt/__init__.py": "",
                "sglang/srt/server_args.py": SERVER_ARGS,
                "sglang/srt/utils.py": "def kill_process_tree(*_, **__): pass",
                f"sglang-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n",
            }
            for name, text in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text)
        program = folder / "python"
        program.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} -S "$@"\n')
        program.chmod(0o755)
        return str(program)

    return make


@pytest.fixture(scope="session")
def options(tmp_path_factory: pytest.TempPathFactory, sglang_python: Callable[..., str]) -> Callable[..., Any]:
    """``options(sglang_args={…})``: the options of a run with SGLang servers of a tiny model."""
    model, python = make_tiny_model(tmp_path_factory.mktemp("model") / "hf"), sglang_python()
    options_class = compose([*CORE_SECTIONS, SglangOptions])

    def make(**changes: Any) -> Any:
        given = {"hf_checkpoint": model, "rollout_engine": "sglang", "sglang_python": python, "engine_device": "cuda"}
        return options_class.model_validate({**given, **changes})

    return make
