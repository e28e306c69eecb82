"""A SGLang server that ends with its parent. Run by its path, in an environment that has SGLang and not buffer_rl.

``--parent-fd N``: end when the other end of this pipe is closed. ``--check-arguments``: parse the other arguments as
the server does, print the server's version, and stop. The API key comes in the environment: every user of the machine
can read a command line.

On a CPU (``BUFFER_RL_SGLANG_DEVICE=cpu``) the server runs from the wheels of the package registry, which have none of
its kernels for CPUs: layers use their plain torch code. Written for SGLang 0.5.23, tried with no other; a GPU needs
none of it. Processes that the server spawns run this file again, as ``__mp_main__``, and get the same.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

KEY_VARIABLE = "BUFFER_RL_ENGINE_API_KEY"
DEVICE_VARIABLE = "BUFFER_RL_SGLANG_DEVICE"


class Absent(types.ModuleType):
    """A module that is not installed, for code that defines what it would only run on a GPU: names in capitals are
    classes, all others modules that, called, return the function that they decorate."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        members = {"__module__": self.__name__, "__init__": lambda *_, **__: None}
        found = type(name, (), members) if name[:1].isupper() else Absent(full)
        setattr(self, name, found)
        return found

    def __call__(self, *args: Any, **options: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not options:
            return args[0]
        return lambda decorated: decorated


class AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules ``names`` and everything below them as ``Absent``."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in self._names:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def run_on_cpu() -> None:
    """Make ``sglang`` importable, and its layers choose code for CPUs, without its kernels, triton and torchvision."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # These look for triton and torchvision, and must not find what stands for them below.
    for name in ("torch._dynamo", "torch._inductor.runtime.triton_compat", "torch.utils.flop_counter"):
        importlib.import_module(name)
    importlib.import_module("transformers.image_utils")

    kernels = types.ModuleType("sgl_kernel")
    kernels.__path__ = []
    kernels.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None, is_package=True)
    # No other name: quantization asks by import errors what is there.
    vars(kernels)["__getattr__"] = _kernel_of_cpu
    sys.modules["sgl_kernel"] = kernels
    sys.meta_path.insert(0, AbsentFinder("triton", "torchvision"))
    triton: Any = importlib.import_module("triton")
    triton.__version__ = "3.0.0"
    triton.cdiv = lambda a, b: -(-a // b)
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
    import torch  # imported with the modules above

    # Its LoRA layers ask for pinned memory on every device, which torch without a GPU refuses.
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    # --enable-return-routed-experts registers its host memory with the CUDA runtime on every device, which wants a
    # status of 0, for success.
    runtime = types.SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    torch.cuda.cudart = lambda: runtime


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values, pin_memory=False, **options: make(*values, **options)


def _kernel_of_cpu(name: str) -> Callable[..., Any]:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def call(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"the kernel {name} is not installed")

    return call


def end_with_parent(fd: int) -> None:
    """Kill this process and all that it started once the other end of the pipe ``fd`` is closed."""

    def watch() -> None:
        while os.read(fd, 1):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main(argv: Sequence[str]) -> int:
    """Serve until a signal, or check ``argv``. Returns the exit status."""
    argv = list(argv)
    if "--parent-fd" in argv:
        at = argv.index("--parent-fd")
        end_with_parent(int(argv[at + 1]))
        del argv[at : at + 2]
    key = os.environ.pop(KEY_VARIABLE, "")
    if "--check-arguments" in argv:
        return check_arguments([each for each in argv if each != "--check-arguments"])
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args([*argv, *([f"--api-key={key}"] if key else [])]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


def check_arguments(argv: Sequence[str]) -> int:
    """Have the server's own parser read ``argv``: it exits with status 2 where it refuses. Prints the version."""
    import argparse
    import difflib
    from importlib.metadata import version

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="sglang", usage="--sglang-NAME VALUE", allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    rest = parser.parse_known_args(argv)[1]
    if unknown := [each for each in rest if each.startswith("--")]:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        near = difflib.get_close_matches(unknown[0], flags, n=1)
        hint = f"; did you mean --sglang-{near[0][2:]}?" if near else ""
        parser.error(f"there is no --sglang-{unknown[0][2:]}{hint}")
    if rest:
        parser.error(f"unexpected values: {' '.join(rest)}")
    print(version("sglang"))
    return 0


if os.environ.get(DEVICE_VARIABLE) == "cpu":
    run_on_cpu()

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
