"""Options of the SGLang servers that a run starts, and their check before it does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from buffer_rl.cluster.process import arguments_of
from buffer_rl.errors import ConfigError
from buffer_rl.options.checks import refuse
from buffer_rl.options.section import Section, option
from buffer_rl.plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    from buffer_rl.args import Args

SERVER = Path(__file__).with_name("server_process.py")
VERSIONS = ((0, 5, 21), (0, 6))
"""The server's versions that have this protocol: from the first that takes weights between ``/begin_weight_update`` and
``/end_weight_update``, up to and without the second."""
CHECK_TIMEOUT_S = 120.0
OWN = {
    "model": "--hf-checkpoint",
    "model_path": "--hf-checkpoint",
    "host": "--engine-host",
    "port": "",
    "api_key": "--engine-api-key",
    "admin_api_key": "",
    "tp_size": "--rollout-num-gpus-per-engine",
    "tensor_parallel_size": "--rollout-num-gpus-per-engine",
    "device": "--engine-device",
    "dtype": "--engine-dtype",
    "context_length": "--engine-context-length",
    "max_running_requests": "--engine-max-running-requests",
    "trust_remote_code": "--trust-remote-code",
    "weight_version": "",
    "enable_deterministic_inference": "",
    "dp_size": "",
    "data_parallel_size": "",
    "nnodes": "",
}
"""Arguments of the server that the run sets itself, with the option for each that has one."""


class SglangOptions(Section):
    """SGLang servers that the run starts."""

    heading: ClassVar[str] = "SGLang"

    sglang_python: str = option(
        sys.executable, "Python interpreter that runs SGLang, if it is in a separate environment", metavar="FILE"
    )
    sglang_args: dict[str, Any] = option(
        {},
        "arguments of the server by their own names: --sglang-mem-fraction-static 0.8, or "
        "sglang_mem_fraction_static: 0.8 in the --config file",
        metavar="JSON",
        prefix="sglang_",
    )


if TYPE_CHECKING:

    class SglangArgs(Args, SglangOptions):
        """The options of a run with those of this plugin, for a type checker."""


def server_arguments(args: SglangArgs) -> list[str]:
    """``args.sglang_args`` as the server takes them. Raises ConfigError for what the run sets, and for secrets."""
    logs = args.engine_auth and str(args.sglang_args.get("log_level", "warning")).lower() in ("debug", "info")
    what = "--sglang-log-level: at this level the server writes the engines' API key to its log"
    refuse(logs, what, "warning and above, or add --no-engine-auth")
    return arguments_of(args.sglang_args, "sglang", OWN)


def on_cpu(args: SglangArgs) -> bool:
    """Whether the servers compute on the CPU: asked for, or there is no GPU on this node."""
    return args.engine_device == "cpu" or (args.engine_device == "auto" and not any(Path("/dev").glob("nvidia[0-9]*")))


def environment(args: SglangArgs) -> dict[str, str]:
    """Variables of the server's process."""
    return {
        "PYTHONPATH": "",  # its environment is its own
        "OMP_NUM_THREADS": str(args.engine_num_threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        # With it /health generates a token, and fails while the server is paused: the router would take it off.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # The server wants more tokens than it uses; see launcher.MARGIN.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "BUFFER_RL_SGLANG_DEVICE": "cpu" if on_cpu(args) else "cuda",
    }


@hookimpl
def buffer_rl_add_options() -> list[str]:
    """The section above, by reference."""
    return [f"{__name__}:SglangOptions"]


def check_server(config: Any) -> None:
    """Raises ConfigError if there is no SGLang to start, if its version is unknown, or if it refuses its arguments."""
    python, limit = config.sglang_python, max(CHECK_TIMEOUT_S, config.engine_start_timeout_s)
    where, words = f"--sglang-python {python}", [python, str(SERVER), "--check-arguments", "--model-path"]
    words += [str(config.hf_checkpoint), *server_arguments(config)]
    variables = {**os.environ, **environment(config)}
    try:
        checked = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=limit)
    except OSError as error:
        raise ConfigError(f"it cannot be run: {error}", where=where) from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"SGLang did not check its arguments within {limit:g} s", where=where) from error
    failed, last = bool(checked.returncode), (checked.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    what = f"--sglang-NAME: the server refuses its arguments: {last.partition('error:')[2].strip()}"
    refuse(failed and "sglang: error:" in last, what, f"{python} -m sglang.launch_server --help lists them")
    hint = "pip install 'buffer-rl[sglang]', or an environment of its own: plugins/README.md"
    expected = "a Python whose environment has sglang"
    refuse(failed, f"{where}: SGLang cannot be imported: {last}", hint, expected)
    version, limits = checked.stdout.split()[-1], [".".join(map(str, numbers)) for numbers in VERSIONS]
    other, what = not VERSIONS[0] <= _numbers(version) < VERSIONS[1], f"SGLang {version} speaks another protocol"
    refuse(other, f"{where}: {what}", expected=f"sglang>={limits[0]},<{limits[1]}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


@hookimpl
def buffer_rl_configure(config: Any) -> None:
    """Raises ConfigError for arguments of servers that the run does not start."""
    given = getattr(config, "sglang_args", None)  # options that a program made may lack the section
    if given and (config.rollout_engine != "sglang" or config.router_url is not None):
        flag = f"--sglang-{next(iter(given)).replace('_', '-')}"
        raise ConfigError("the run starts no SGLang server", where=flag, hint="add --rollout-engine sglang")
