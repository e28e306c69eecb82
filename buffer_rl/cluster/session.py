"""The Ray session of a run, joined where an address is given, else started on this machine and ended with the run; and
its accelerators."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import ray

from buffer_rl.cluster.isolation import ON_LOOPBACK, isolated_ray
from buffer_rl.config import flag_of
from buffer_rl.errors import ConfigError, WorkerError
from buffer_rl.resolution.shipping import CodeBundle, use_shipped_code
from buffer_rl.roles import PLACED, worker_counts
from buffer_rl.train.options import TrainOptions
from buffer_rl.train.roles import uses_critic

WORKING_DIRECTORY = "BUFFER_RL_WORKING_DIRECTORY"
SETUP_HOOK = "buffer_rl.cluster.session.enter_working_directory"


def enter_working_directory() -> None:
    """Executed by each worker of a cluster that was joined: go to the driver's folder, where this node has it, and find
    the user's code that came with the run."""
    came = os.getcwd()  # Ray starts a worker in the folder that was sent to its node
    with contextlib.suppress(OSError):
        os.chdir(os.environ[WORKING_DIRECTORY])
    use_shipped_code(came)


@contextmanager
def ray_session(
    address: str | None, code: CodeBundle | None = None, object_store_bytes: int = 500_000_000
) -> Iterator[None]:
    """Connect to Ray for the length of the block, unless this process is connected already.

    What is started here listens on the loopback interface alone and asks for a token (see ``isolated_ray``); a cluster
    that is joined has its own rules.

    code: the user's files to send to the nodes of a cluster that is joined.
    object_store_bytes: of the object store that is started. A laptop's rollout is a few megabytes; Ray's default is
    30% of the memory. What does not fit is spilled to disk.
    Raises ConfigError where the machine has less memory, and WorkerError where the cluster at ``address`` does not
    answer.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # CUDA_VISIBLE_DEVICES stays what it is
    with isolated_ray() if address is None else contextlib.nullcontext():
        try:
            with _own_sigterm_handler(), tempfile.TemporaryDirectory(prefix="buffer_rl_code_") as folder:
                if code is not None and code.files:
                    code.write(Path(folder))
                _connect(address, folder if code is not None and code.files else None, object_store_bytes)
            yield
        finally:
            ray.shutdown()


def _connect(address: str | None, code_folder: str | None, object_store_bytes: int) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address is None:
            ray.init(
                address="local",
                include_dashboard=False,
                object_store_memory=object_store_bytes,
                **ON_LOOPBACK,
                **quiet,
            )
        else:
            # Its workers start where the cluster was started; relative paths of options mean the caller's folder.
            there: dict[str, Any] = {
                "env_vars": {WORKING_DIRECTORY: os.getcwd()},
                "worker_process_setup_hook": SETUP_HOOK,
            }
            if code_folder is not None:
                there["working_dir"] = code_folder
            ray.init(address=address, runtime_env=there, **quiet)
    except ValueError as error:
        if "object_store_memory" not in str(error):
            raise
        raise ConfigError(
            f"Ray does not start with an object store of {object_store_bytes / 1e9:g} GB: {error}",
            where="--object-store-gb",
            expected="a part of this machine's memory",
        ) from error
    except ConnectionError as error:
        raise WorkerError(f"no Ray cluster answers: {error}", where=f"--ray-address {address}") from error


@contextmanager
def _own_sigterm_handler() -> Iterator[None]:
    """Keep the caller's handler. Ray sets one that stops the cluster before anything else is taken down: the clean-up
    that follows finds no cluster, and the process aborts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def train_gpus(args: TrainOptions) -> float:
    """Accelerators of each trainer rank: one where the device allows it and the cluster has them, else none. A policy
    and a critic of one rank each share the only one; with more ranks, two of a role could meet on it, which the
    collectives between them do not allow."""
    if args.train_device == "cpu":
        return 0.0
    found, ranks = int(cast(Any, ray).cluster_resources().get("GPU", 0)), num_trainer_ranks(args)
    if found == args.num_train_ranks == 1:
        return 1.0 / ranks
    return 1.0 if found >= ranks or args.train_device == "cuda" else 0.0


def num_trainer_ranks(args: TrainOptions) -> int:
    """Ranks of all trained roles: a critic has as many as the policy. An evaluation has none."""
    return args.num_train_ranks * (1 + (uses_critic(args) and args.num_rollout != 0))


def role_gpus(args: TrainOptions) -> float:
    """Accelerators of each worker of a role that has a model, beside those of the trainer ranks.

    Raises ConfigError if the cluster has too few for them, or for a critic: they would wait until a deadline passes."""
    num_gpus = train_gpus(args)
    trainers = round(num_trainer_ranks(args) * (num_gpus or 1.0))
    with_model = [name for name, role in PLACED.items() if role.model]
    wanted = trainers + sum(worker_counts(args)[role] for role in with_model)
    found = int(cast(Any, ray).cluster_resources().get("GPU", 0))
    if num_gpus and wanted > args.num_train_ranks and found < wanted:
        of_critic = " (half of them the critic's)" if trainers > args.num_train_ranks else ""
        flags = [flag_of(f"num_{role}_workers") for role in with_model]
        raise ConfigError(
            f"{trainers} trainer ranks{of_critic} and {wanted - trainers} workers of roles need an "
            f"accelerator each, and there are {found}",
            where=", ".join(flags if wanted > trainers else ["--train-device", "--num-train-ranks"]),
            hint="lower them (the trainer then does the work of roles), or add --train-device cpu",
        )
    return 1.0 if num_gpus else 0.0
