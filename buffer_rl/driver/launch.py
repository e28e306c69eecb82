"""Assembles a run from its options, runs it, and takes everything down again.

Everything that is started is put on one exit stack, so that whatever fails, nothing stays behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from buffer_rl.buffer.actor import BufferWatch, start_buffer
from buffer_rl.buffer.client import BufferClient
from buffer_rl.buffer.ledger_audit import ledger_writer
from buffer_rl.buffer.ledger_file import FILE_NAME
from buffer_rl.buffer.storage import StorageUnit, start_storage
from buffer_rl.cluster.actor_group import ActorGroup
from buffer_rl.cluster.environment import StopRequest, direct_variables, signals_as_exceptions, variables
from buffer_rl.cluster.fork_server import fork_server
from buffer_rl.cluster.locality import require_local_trainer
from buffer_rl.cluster.placement import placed
from buffer_rl.cluster.process import starts_engines, with_engine_key
from buffer_rl.driver.async_checks import staleness_notice
from buffer_rl.driver.driver import Driver
from buffer_rl.driver.folders import LINEAGE, check_lineage, folder_lock, save_lock
from buffer_rl.driver.local_roles import RecordedRollouts, RolloutRecorder, RunCheckpoints, Selections
from buffer_rl.driver.provenance import provenance_of
from buffer_rl.driver.restart import Processes, RunSession, run_with_restarts
from buffer_rl.driver.runtime import RayRuntime, Target
from buffer_rl.engines.fleet import EngineFleet
from buffer_rl.engines.host import at_this_node, placed_launcher, places_engines
from buffer_rl.errors import Stopped
from buffer_rl.files.checkpoint import Checkpoint, opened_checkpoint
from buffer_rl.observe.startup import StartUp
from buffer_rl.options.section import dump_args
from buffer_rl.plan.algorithm import (
    REFERENCE_FOLDER,
    checkpoint_folder,
    estimator_of,
    is_supervised,
    own_roles,
    uses_reference,
)
from buffer_rl.plan.counts import with_counts, with_steps
from buffer_rl.plan.roles import ACTOR
from buffer_rl.plan.schedule import (
    RolePlan,
    RunPlan,
    RunResult,
    Schedule,
    idle_workers_text,
    parse_early_stop,
    reads_data_source,
    role_plan,
    rollout_only,
    train_only,
    workers_per_ticket,
)
from buffer_rl.plugin.calls import construct
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.rollout.data_source import SourceAnswers, SourceWatch, start_data_source
from buffer_rl.rollout.user_rollout import GRACE_S
from buffer_rl.rollout.worker import start_rollout_workers
from buffer_rl.train.learning_rate import with_decay_iters
from buffer_rl.train.rank import start_train_group
from buffer_rl.train.reward_model import RewardModelWatch, start_reward_model
from buffer_rl.train.role_worker import start_roles
from buffer_rl.weights.follow import FollowFolder
from buffer_rl.weights.options import engines_may_differ
from buffer_rl.weights.publish import LogProbCheck, Publisher
from buffer_rl.weights.role_weights import FolderUpdates, RoleBroadcasts, RolePublisher
from buffer_rl.weights.sender import Senders

if TYPE_CHECKING:
    from buffer_rl.args import Args
    from buffer_rl.engines.control import EngineControlClient
    from buffer_rl.kinds.engine import EngineLauncher, WeightTransport

CLOSE_TIMEOUT_S = 10.0
"""For rollout workers to close what they opened, and for a checkpoint that is being written to fail and be removed."""
PUBLISH_END_S = 2.0
"""For a publication that is under way to end, so that no engine stays paused. What it waits for may be gone."""


def launch_training(
    args: Args, registry: PluginRegistry, data: Sequence[Mapping[str, Any]] = (), startup: StartUp | None = None
) -> RunResult:
    """Run ``args`` to its end. The final weights are then in ``run_dir/hf``, if the run has a trainer.

    data: facts about the data sources, for the run's provenance. startup: what was ready before.
    Raises Stopped if a signal ended it well, and the error of ``buffer_rl.errors`` that ended
    the run, after all of its processes have stopped.
    """
    run_dir = Path(args.run_dir)
    args = with_engine_key(with_steps(with_counts(args)))
    with ExitStack() as stack:
        stop = StopRequest()
        stack.enter_context(signals_as_exceptions(stop.take))
        stack.enter_context(variables(direct_variables(args)))
        if args.ray_address is None:
            stack.enter_context(fork_server())  # unless the command has started one
        stack.enter_context(folder_lock(run_dir))
        stack.enter_context(save_lock(args))
        checkpoint = stack.enter_context(opened_checkpoint(args.load, run_dir)) if args.load is not None else None
        check_lineage(args, checkpoint.step if checkpoint else 0)  # no other run can write to the folder by now
        provenance = provenance_of(args, registry, data)
        registry.call_hook("buffer_rl_configure", config=args)
        session = RunSession(args, registry, checkpoint, provenance, stack, startup)

        def attempt(start: Checkpoint | None, processes: Processes) -> RunResult:
            run = _Run(args, registry, run_dir, start, session, processes)
            result = run.driver(stop).run()
            if run.train is not None and stop.after_step:  # else the time is short
                run.save_hf(str((run_dir / "hf").absolute()))
            return result

        result = run_with_restarts(args, checkpoint, session.observer, attempt)
    if result.signal is not None:
        raise Stopped(result.signal, result.steps)
    return result


class _Run:
    """The parts of a run that a global restart starts again, in the order in which they need each other."""

    def __init__(
        self,
        args: Args,
        registry: PluginRegistry,
        run_dir: Path,
        checkpoint: Checkpoint | None,
        session: RunSession,
        stack: Processes,
    ) -> None:
        self.stack = stack
        self.registry = registry
        self.run_dir = run_dir
        self.checkpoint = checkpoint
        self.session = session
        self.observer = session.observer
        rollout = registry.resolve("rollout", args.rollout_function_path)
        self.rollouts_use_engine = bool(getattr(rollout, "uses_engine", True))
        self.workers_per_ticket = workers_per_ticket(args, concurrent=bool(getattr(rollout, "concurrent", False)))
        if (idle := idle_workers_text(args, self.workers_per_ticket)) and not train_only(args):
            self.observer.notice(idle)
        # Engines load while Ray starts: they are separate processes and take the longest. Those on nodes need it.
        self.fleet: EngineFleet | None = None
        self.evaluates = bool(args.eval_prompt_data or args.eval_config) and not train_only(args)
        asks_engine = self.evaluates or (self.rollouts_use_engine and not train_only(args))
        on_nodes = asks_engine and places_engines(args)
        early = asks_engine and not on_nodes and args.ray_address is None
        if early:
            self._start_fleet(args, registry)
        session.connect()
        self.placement = stack.enter_context(placed(args, asks_engine and starts_engines(args), self.observer.notice))
        if asks_engine and not early:
            launcher = placed_launcher(self.placement, self.observer.notice) if on_nodes else registry
            self._start_fleet(at_this_node(args), launcher)
        logs = str((run_dir / "logs").absolute())
        self.source = self._start_source(args, logs) if reads_data_source(args) else None
        self.args = args
        args_text = dump_args(args)
        # Each is on the stack before the next is started; what is stopped last is what the others ask.
        actor = start_buffer(args_text)
        stack.stops(ActorGroup("buffer", lambda _: actor))
        self.buffer = BufferClient(actor, timeout_s=args.buffer_timeout_s, caller="driver")
        self.num_rollouts = self._num_rollouts()
        self.role_plan = self._role_plan()
        self.trained: dict[str, ActorGroup] = {}
        for role in self.role_plan.trained:
            text = dump_args(with_decay_iters(args, self.role_plan.num_updates(role, self.num_rollouts)))
            self.trained[role] = stack.stops(start_train_group(role, args, text, actor, logs, self.placement))
        roles = self.role_plan.dedicated_roles
        started = start_roles(args, registry, roles, args_text, actor, logs, self.placement)
        self.roles = {role: stack.stops(group) for role, group in started.items()}
        self.reward: ActorGroup | None = None
        if args.rm_model and not train_only(args):
            self.reward = stack.stops(start_reward_model(args, logs, self.placement))
        if self.fleet is not None:
            self.args = args = args.model_copy(update=self.fleet.addresses)
        self.rollout = None if train_only(args) else self._start_rollout(args, dump_args(args), actor, logs)
        self.engines: EngineControlClient | None = None
        self.engine_calls: dict[str, Target] = {}
        if self.fleet is not None:
            self._await_engines(self.fleet)
        self.reference = self._reference_updates()
        self._wait_ready()

    def _await_engines(self, fleet: EngineFleet) -> None:
        fleet.wait_ready()
        self.observer.ready("engine")
        if self.trained:
            self.engines = fleet.control(self.args.update_weights_timeout_s)
            calls = self.stack.local("engines", self.engines, end_s=lambda: PUBLISH_END_S, then=self.engines.close)
            self.engine_calls["engines"] = calls
            if self.args.offload_rollout:
                self.engines.release_memory()  # the trainer builds its models next

    def _start_rollout(self, args: Args, args_text: str, buffer: Any, logs: str) -> ActorGroup:
        storage = self._start_storage(args.num_data_storage_units, buffer)
        reward = self.reward.actors if self.reward is not None else ()
        workers = start_rollout_workers(args, args_text, buffer, logs, self.placement, storage, self.source, reward)
        return self.stack.stops(workers, "close", CLOSE_TIMEOUT_S)

    def _start_fleet(self, args: Args, launcher: PluginRegistry | EngineLauncher) -> None:
        self.fleet = EngineFleet(args, str(self.run_dir), launcher, self.observer.notice)
        self.stack.enter_context(self.fleet)

    @property
    def train(self) -> ActorGroup | None:
        """The actor's ranks."""
        return self.trained.get(ACTOR)

    def _role_plan(self) -> RolePlan:
        args = self.args
        if rollout_only(args):
            return RolePlan(trained=(), max_restarts=args.role_max_restarts)
        if self.num_rollouts == 0:  # no rollout has work for a role
            return RolePlan(max_restarts=args.role_max_restarts)
        estimator = self.registry.resolve("advantage", estimator_of(args)[1])
        own = [row for _, row in own_roles(args, self.registry).values()]
        backend = None if args.train_backend == "torch" else self.registry.resolve("trainer", args.train_backend)
        return role_plan(args, estimator, own, backend)

    def driver(self, stop: StopRequest) -> Driver:
        """The driver, with its plan, roles and watchers."""
        args = self.args
        local = self.stack.local
        targets: dict[str, Target] = {"buffer": local("buffer", self.buffer), **self.engine_calls}
        if self.rollout is not None:
            targets["rollout"] = self.rollout
        else:
            template, replays = args.load_debug_rollout_data or "", args.replay_kept_tokens
            targets["rollout"] = local("rollout", RecordedRollouts(template, self.buffer, replays=replays))
        targets.update(self.trained)
        targets.update(self.roles)
        publisher = self._publisher()
        if publisher is not None:
            targets["publish"] = publishing = local("publish", publisher, end_s=lambda: PUBLISH_END_S)
            self.stack.callback(lambda: wait(publishing.start("close").futures, timeout=PUBLISH_END_S))
        if self.reference is not None:
            targets["reference"] = local("reference", self.reference)
        plan = self._plan()
        if plan.schedule.by_window:
            waiting = BufferClient(self.buffer.actor, timeout_s=args.buffer_timeout_s, caller="selection")
            targets["selection"] = local("selection", Selections(waiting))
        if plan.saves:
            facts = self.session.provenance.facts() | {"num_rollouts": plan.num_rollouts}
            facts[LINEAGE] = self.session.lineage
            checkpoints = RunCheckpoints(
                self.session.args, buffer=self.buffer, trained=self.trained, reference=self.reference, provenance=facts
            )
            targets["save"] = local("save", checkpoints, end_s=lambda: max(CLOSE_TIMEOUT_S, checkpoints.time_left()))
        if args.save_debug_rollout_data:
            targets["record"] = local("record", RolloutRecorder(args.save_debug_rollout_data, self.buffer))
        watchers: list[Callable[[], None]] = [self._buffer_watch()]
        watchers += [self.fleet.check] if self.fleet is not None else []
        if self.source is not None:
            watchers.append(watch := SourceWatch(self.source, args, self.observer.notice))
            self.stack.callback(watch.close)
        if self.reward is not None:
            watchers.append(RewardModelWatch(self.reward.actors, args, self.observer.notice))
        self.observer.planned(plan.num_rollouts)
        starved = self.fleet.starved_version if self.fleet is not None and publisher is not None else lambda: None
        return Driver(plan, RayRuntime(targets, watchers), self.observer, stop, starved)

    def _publisher(self) -> Publisher | RolePublisher | None:
        """The publisher to the engines and to the roles that need the actor's weights; None without any."""
        args, train, publisher = self.args, self.train, None
        if train is None:
            return None
        senders = Senders(lambda *call: train.start("send_weights", *call).futures, args.train_timeout_s)
        if self.engines is not None:
            publisher = self._engine_publisher(senders, train)
        if "actor_fwd" not in self.roles:
            return publisher
        role = self.roles["actor_fwd"]
        updates: RoleBroadcasts | FolderUpdates = FolderUpdates.of("actor_fwd", args, self._write_hf, train, role)
        if getattr(transport := self._transport(), "reaches_roles", False):
            limit, busy = args.update_weights_timeout_s, self._trainer_is_busy
            updates = RoleBroadcasts(role, transport, senders, timeout_s=limit, trainer_is_busy=busy)
        return RolePublisher(publisher, "actor_fwd", updates.update, self.observer.notice)

    def _engine_publisher(self, senders: Senders, train: ActorGroup) -> Publisher:
        args, schedule = self.args, Schedule.of(self.args)
        assert self.engines is not None
        follow = FollowFolder.from_args(args, self.save_hf)
        publisher = Publisher(
            self._transport(),
            senders,
            self.engines,
            compare=args.check_weight_update_equal,
            check=LogProbCheck.from_args(args, train),
            timeout_s=2 * args.update_weights_timeout_s + args.engine_start_timeout_s,
            notice=self.observer.notice,
            hold=lambda: self._of_workers("hold", self._drain_timeout_s),
            unhold=lambda: self._of_workers("unhold"),
            drains=schedule.by_window and schedule.drains,
            follow=None if follow is None else follow.write,
        )
        if schedule.max_staleness:
            self.observer.notice(staleness_notice(self.args))
            if schedule.by_window and not schedule.drains:
                publisher.try_retraction()
        return publisher

    @property
    def _drain_timeout_s(self) -> float:
        """For the requests that run to end: each has a deadline of its own."""
        return float(self.args.rollout_timeout_s)

    def _of_workers(self, method: str, *args: object) -> None:
        if self.rollout is not None:
            self.rollout.call(method, *args, timeout_s=self._drain_timeout_s + GRACE_S)

    def _transport(self) -> WeightTransport:
        name = self.args.weight_sync_mode
        transport = construct("weight_transport", name, self.registry.resolve("weight_transport", name), self.args)
        return cast("WeightTransport", transport)

    @property
    def _trainer_is_busy(self) -> bool:
        """Whether the trainer works on groups of rollouts that run."""
        works = self.args.stream_gradients or self.role_plan.models_of(ACTOR)
        return Schedule.of(self.args).streams and bool(works)

    @property
    def _publish_timeout_s(self) -> float:
        schedule = Schedule.of(self.args)
        drain_s = self._drain_timeout_s if schedule.by_window and schedule.max_staleness else 0.0
        return 3 * self.args.update_weights_timeout_s + self.args.engine_start_timeout_s + GRACE_S + drain_s

    def save_hf(self, path: str) -> None:
        """Write the actor's weights as a Hugging Face folder in the number format of ``--save-dtype``."""
        assert self.train is not None
        self.train.call("save_hf", path, timeout_s=self.args.train_timeout_s)

    def _write_hf(self, path: str) -> None:
        """The same, as they are trained: for the run's own models."""
        assert self.train is not None
        self.train.call("write_hf", path, timeout_s=self.args.train_timeout_s)

    def _reference_updates(self) -> FolderUpdates | None:
        """What updates the reference model, which the trainer or a role has; None without one."""
        if self.train is None or not uses_reference(self.args) or self.num_rollouts == 0:
            return None
        return FolderUpdates.of("ref", self.args, self._write_hf, self.train, self.roles.get("ref"))

    def _num_rollouts(self) -> int:
        args = self.args
        if args.num_rollout is not None:
            return args.num_rollout
        assert args.num_epoch is not None  # checked with the options
        if self.source is not None:
            answers = SourceAnswers.from_args(args)
            self.buffer.set_source_length(answers.wait("num_rows", self.source.num_rows.remote))
        return self.buffer.get_num_rollout_per_epoch(args.num_epoch)

    def _plan(self) -> RunPlan:
        args = self.args
        asks_engine = self.rollouts_use_engine and not train_only(args)
        return RunPlan(
            num_rollouts=self.num_rollouts,
            schedule=Schedule.of(args),
            first_rollout=self.checkpoint.step if self.checkpoint else 0,
            publish_at_start=self.checkpoint is not None or engines_may_differ(args) or args.offload_rollout,
            compare_log_probs=asks_engine and not is_supervised(args) and args.max_logprob_diff is not None,
            publish_each_step=(asks_engine or "actor_fwd" in self.roles) and self.train is not None,
            ref_update_interval=args.ref_update_interval if self.train is not None else None,
            roles=self.role_plan,
            evaluate=self.evaluates,
            eval_interval=args.eval_interval,
            eval_before_train=not args.skip_eval_before_train,
            owes_evaluation=self.session.owes_evaluation(self.checkpoint),
            offload_train=args.offload_train and self.engines is not None,
            offload_rollout=args.offload_rollout and self.engines is not None,
            saves=bool(args.save) and self.train is not None,
            save_interval=args.save_interval,
            async_save=args.async_save,
            save_on_exit_s=args.save_on_exit_s,
            records=bool(args.save_debug_rollout_data),
            early_stop=parse_early_stop(args.early_stop) if args.early_stop else None,
            rollout_timeout_s=args.rollout_timeout_s + 2 * GRACE_S,  # the worker's own deadline comes first
            train_timeout_s=args.train_timeout_s,
            publish_timeout_s=self._publish_timeout_s,
            save_timeout_s=args.save_timeout_s + GRACE_S,  # each call's own deadline, which says more, comes first
            buffer_timeout_s=args.buffer_timeout_s,
            max_rollout_retries=args.buffer_max_restarts,
            workers_per_ticket=self.workers_per_ticket,
            passes_on_tickets=not (args.rollout_sample_filter_path or args.rollout_all_samples_process_path),
        )

    def _wait_ready(self) -> None:
        limit = self.args.train_timeout_s
        groups = [*self.roles.values(), self.reward, self.rollout]
        loading = [group.start("ready") for group in groups if group is not None]  # while the trainers load
        for role, trained in self.trained.items():
            master, port = trained.call("host", timeout_s=limit)
            if role == ACTOR:  # the one whose weights are published
                require_local_trainer(self.args.weight_sync_mode, master)
            trained.call("setup", master, port, timeout_s=limit)
            if self.checkpoint is not None:
                if role == ACTOR and self.reference is not None:  # first, as building a model may draw random numbers
                    self.reference.restore(self.checkpoint.folder / REFERENCE_FOLDER, self.checkpoint.step)
                trained.call("load", str(self.checkpoint.folder / checkpoint_folder(role)), timeout_s=limit)
        if self.checkpoint is not None and self.trained and self.num_rollouts > 0:
            # A run that only evaluates may have other data, or none.
            self.buffer.load(str(self.checkpoint.folder))
        if self.trained:
            self.observer.ready("trainer")
        for call in loading:
            call.wait(limit)

    def _start_source(self, args: Args, logs: str) -> Any:
        """The user's data source, constructed: what its constructor raises must not wait for the engines."""
        actor = start_data_source(args, logs)
        self.stack.stops(ActorGroup("data_source", lambda _: actor))
        SourceAnswers.from_args(args).wait("setup", actor.setup.remote)
        return actor

    def _start_storage(self, num_units: int, buffer: Any) -> Sequence[StorageUnit]:
        """The processes that own large payloads; none where the Buffer does."""
        if num_units == 0:
            return ()
        units = start_storage(num_units, buffer, self.args.buffer_timeout_s)
        storage = ActorGroup("storage", lambda index: units[index].actor, num_units)
        self.stack.stops(storage)
        storage.call("ready", timeout_s=self.args.train_timeout_s)
        return units

    def _buffer_watch(self) -> BufferWatch:
        def show(progress: Mapping[str, Any]) -> None:
            if progress.get("wanted"):
                self.observer.groups(progress["finished"], progress["wanted"], progress["dropped"])

        return BufferWatch(
            self.buffer.actor,
            # Noticed, ended and started again before its callers reach their deadlines.
            hang_s=min(self.args.buffer_hang_timeout_s, self.args.buffer_timeout_s / 2),
            start_s=self.args.buffer_timeout_s,
            shown=show,
            notice=self.observer.notice,
            process=lambda: ledger_writer(self.run_dir / FILE_NAME),
        )
