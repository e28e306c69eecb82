"""Starts a SGLang server as a child process: the ``sglang`` entry of the engine plugins."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from buffer_rl.cluster.process import ServerProcess, key_environment
from buffer_rl.data.eval_sets import eval_sets_of
from buffer_rl.engines.client import passes_fields
from buffer_rl.errors import ConfigError, EngineError
from buffer_rl.files.hf_config import expert_sizes, max_positions
from buffer_rl.options.section import required
from buffer_rl.plan.schedule import num_adapters
from buffer_rl_sglang.options import SERVER, check_server, environment, on_cpu, server_arguments

if TYPE_CHECKING:
    from buffer_rl_sglang.options import SglangArgs

MARGIN = 8
"""A server with a context length C takes prompts of C - 7 tokens and ends answers at C - 2 (0.5.23)."""
MASK_TOKENS = 4096
"""Default of the server's ``--sampling-mask-max-tokens`` (0.5.23)."""
SHARED = Path("/dev/shm")
LEFT_BEHIND = ("sglang_loads_", "sgl_shm_", "sem.mp-")
"""What killed servers leave in ``SHARED``."""


MAX_UNIX_PATH = 107
"""Bytes of the path of a Unix socket on Linux (``unix(7)``)."""
_SOCKET_ROOM = len("/sglang_01234567/tmp01234567")  # what a server's sockets are named below the temporary folder


class SglangServer(ServerProcess):
    """A SGLang server that was started.

    Its temporary files are in a folder of its own, which ``stop`` removes, as it does the shared memory of a server
    that was killed."""

    def __init__(self, args: SglangArgs, index: int, log_path: str) -> None:
        self._shared: set[Path] = set()
        base = tempfile.gettempdir()
        short = len(os.fsencode(base)) + _SOCKET_ROOM <= MAX_UNIX_PATH
        self._temporary = tempfile.mkdtemp(prefix="sglang_", dir=base if short else "/tmp")
        variables = {**environment(args), **key_environment(args.engine_api_key), "TMPDIR": self._temporary}
        if on_cpu(args) and (ranks := args.rollout_num_gpus_per_engine) > 1:  # else one NUMA node for each is wanted
            cores = [str(rank % (os.cpu_count() or 1)) for rank in range(ranks)]
            variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(cores)
        super().__init__(
            f"SGLang server {index}",
            lambda ports: [args.sglang_python, str(SERVER), *_arguments(args, index, *ports)],
            log_path,
            hosts=[args.engine_host],
            env=variables,
        )

    def wait_ready(self, timeout_s: float) -> None:
        """Return once the server answers."""
        super().wait_ready(timeout_s)
        self._shared |= _shared_memory(self.process.pid)

    def stop(self) -> None:
        """End the process and all that it started; returns when nothing of it is left."""
        self._shared |= _shared_memory(self.process.pid)
        super().stop()
        for path in self._shared:
            path.unlink(missing_ok=True)
        shutil.rmtree(self._temporary, ignore_errors=True)


class SglangLauncher:
    """Starts SGLang servers; meets ``buffer_rl.kinds.engine.EngineLauncher``."""

    def check(self, args: SglangArgs) -> None:
        """Raises ConfigError if there is no server to start, it refuses its arguments (``check_server``), or what the
        run replays would not arrive."""
        _check_kept_tokens(args)
        if expert_sizes(args) is not None:
            _check_router(args, "--replay-routed-experts", "return_routed_experts")
        check_server(args)

    def __call__(self, args: SglangArgs, index: int, log_path: str) -> SglangServer:
        """Start SGLang server ``index`` for ``args.hf_checkpoint`` on a free port of ``args.engine_host``, over the
        GPUs that this process sees, or on the CPU. Raises EngineError if there is no model or the process cannot be
        started; it does not wait for the server."""
        if not args.hf_checkpoint:
            raise EngineError("there is no model to serve", where="--hf-checkpoint", expected="a Hugging Face folder")
        return SglangServer(args, index, log_path)


launch = SglangLauncher()


def _check_kept_tokens(args: SglangArgs) -> None:
    """Raises ConfigError if ``--replay-kept-tokens`` asks for what a server does not send: it sends the tokens that
    were kept for a ``top_k`` of 2 to ``--sglang-sampling-mask-max-tokens``, if it gets a field that sglang-router
    drops."""
    if not args.replay_kept_tokens:
        return
    most = int(args.sglang_args.get("sampling_mask_max_tokens", MASK_TOKENS))
    what = "SGLang sends the tokens that sampling kept for a bounded number of them alone"
    both, more = "--replay-kept-tokens and", "--sglang-sampling-mask-max-tokens raises the bound"
    if not 1 < args.rollout_top_k <= most:
        where = f"{both} --rollout-top-k {args.rollout_top_k}"
        expected = f"--rollout-top-k 2 to {most}, with or without --rollout-top-p and --rollout-min-p"
        raise ConfigError(what, where=where, expected=expected, hint=f"add --rollout-top-k {most}; {more}")
    for flag, top_k in _eval_top_ks(args):
        if top_k > most:
            what, where = f"{what}, and is asked for them by evaluations too", f"{both} {flag} {top_k}"
            expected = f"at most {most}, or -1 for all tokens, of which none are sent"
            raise ConfigError(what, where=where, expected=expected, hint=f"lower it to {most}; {more}")
    _check_router(args, "--replay-kept-tokens", "return_sampling_mask")


def _check_router(args: SglangArgs, flag: str, field: str) -> None:
    """Raises ConfigError if the router drops ``field``, by which SGLang is asked for what ``flag`` replays."""
    if not passes_fields(args):
        what = f"this router drops {field}, by which SGLang is asked for what is replayed"
        raise ConfigError(what, where=f"{flag} and --router {args.router}", hint="add --router smg")


def _eval_top_ks(args: SglangArgs) -> Iterator[tuple[str, int]]:
    """What gives evaluations a ``top_k`` of their own, and that; those of temperature 0 have another, 1."""
    warm = args.rollout_temperature if args.eval_temperature is None else args.eval_temperature
    if args.eval_top_k is not None and warm > 0:
        yield "--eval-top-k", args.eval_top_k
    for chosen in eval_sets_of(args):
        if chosen.top_k is not None and (warm if chosen.temperature is None else chosen.temperature) > 0:
            yield f"--eval-config {args.eval_config}, the set {chosen.name!r}, top_k", chosen.top_k


def _arguments(args: SglangArgs, index: int, port: int) -> list[str]:
    """The server's command line; what ``--sglang-NAME`` says comes last, and wins."""
    ranks = args.rollout_num_gpus_per_engine
    found = [
        *("--model-path", str(args.hf_checkpoint)),
        *("--host", args.engine_host, "--port", str(port)),
        *("--dtype", args.engine_dtype),
        *("--tp-size", str(ranks)),
        *("--max-running-requests", str(args.engine_max_running_requests)),
        *("--random-seed", str(args.seed + index)),
        *("--weight-version", "0"),
        *("--log-level", "warning"),
    ]
    length = context_length(args)
    if length is not None:
        found += ["--context-length", str(length + MARGIN)]
    if args.trust_remote_code:
        found.append("--trust-remote-code")
    if args.replay_routed_experts:
        found.append("--enable-return-routed-experts")
    if args.lora_publish == "adapter":
        most = str(num_adapters(args))
        targets = ["all"] if args.target_modules == ["all-linear"] else args.target_modules
        found += ["--enable-lora", "--max-lora-rank", str(args.lora_rank), "--lora-target-modules", *targets]
        found += ["--max-loaded-loras", most, "--max-loras-per-batch", most]
        if on_cpu(args):
            found += ["--lora-backend", "torch_native"]
    if on_cpu(args):
        # An idle server polls otherwise, and takes a core from the trainer; its memory pool would be most of the
        # machine's.
        found += ["--device", "cpu", "--sleep-on-idle", "--grammar-backend", "none"]
        found += ["--max-total-tokens", str(max(args.engine_max_running_requests * 4096, (length or 0) + MARGIN))]
    elif args.offload_rollout:  # it is of CUDA, and a server on a CPU does not start with it
        found.append("--enable-memory-saver")
    return [*found, *server_arguments(args)]


def context_length(args: SglangArgs) -> int | None:
    """Most tokens of a sequence: ``--engine-context-length``, else the model's own limit; None where there is none."""
    if args.engine_context_length is not None:
        return int(args.engine_context_length)
    with contextlib.suppress(OSError, ValueError):
        config = Path(required(args.hf_checkpoint, "hf_checkpoint"), "config.json")
        return max_positions(json.loads(config.read_text(encoding="utf-8")))
    return None


def _shared_memory(group: int) -> set[Path]:
    """Files in ``SHARED``, of the kinds of ``LEFT_BEHIND``, that the processes of a process group have mapped. Compared
    by inode: a semaphore is mapped under another name."""
    mapped = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if os.getpgid(int(process.name)) == group:
                lines = (process / "maps").read_bytes().split(b"\n")
                mapped |= {int(line.split()[4]) for line in lines if f" {SHARED}/".encode() in line}
    found = set()
    for path in SHARED.iterdir():
        with contextlib.suppress(OSError):
            if path.name.startswith(LEFT_BEHIND) and path.stat().st_ino in mapped:
                found.add(path)
    return found
