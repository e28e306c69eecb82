"""The conformance suite against the embedded engine, plain and behaving as SGLang, and against a real server.

    python tests/conformance/run.py                                    # the embedded engine alone
    python tests/conformance/run.py --url URL --models FOLDER          # and a server that serves FOLDER/0
    python tests/conformance/run.py --server "sh start.sh {model} {port} {log}" --write

The server has to be on this machine, with a context of 520 tokens and ``--weight-version 0``. ``--models`` alone makes
the models. ``--server`` starts a server by a command, waits for it and ends it. ``--write`` writes
docs/evidence/conformance.md. The exit status is 1 if an answer is not what its case expects of that server.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[1]))

from buffer_rl.cluster.process import reserved_port
from conformance import cases_control, cases_generate, cases_openai
from conformance.page import Result, disagreement, page
from conformance.reference import CONTEXT, Reference
from conformance.steps import Case, Runner, mismatch, tracing
from harness import sglang_service

PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "conformance.md"
START_TIMEOUT_S = 300.0
SLOW_S = 3.0
RACES = 20
"""A request that was started may have ended when the next step reaches the server, on a busy machine: most attempts at
such a case."""


def all_cases(reference: Reference) -> list[Case]:
    """The suite, in order."""
    modules = (cases_generate, cases_control, cases_openai)
    found = [case for module in modules for case in module.cases(reference)]
    assert len({(case.topic, case.name) for case in found}) == len(found)
    return found


async def run_all(
    cases: Sequence[Case],
    url: str,
    reference: Reference,
    *,
    key: str | None = None,
    is_sglang: bool,
    router: str = "",
) -> list[Result]:
    """Every case against one server. is_sglang: expect what a SGLang server answers. router: see ``Runner``."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    results = []
    timeout = aiohttp.ClientTimeout(total=60)
    connector = aiohttp.TCPConnector(force_close=True)  # servers close idle connections while a request is on its way
    settings: Any = {"headers": headers, "timeout": timeout, "connector": connector, "trace_configs": [tracing()]}
    async with aiohttp.ClientSession(**settings) as session:
        runner = Runner(session, url, reference, router)
        for case in cases:
            expected = case.as_sglang if is_sglang and case.as_sglang is not None else case.expect
            began = time.monotonic()
            for _ in range(RACES if any(step.kind == "start" for step in case.steps) else 1):
                try:
                    found = await runner.run(case)
                    wrong = mismatch(expected, found)
                except (aiohttp.ClientError, TimeoutError, AssertionError) as error:
                    found, wrong = [], f"{type(error).__name__}: {error}"
                if not wrong:
                    break
            if (took := time.monotonic() - began) > SLOW_S:
                print(f"{case.topic}: {case.name}: {took:.1f} s")
            results.append(Result(found=found, wrong=wrong))
    return results


@contextmanager
def serving(command: Sequence[str], url: str, log: str) -> Iterator[None]:
    """A server as a child process, from the first answer of its ``/health`` on."""
    with open(log, "ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server did not start; its log: {log}") from None
                time.sleep(0.2)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def free_url() -> Iterator[str]:
    """The URL of a port that is kept for a server, which listens on it in the block."""
    with reserved_port("127.0.0.1") as held:
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def embedded_command(model: str, url: str, *, imitate: bool) -> list[str]:
    """The embedded engine's server."""
    program = [sglang_service.__file__] if imitate else ["-m", "buffer_rl.embedded.server"]
    own = ["--model-path", model, "--port", url.rpartition(":")[2], "--max-running-requests", "16"]
    limits = ["--context-length", str(CONTEXT), "--weight-version", "0", "--device", "cpu"]
    return [sys.executable, *program, *own, *limits]


def main() -> int:
    """Run the suite; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a real server that runs already")
    parser.add_argument("--server", help="the command of a real server, with {model}, {port} and {log}")
    parser.add_argument("--api-key", help="of the server at --url")
    parser.add_argument("--models", help="folder of the two models; made where it is empty")
    parser.add_argument("--only", default="", help="cases whose topic and name have this text")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}; needs a real server")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        reference = Reference(args.models or scratch)
        cases = [case for case in all_cases(reference) if args.only in f"{case.topic}: {case.name}"]
        results: dict[str, list[Result]] = {}
        for name, imitate in (("embedded", False), ("as SGLang", True)):
            log = str(Path(scratch, f"{imitate}.log"))
            with (
                free_url() as url,
                serving(embedded_command(reference.folder("0"), url, imitate=imitate), url, log),
            ):
                results[name] = asyncio.run(run_all(cases, url, reference, is_sglang=imitate))
        if args.server:
            log = str(Path(tempfile.gettempdir(), "conformance_server.log"))
            with free_url() as url:
                own = args.server.format(model=reference.folder("0"), port=url.rpartition(":")[2], log=log)
                with serving(shlex.split(own), url, log):
                    results["SGLang"] = asyncio.run(run_all(cases, url, reference, is_sglang=True))
        elif args.url:
            results["SGLang"] = asyncio.run(run_all(cases, args.url, reference, key=args.api_key, is_sglang=True))
        return report(cases, results, write=args.write)


def report(cases: Sequence[Case], results: dict[str, list[Result]], *, write: bool) -> int:
    """Print what is wrong, write the page if asked; the exit status."""
    failed = 0
    for server, own in results.items():
        wrong = [(case, result) for case, result in zip(cases, own, strict=True) if result.wrong]
        failed += len(wrong)
        print(f"{server}: {len(own) - len(wrong)} of {len(own)} cases as expected")
        for case, result in wrong:
            print(f"  {case.topic}: {case.name}\n    {result.wrong}")
        if real := results.get("SGLang"):
            for case, one, other in zip(cases, real, own, strict=True):
                if not case.why and (difference := disagreement(case, one, other)):
                    print(f"  {server}, {case.topic}: {case.name}: differs from SGLang: {difference:.300}")
    if write:
        PAGE.write_text(page(cases, results))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
