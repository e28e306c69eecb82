"""``python -m buffer_rl.embedded.server``: the embedded engine as a process that speaks SGLang's protocol."""

from __future__ import annotations

import argparse
import logging
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from buffer_rl.cluster.process import exit_with_parent, pop_key, settle_garbage_collector
from buffer_rl.errors import EngineError

if TYPE_CHECKING:
    from buffer_rl.embedded.service import EngineService

# The engine thread gives the interpreter lock up around every torch operation and has to get it back from the event
# loop; Python's default of 5 ms would let the loop hold it for several decode steps.
SWITCH_INTERVAL_S = 0.0002


def build_parser() -> argparse.ArgumentParser:
    """The server's flags, under SGLang's names where the meaning is the same."""
    parser = argparse.ArgumentParser(prog="python -m buffer_rl.embedded.server", description=__doc__)
    parser.add_argument("--model-path", required=True, help="a Hugging Face folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000, help="0 takes a free one")
    parser.add_argument("--fd", type=int, help="serve on this inherited listening socket instead")
    parser.add_argument("--parent-fd", type=int, help="exit when the other end of this pipe is closed")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--num-threads", type=int, default=1, help="torch threads")
    parser.add_argument("--max-running-requests", type=int, default=64, help="sequences that decode together")
    parser.add_argument("--context-length", type=int, help="most tokens of a sequence; the model's limit where absent")
    parser.add_argument("--weight-version", default="0", help="what the initial weights are called")
    parser.add_argument(
        "--weight-update-timeout-s", type=float, default=600.0, help="deadline of joining a group or receiving a bucket"
    )
    parser.add_argument(
        "--deterministic", action="store_true", help="a request's answer does not depend on who shares the batch"
    )
    parser.add_argument(
        "--return-kept-tokens",
        action="store_true",
        help="answers have the tokens that top-k, top-p and min-p kept; log-probabilities are renormalised over them",
    )
    parser.add_argument(
        "--return-routed-experts",
        action="store_true",
        help="for mixture-of-experts models: answers have the experts that computed each token",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run the Python files of the model folder")
    parser.add_argument("--log-level", default="warning")
    return parser


def main(argv: Sequence[str] | None = None, service_class: type[EngineService] | None = None) -> int:
    """Load the model, then serve until SIGTERM, SIGINT or a failure of the engine; returns the exit status.

    service_class: in place of ``EngineService``, which is imported with torch, after the flags were read."""
    args = build_parser().parse_args(argv)
    settle_garbage_collector()
    api_key = pop_key()
    if args.parent_fd is not None:
        exit_with_parent(args.parent_fd)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        service = _build_service(args, service_class)
    except EngineError as error:
        print(error, file=sys.stderr)
        return 1
    return _serve(service, args, api_key)


def _build_service(args: argparse.Namespace, service_class: type[EngineService] | None) -> EngineService:
    import torch  # from here on, after the garbage collector was settled

    from buffer_rl.embedded.loader import LoadedModel, LoadOptions, load_tokenizer
    from buffer_rl.embedded.service import EngineService

    torch.set_num_threads(args.num_threads)
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    options = LoadOptions(
        model_path=args.model_path,
        device=device,
        dtype=args.dtype,
        context_length=args.context_length,
        deterministic=args.deterministic,
        trust_remote_code=args.trust_remote_code,
        returns_experts=args.return_routed_experts,
    )
    return (service_class or EngineService)(
        LoadedModel(options),
        load_tokenizer(args.model_path, trust_remote_code=args.trust_remote_code),
        max_running_requests=args.max_running_requests,
        weight_version=args.weight_version,
        return_kept=args.return_kept_tokens,
        weight_update_timeout_s=args.weight_update_timeout_s,
    )


def _serve(service: EngineService, args: argparse.Namespace, api_key: str | None) -> int:
    from buffer_rl.embedded.routes import build_app, guarded
    from buffer_rl.engines.http_server import http_server

    listener = socket.socket(fileno=args.fd) if args.fd is not None else _listen(args.host, args.port)
    server = http_server(guarded(build_app(service), api_key))

    def give_up() -> None:
        server.should_exit = True

    service.on_failure = give_up
    settle_garbage_collector()
    server.run(sockets=[listener])
    return 0 if service.failure is None else 1


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.create_server((host, port), backlog=4096)
    print(f"listening on http://{host}:{listener.getsockname()[1]}", flush=True)
    return listener


if __name__ == "__main__":
    sys.exit(main())
