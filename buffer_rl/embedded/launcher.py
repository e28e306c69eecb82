"""Starts the embedded engine as a child process: the ``embedded`` entry of the engine plugins."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from buffer_rl.args import Args
from buffer_rl.cluster.process import ChildProcess, base_url, key_environment, listening_socket, wait_until_ready
from buffer_rl.errors import EngineError
from buffer_rl.files.hf_config import expert_sizes, max_positions, read_config, require_short_rows
from buffer_rl.options.section import required


@dataclass(frozen=True, slots=True)
class EmbeddedEngine:
    """An embedded engine that was started; meets ``buffer_rl.kinds.engine.EngineProcess``. url: without a trailing
    slash."""

    url: str
    process: ChildProcess

    def check(self) -> None:
        """Raises EngineError, with the end of the log, if the process has ended."""
        self.process.check()

    def wait_ready(self, timeout_s: float) -> None:
        """Return once the engine answers. Raises EngineError if its process ends first, DeadlineError if it takes
        longer than ``timeout_s`` seconds."""
        wait_until_ready(f"{self.url}/health", self.process, timeout_s)

    def stop(self) -> None:
        """End the process; returns when it is gone."""
        self.process.stop()


class EmbeddedLauncher:
    """Starts embedded engines; meets ``buffer_rl.kinds.engine.EngineLauncher``. program: the arguments of Python that
    start the server."""

    def __init__(self, *program: str, deterministic: bool = True) -> None:
        self._program = program
        self.deterministic = deterministic

    def check(self, args: Args) -> None:
        """Raises ConfigError if sequences may be so long that their log-probabilities depend on who shares a batch, or
        if ``--replay-routed-experts`` asks for the experts of a model that has none."""
        expert_sizes(args)
        config = read_config("--hf-checkpoint", required(args.hf_checkpoint, "hf_checkpoint"))
        limits = [limit for limit in (args.engine_context_length, max_positions(config)) if limit is not None]
        require_short_rows("--hf-checkpoint", config, min(limits, default=None), "--engine-context-length")

    def __call__(self, args: Args, index: int, log_path: str) -> EmbeddedEngine:
        """Start embedded engine ``index`` for ``args.hf_checkpoint`` on a free port of ``args.engine_host``.

        The listening socket is made here and inherited, so no other process can take the port in between. Raises
        EngineError if there is no model or the process cannot be started; it does not wait for the engine.
        """
        if not args.hf_checkpoint:
            raise EngineError("there is no model to serve", where="--hf-checkpoint", expected="a Hugging Face folder")
        with listening_socket(args.engine_host, backlog=4096) as listener:
            url = base_url(args.engine_host, listener.getsockname()[1])
            command = [
                sys.executable,
                *self._program,
                *("--model-path", str(args.hf_checkpoint)),
                *("--fd", str(listener.fileno())),
                *("--device", args.engine_device),
                *("--dtype", args.engine_dtype),
                *("--num-threads", str(args.engine_num_threads)),
                *("--max-running-requests", str(args.engine_max_running_requests)),
                *("--weight-update-timeout-s", str(args.update_weights_timeout_s)),
            ]
            if args.engine_context_length is not None:
                command += ["--context-length", str(args.engine_context_length)]
            switches = {
                "--deterministic": args.deterministic,
                "--return-kept-tokens": args.replay_kept_tokens,
                "--return-routed-experts": args.replay_routed_experts,
                "--trust-remote-code": args.trust_remote_code,
            }
            command += [flag for flag, is_on in switches.items() if is_on]
            env = {"OMP_NUM_THREADS": str(args.engine_num_threads), "TOKENIZERS_PARALLELISM": "false"}
            env |= key_environment(args.engine_api_key)
            name, fds = f"embedded engine {index}", [listener.fileno()]
            process = ChildProcess(name, command, log_path, env=env, pass_fds=fds)
        return EmbeddedEngine(url, process)


launch = EmbeddedLauncher("-m", "buffer_rl.embedded.server")
