"""The command ``buffer-rl``: finds the verb, prints errors as one clear message, returns the exit status.

Exit statuses: 0 done; 1 a check failed; 2 an error that was reported; 141 the reader of the output is gone; 128 and its
number after a signal. Only the module of the requested verb is imported, so that help and mistakes answer at once.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from buffer_rl import __version__
from buffer_rl.cluster.environment import signals_as_exceptions
from buffer_rl.cluster.fork_server import fork_server
from buffer_rl.errors import BufferRLError, ConfigError, EndedBySignal, Stopped, raised_as
from buffer_rl.observe.terminal import say

RUNS = ("train", "eval")
"""Verbs that start Ray and engines."""
ONLY_LOOKS = ("--dry-run", "--dry_run", "--help", "-h")
"""Flags with which they do not."""


def print_error(error: BufferRLError) -> None:
    """Print what ended a command, with its traceback if ``BUFFER_RL_TRACEBACK`` is 1."""
    if os.environ.get("BUFFER_RL_TRACEBACK") == "1":
        say(traceback.format_exc(), file=sys.stderr)
    say(f"buffer-rl: error: {error}", file=sys.stderr)


def main(argv: Sequence[str] | None = None, on_error: Callable[[BufferRLError], Any] = print_error) -> int:
    """Run the command line ``argv`` (without the program's name) and return the exit status. on_error: takes an error
    that ended the command."""
    open_closed_streams()
    if argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # outside of ``signals_as_exceptions``: an end without traceback
    arguments = list(sys.argv[1:] if argv is None else argv)
    starts_run = arguments[:1] in ([verb] for verb in RUNS) and not set(ONLY_LOOKS) & set(arguments)
    # First of all, as it imports for seconds; the imports below take a part of one.
    began = time.monotonic()
    with fork_server() if starts_run else nullcontext():
        return _main(arguments, began, on_error)


def _main(arguments: Sequence[str], began: float, on_error: Callable[[BufferRLError], Any]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):  # no text of data or user code may fail to be shown, as on stderr
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with signals_as_exceptions():
            add_working_directory()
            return _run(arguments, began)
    except BufferRLError as error:
        on_error(error)
        return 2
    except EndedBySignal as end:
        how = f": {end.text}" if isinstance(end, Stopped) else ""
        say(f"buffer-rl: ended by {signal.Signals(end.number).name}{how}", file=sys.stderr)
        return 128 + end.number
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter's last flush fails as well
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.filename is None:
            raise
        hint = "correct the path among the options; BUFFER_RL_TRACEBACK=1 shows what it is used for"
        on_error(ConfigError(f"the system refuses the path: {error.strerror}", where=f"{error.filename}", hint=hint))
        return 2
    except SystemExit as stop:  # argparse ends --help and --version so
        if isinstance(stop.__context__, BrokenPipeError):  # and rich so, with 1, what it prints for nobody
            return 128 + signal.SIGPIPE
        return stop.code if isinstance(stop.code, int) else 0


def open_closed_streams() -> None:
    """Open the null device as each of the descriptors 0 to 2 that the caller closed, and as Python's stream of it.

    Else the next files and sockets would get their numbers, and what processes print would be written into these.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:  # which Ray, for one, does not expect
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def add_working_directory() -> None:
    """Append the working directory to the import path, once, so that ``my_reward:score`` is found there.

    A console script does not have it. Appended, never inserted: a file there must not hide an installed module.
    """
    with raised_as(ConfigError, "there is no working directory any more", OSError, hint="cd to a folder that exists"):
        here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def _run(arguments: Sequence[str], began: float) -> int:
    from buffer_rl.options.help import FlagParser, flags_of, given_flags, normalise_flags, take_items
    from buffer_rl.options.section import did_you_mean, flag_of
    from buffer_rl.options.sources import take_unknown
    from buffer_rl.verbs.table import INSTEAD, VERBS, all_verbs, parser_of, print_notices, summary_of

    arguments = normalise_flags(arguments)
    parser = FlagParser(prog="buffer-rl", description="Reinforcement-learning post-training of language models.")
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    subparsers = parser.add_subparsers(metavar="VERB", title="verbs (buffer-rl VERB --help tells more)")
    verb = arguments[0] if arguments else ""
    verbs = list(VERBS) if verb in VERBS else all_verbs()
    if verb in verbs:
        parser_of(verb)(subparsers, arguments)
    elif verb and not verb.startswith("-"):
        hint = INSTEAD.get(verb) or did_you_mean(verb, verbs) or "buffer-rl --help tells what each does"
        raise ConfigError(f"there is no verb {verb!r}", expected=f"one of {', '.join(verbs)}", hint=hint)
    else:
        for name in verbs:
            subparsers.add_parser(name, help=summary_of(name).replace("%", "%%"))
    namespace, extra = parser.parse_known_args(arguments)
    namespace.began, namespace.arguments = began, arguments
    prog = f"buffer-rl {verb}" if verb in verbs else "buffer-rl"
    print_notices(take_unknown(namespace, take_items(namespace, extra), flags_of(parser), prog=prog))
    idle = [flag_of(name) for name in given_flags(namespace) if name in getattr(namespace, "idle", ())]
    print_notices(f"{flag} changes nothing for {prog}" for flag in idle)
    if namespace.version:
        say(f"buffer-rl {__version__}")
        return 0
    if not hasattr(namespace, "run"):
        parser.print_help()
        return 2
    return int(namespace.run(namespace))


if __name__ == "__main__":
    sys.exit(main())
