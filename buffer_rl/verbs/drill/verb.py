"""``buffer-rl drill``: a configuration is put to the test with faults, and gets a certificate."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from buffer_rl.args import Args
from buffer_rl.buffer.ledger_file import FILE_NAME
from buffer_rl.cluster.process import starts_engines
from buffer_rl.errors import BufferRLError, ConfigError
from buffer_rl.observe.progress import format_duration
from buffer_rl.observe.terminal import say
from buffer_rl.options.sources import resolve_namespace
from buffer_rl.verbs import train
from buffer_rl.verbs.drill import answers
from buffer_rl.verbs.drill.certificate import Certificate, Row, line_of
from buffer_rl.verbs.drill.faults import Fault, hold_back, lift, moment, planned, strike, usual_step
from buffer_rl.verbs.drill.reward import KINDS, PLAN, reward_marks
from buffer_rl.verbs.drill.runs import COUNTED, DrillRun, Outcome, fates, is_small, write_small

_DESCRIPTION = """\
Test a configuration against faults before it is given to a cluster: short runs of it on this machine, in which
processes are killed, stopped and slowed down, rewards fail, engines answer falsely, a disk is full and the network is
cut. The certificate says what was put in, found and survived, and that no group was lost or trained twice and no
failure became a reward.

The options are those of train. A model of more than 100 MB is replaced by a small random one of its architecture.
"""
KINDS_OF_RUNS = ("kill", "stop", "slow", "cut", "reward", "answers", "disk", "driver")
SHORT_S = "5"
"""Deadlines of hangs, in place of those of the configuration."""
CUT_S = 3.0
FAILING_GROUPS = 15
"""Groups that meet a fault of the reward, about, or a false answer of an engine."""
REWARD_S = 30.0
"""Deadline of a reward at most: one of the faults is that it hangs."""
MODELS = ("ref_load", "critic_load", "opd_teacher_load")


def add_parser(subparsers: argparse._SubParsersAction[Any], argv: Sequence[str]) -> None:
    """Add the verb, with the flags of ``train``."""
    usage = "buffer-rl drill --config FILE [--OPTION VALUE ...]"
    parser = train.add_parser(subparsers, argv, name="drill", description=_DESCRIPTION, usage=usage)
    _add_own_flags(parser)
    parser.set_defaults(run=run)


def _add_own_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--drill-dir", metavar="FOLDER", help="its folder (default: beside --run-dir, with -drill)")
    parser.add_argument(
        "--drill-steps", type=int, default=6, metavar="INT", help="steps of a run at least (default: 6)"
    )
    parser.add_argument(
        "--drill-model", choices=["auto", "own", "small"], default="auto", help="the model (default: auto)"
    )
    parser.add_argument(
        "--drill-faults", nargs="+", choices=KINDS_OF_RUNS, default=[*KINDS_OF_RUNS], help="which (default: all)"
    )
    parser.add_argument("--every-phase", action="store_true", help="each fault in every phase of a step: takes longer")


def run(namespace: argparse.Namespace) -> int:
    """Drill. Returns 1 if the certificate is not passed; raises BufferRLError."""
    args = resolve_namespace(namespace).args
    folder = Path(namespace.drill_dir or f"{args.run_dir.rstrip('/')}-drill").absolute()
    if folder.exists():
        if not (folder / "certificate.json").exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is there, and is no drill's", where="--drill-dir", hint="give another folder")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / "certificate.json").write_text("{}\n")
    certificate = Drill(args, namespace, folder).certificate()
    page = certificate.write(folder)
    say(*certificate.lines(), f"certificate              {page}", sep="\n")
    return 0 if certificate.passed else 1


class Drill:
    """One drill in ``folder``: an undisturbed run, and others that are compared with it.

    found: the certificate, as far as it is known. quiet_s: seconds of the undisturbed run, its start included."""

    def __init__(self, args: Args, namespace: argparse.Namespace, folder: Path) -> None:
        from buffer_rl.plan.schedule import Schedule

        self.args, self.folder, self.kinds = args, folder, list(namespace.drill_faults)
        self.outcomes: dict[str, Outcome] = {}
        self.quiet_s = 0.0
        self.promised = args.deterministic and Schedule.of(args).max_staleness == 0
        self.own = _without_own_flags(namespace.arguments[1:])
        actions = [kind for kind in ("kill", "stop", "slow") if kind in self.kinds]
        self.faults = planned(_parts(args), actions, every_phase=namespace.every_phase)
        if "cut" in self.kinds:
            self.faults.append(Fault(kind="cut", part="router", phase="generation"))
        self.num_steps = max(namespace.drill_steps, 3 * len(self.faults))
        source = Path(args.hf_checkpoint or "")
        self.found = Certificate(command=shlex.join(["buffer-rl", *namespace.arguments]), model=f"{source}, as it is")
        if namespace.drill_model == "small" or (namespace.drill_model == "auto" and not is_small(source)):
            write_small(source, folder / "model")
            self.found.model = f"a small random one of the architecture of {source}"

    def certificate(self) -> Certificate:
        """Run everything. Raises BufferRLError if the undisturbed run fails."""
        usual = self._undisturbed()
        # While a fault passes or is noticed, a fast run trains many steps.
        waits = {"slow": CUT_S, "cut": CUT_S, "stop": float(SHORT_S)}
        seconds = sum(waits.get(fault.kind, 0.0) for fault in self.faults)
        needed = 2 * len(self.faults) + int(seconds / usual["perf/step_time"])
        if needed > self.num_steps:
            self.num_steps = needed + len(self.faults)
            for name in ("undisturbed", "undisturbed_saves"):
                shutil.rmtree(self.folder / name)
            usual = self._undisturbed()
        disk = Fault(kind="disk", part="trainer rank", phase="training")
        runs: Sequence[tuple[str, bool, Callable[[], None]]] = (
            (f"{len(self.faults)} faults of processes", bool(self.faults), lambda: self._disturbed(usual)),
            ("a reward that fails", "reward" in self.kinds, self._with_failing_rewards),
            ("false answers of engines", "answers" in self.kinds, self._with_false_answers),
            ("a full disk", "disk" in self.kinds, lambda: self._continued("full disk", disk, usual)),
            ("a driver that is killed", "driver" in self.kinds, lambda: self._continued("driver", None, usual)),
        )
        chosen = [(what, begin) for what, is_chosen, begin in runs if is_chosen]
        for number, (what, begin) in enumerate(chosen, start=1):
            say(progress_line(number, len(chosen), what, self.quiet_s, seconds * (number == 1)))
            begin()
        quiet, *others = self.outcomes.values()
        found, num_groups = self.found, self.num_steps * self.args.rollout_batch_size
        found.num_steps = self.num_steps
        found.groups_lost = sum(num_groups - len(each.trained) for each in others)
        found.groups_doubled = sum(len(each.doubled) for each in self.outcomes.values())
        if self.promised:
            all_ended = len(self.outcomes) == len(found.runs)
            found.equal_bits = all_ended and all(each.weights == quiet.weights for each in others)
        return found

    def _undisturbed(self) -> dict[str, float]:
        say(f"undisturbed run of {self.num_steps} steps")
        began = time.monotonic()
        with self._run("undisturbed") as run:
            if status := run.wait():
                what = f"the undisturbed run ended with status {status}; the end of its output:\n{run.last_lines()}"
                hint = "mend the configuration first; buffer-rl train --dry-run checks it in seconds"
                raise ConfigError(what, where=str(run.output), hint=hint)
            usual = usual_step(run.steps())
            self._end("undisturbed", run)
        self.quiet_s = time.monotonic() - began
        together = format_duration(self.quiet_s)
        say(f"undisturbed run: {usual['perf/step_time']:.2f} s a step, {together} with its start")
        return usual

    def _disturbed(self, usual: dict[str, float]) -> None:
        """One run that meets a fault in each step."""
        with self._run("processes") as run:
            for fault in self.faults:
                if run.trains_on(len(run.steps())):
                    self._strike(run, fault, usual)
                else:
                    self._add(Row(fault=str(fault), wrong=("the run had ended before",)))
            self._end("processes", run)

    def _strike(self, run: DrillRun, fault: Fault, usual: dict[str, float]) -> None:
        run.pause(moment(fault.phase, usual))
        steps = run.steps()
        met, began = strike(fault, run.process.pid), time.monotonic()
        if met is None:
            self._add(Row(fault=str(fault), wrong=("there is no such process",)))
            return
        passes = fault.kind in ("cut", "slow")
        if fault.kind == "slow":
            hold_back(met, CUT_S)
        elif passes:
            run.pause(CUT_S)
            lift(fault, met)
        else:
            run.wait_until(lambda: not met.alive())
        # In a publication, the step that is under way has been trained.
        survived = run.trains_on(len(run.steps()) + (fault.phase == "publication"))
        recovered_s = time.monotonic() - began if survived else None
        wrong = [] if survived else [run.last_lines()]
        found = "waited for" if passes else f"process {met.pid} was replaced"
        if passes != met.alive():
            wrong.append("it was replaced" if passes else "it is still there")
            found = ""
        last = int(steps[-1]["step"]) if steps else None
        self._add(Row(fault=str(fault), step=last, found=found, recovered_s=recovered_s, wrong=tuple(wrong)))

    def _with_failing_rewards(self) -> None:
        """One run whose reward raises, ends its process, is no number, or is refused, once for some samples."""
        reward = self.args.custom_rm_path or self.args.rm_type
        if not reward or self.args.custom_group_rm_path:
            self.found.left_out["rewards that fail"] = "the run has no reward of single samples that can be wrapped"
            return
        marks = self.folder / "reward_faults"
        marks.mkdir()
        every = max(2, self.num_steps * self.args.rollout_batch_size // FAILING_GROUPS)
        plan = {"folder": str(marks), "every": every, "kinds": KINDS, "reward": reward}
        flags = ["--custom-rm-path", "buffer_rl.verbs.drill.reward:score", "--rm-timeout-s"]
        flags += [str(min(self.args.rm_timeout_s, REWARD_S))]
        flags += ["--on-reward-error", "retry", "--no-trial", "--max-data-failures", str(self.num_steps * 1000)]
        with self._run("rewards", flags, {PLAN: json.dumps(plan)}) as run:
            self._end("rewards", run)
        found = fates(run.folder / FILE_NAME, reward_marks(marks))
        self.found.rewards_from_failures = sum(counts[COUNTED] for counts in found.values())
        self._add_fates("reward: {}, of {} groups", found, Counter())
        self._leave_out_unmet("reward", "groups", KINDS, found)

    def _with_false_answers(self) -> None:
        """One run in which some answers of the engines are none that a sound engine gives."""
        if "engine" not in _parts(self.args):
            self.found.left_out["false answers of engines"] = "the run does not start its engines"
            return
        notes = self.folder / "false_answers"
        notes.mkdir()
        every = max(3, self.num_steps * self.args.rollout_batch_size // (2 * FAILING_GROUPS))
        own = {"engine": self.args.rollout_engine, "plugins": list(self.args.plugin)}
        flags = ["--rollout-engine", "buffer_rl.verbs.drill.answers:launch", "--no-trial"]
        flags += ["--max-infra-failures", str(self.num_steps * 1000), "--weight-sync-mode", self.args.weight_sync_mode]
        plan = {"folder": str(notes), "every": every, **own}
        with self._run("answers", flags, {answers.PLAN: json.dumps(plan)}) as run:
            self._end("answers", run)
        asked_again, marks = answers.notes(notes)
        found = fates(run.folder / FILE_NAME, marks)
        self._add_fates("engine: {}, {} answers", found, asked_again)
        self._leave_out_unmet("engine", "requests", answers.KINDS, found)

    def _continued(self, name: str, fault: Fault | None, usual: dict[str, float]) -> None:
        """A run that ends in its middle, and another one that continues from its newest checkpoint."""
        with self._run(name) as run:
            run.trains_on(self.num_steps // 2 - 1)
            run.pause(moment("training", usual))
            step, began = len(run.steps()), time.monotonic()
            if fault is None:
                run.process.kill()
                run.process.wait()
                found = "its end was seen from outside"
            else:
                met = strike(fault, run.process.pid)
                found = _first_error(run) if run.wait() else ""
                if met is not None:
                    lift(fault, met)
        with self._run(name, ["--load", "auto"]) as again:
            again.trains_on(step)
            seconds = time.monotonic() - began
            self._end(name, again)
        what = "driver killed in training" if fault is None else str(fault)
        self._add(Row(fault=what, step=step, found=found, recovered_s=seconds))

    @contextmanager
    def _run(self, name: str, flags: Sequence[str] = (), environ: dict[str, str] | None = None) -> Iterator[DrillRun]:
        restarts = str(2 * self.num_steps)
        own = {
            "num-rollout": str(self.num_steps), "num-epoch": "none", "load": "none", "eval-interval": "none",
            "early-stop": "none", "keep-best": "none", "keep-last": "none", "save-interval": "1",
            "save": str(self.folder / f"{name.replace(' ', '_')}_saves"), "progress": "plain",
            "max-global-restarts": restarts, "role-max-restarts": restarts, "buffer-max-restarts": restarts,
            "engine-max-restarts": restarts, "rollout-health-check-timeout": SHORT_S, "buffer-hang-timeout-s": SHORT_S,
            "hang-timeout-s": SHORT_S,
        }  # fmt: skip
        if (model := self.folder / "model").exists():
            own |= {"hf-checkpoint": str(model)}
            own |= {key.replace("_", "-"): str(model) for key in MODELS if getattr(self.args, key)}
        words = [word for key, value in own.items() for word in (f"--{key}", value)]
        folder = self.folder / name.replace(" ", "_")
        run = DrillRun(folder, [*self.own, *words, *flags], {**os.environ, **(environ or {})})
        try:
            yield run
        finally:
            run.stop()

    def _end(self, name: str, run: DrillRun) -> None:
        """Wait for the end of a run, and note what is wrong with it."""
        wrong = [f"it ended with status {status}:\n{run.last_lines()}"] if (status := run.wait()) else []
        try:
            found = self.outcomes[name] = Outcome.of(run.folder)
        except BufferRLError as error:
            wrong.append(str(error))
        else:
            wrong += [*found.doubled, *found.faults]
            if (missing := self.num_steps * self.args.rollout_batch_size - len(found.trained)) != 0:
                wrong.append(f"{missing} groups are missing")
            if self.promised and found.weights != self.outcomes["undisturbed"].weights:
                wrong.append(f"its weights are others; {found.quarantined} groups are in quarantine")
        self.found.runs[name] = tuple(wrong)

    def _add_fates(self, title: str, found: Mapping[str, Counter[str]], asked_again: Counter[str]) -> None:
        """A row for each kind of fault. asked_again: how often the client has repeated a request itself, by kind."""
        for kind, counts in found.items():
            fate = ", ".join(f"{number} {what}" for what, number in counts.items())
            wrong = (fate,) if counts[COUNTED] > asked_again[kind] else ()
            self._add(Row(fault=title.format(kind, counts.total()), found=fate, wrong=wrong))

    def _leave_out_unmet(self, part: str, what: str, kinds: Iterable[str], found: Mapping[str, Counter[str]]) -> None:
        if unmet := [kind for kind in kinds if kind not in found]:
            self.found.left_out[f"{part}: {', '.join(unmet)}"] = f"so few {what} met none: more --drill-steps"

    def _add(self, row: Row) -> None:
        self.found.rows.append(row)
        say(line_of(row))


def progress_line(number: int, of: int, what: str, quiet_s: float, waits_s: float) -> str:
    """What is begun, and the least time to the end: each run takes as long as the undisturbed one, ``quiet_s``, and
    the first as well as its faults last, ``waits_s``."""
    left = format_duration((of - number + 1) * quiet_s + waits_s)
    return f"run {number} of {of}, with {what}; to the end of the drill {left} or more"


def _parts(args: Args) -> list[str]:
    """The parts of ``faults.TITLES`` that the run has as processes of their own."""
    from buffer_rl.plan.roles import worker_counts

    found = ["rollout worker", "Buffer", "trainer rank"]
    found += ["engine"] if starts_engines(args) else []
    return found + (["role"] if any(worker_counts(args).values()) else []) + (["reward model"] if args.rm_model else [])


def _first_error(run: DrillRun) -> str:
    lines = [line for line in run.output.read_text(errors="replace").splitlines() if "error:" in line]
    return lines[0][:200] if lines else ""


def _without_own_flags(arguments: Sequence[str]) -> list[str]:
    """The arguments of ``train`` among those of the drill."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_own_flags(own)
    return own.parse_known_args(arguments)[1]
