"""Starts the parts of a run, has the driver run it, and takes everything down again.

Each part is one function (``_engines``, ``_buffer`` …), in the order of ``_Run.start``, with up to three steps and a
``yield`` between them: it starts, loads, is ready. All parts take one step before any takes the next. As soon as a part
has started, ``Processes`` knows what calls, watches and stops it. So nothing stays behind, whatever fails: the last
part is stopped first.

Who waits for whom: while parts start, the driver waits for Ray, for the constructor of the user's data source, for
storage processes and for the router's address alone. It then waits for engines, which take the longest, and at last for
trainers, and for the models that others load at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from buffer_rl.args import Args
from buffer_rl.buffer.actor import BufferActor, start_buffer, watch_buffer
from buffer_rl.buffer.client import BufferClient
from buffer_rl.buffer.ledger_audit import ledger_writer
from buffer_rl.buffer.ledger_file import FILE_NAME
from buffer_rl.buffer.state import BufferState
from buffer_rl.buffer.storage import start_storage
from buffer_rl.cluster.actor_group import ActorGroup
from buffer_rl.cluster.dispatch import Method, Ts
from buffer_rl.cluster.environment import StopRequest, direct_variables, signals_as_exceptions, variables
from buffer_rl.cluster.fork_server import fork_server
from buffer_rl.cluster.hangs import HangWatch, ReplacementWatch
from buffer_rl.cluster.locality import require_local_trainer
from buffer_rl.cluster.member import Member
from buffer_rl.cluster.placement import placed
from buffer_rl.cluster.process import starts_engines, with_engine_key
from buffer_rl.cluster.session import check_local_ray
from buffer_rl.driver.driver import Driver
from buffer_rl.driver.folders import LINEAGE, START, check_lineage, folder_lock, save_lock
from buffer_rl.driver.local_roles import RecordedRollouts, RolloutRecorder, RunCheckpoints
from buffer_rl.driver.offload import begins_asleep
from buffer_rl.driver.provenance import provenance_of
from buffer_rl.driver.restart import Processes, RunSession, run_with_restarts
from buffer_rl.driver.runtime import RayRuntime
from buffer_rl.engines.control import EngineControlClient
from buffer_rl.engines.fleet import EngineFleet
from buffer_rl.engines.host import at_this_node, placed_launcher, places_engines
from buffer_rl.errors import Stopped
from buffer_rl.files.checkpoint import Checkpoint, opened_checkpoint
from buffer_rl.kinds.engine import WeightTransport
from buffer_rl.kinds.trainer import Memory
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
from buffer_rl.plan.staleness import staleness_notice
from buffer_rl.plugin.calls import construct
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.rollout.data_source import DataSourceActor, source_answers, start_data_source
from buffer_rl.rollout.user_rollout import GRACE_S
from buffer_rl.rollout.worker import RolloutWorker, start_rollout_workers
from buffer_rl.trainer.learning_rate import with_decay_iters
from buffer_rl.trainer.rank import TrainRank, start_train_group
from buffer_rl.trainer.reward_model import start_reward_model, watch_reward_model
from buffer_rl.trainer.role_worker import RoleWorker, start_roles
from buffer_rl.weights.adapters import AdapterCheck, AdapterTransport, MergedShare
from buffer_rl.weights.follow import FollowFolder
from buffer_rl.weights.options import engines_may_differ, publishes_adapters
from buffer_rl.weights.publish import LogProbCheck, Publisher
from buffer_rl.weights.role_weights import FolderUpdates, RoleBroadcasts, RolePublisher
from buffer_rl.weights.sender import Senders

CLOSE_TIMEOUT_S = 10.0
"""For rollout workers to close what they opened, and for a checkpoint that is being written to fail and be removed."""
PUBLISH_END_S = 2.0
"""For a publication that is under way to end, so that no engine stays paused. What it waits for may be gone."""
Part = Iterator[None]
"""The steps of a part; it does not need all of them."""
STEPS = ("start", "load", "be ready")


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
            run = _Run(args, registry, start, session, processes)
            run.start()
            result = run.driver(stop).run()
            if run.trained and stop.after_step:  # else the time is short
                run.save_hf(str((run_dir / "hf").absolute()))
            return result

        result = run_with_restarts(args, checkpoint, session.observer, attempt)
        session.observer.ended(result)
    if result.signal is not None:
        raise Stopped(result.signal, result.steps)
    return result


@dataclass(eq=False)
class _Run:
    """One start of a run: what a global restart does again. What parts find out for those after them is kept here."""

    args: Args
    registry: PluginRegistry
    checkpoint: Checkpoint | None
    session: RunSession
    processes: Processes
    fleet: EngineFleet | None = None
    engines: EngineControlClient | None = None
    source: Any = None
    trained: dict[str, ActorGroup] = field(default_factory=dict)
    reference: FolderUpdates | None = None
    reward: ActorGroup | None = None
    storage: Mapping[str, Any] = field(default_factory=dict)
    rollout: ActorGroup | None = None

    def __post_init__(self) -> None:
        args, self.observer = self.args, self.session.observer
        self.logs = str(Path(args.run_dir, "logs").absolute())
        self.began = self.session.began(self.checkpoint)
        self.generates = not train_only(args)
        rollout = self.registry.resolve("rollout", args.rollout_function_path)
        self.rollouts_ask_engine = self.generates and bool(getattr(rollout, "uses_engine", True))
        self.workers_per_ticket = workers_per_ticket(args, concurrent=bool(getattr(rollout, "concurrent", False)))
        if self.generates and (idle := idle_workers_text(args, self.workers_per_ticket)):
            self.observer.notice(idle)
        self.evaluates = self.generates and bool(args.eval_prompt_data or args.eval_config)
        self.asks_engine = self.evaluates or self.rollouts_ask_engine

    def start(self) -> None:
        """Start all parts, in the order in which they need each other, and return once they are ready."""
        args = self.args
        # Engines load while Ray starts: they are separate processes and take the longest. Those on nodes need it.
        is_early = args.ray_address is None and not places_engines(args)
        parts = [
            (self._engines, self.asks_engine and is_early),
            (self._devices, True),
            (self._engines, self.asks_engine and not is_early),
            (self._source, reads_data_source(args)),
            (self._buffer, True),
            (self._trainers, True),
            (self._roles, True),
            (self._reward_model, self.generates and bool(args.rm_model)),
            (self._storage, self.generates and args.num_data_storage_units > 0),
            (self._rollout_workers, self.generates),
        ]
        started = [part() for part, is_needed in parts if is_needed]
        for _ in STEPS:
            for part in started:
                next(part, None)

    def _engines(self) -> Part:
        args, notice = at_this_node(self.args), self.observer.notice
        launcher = placed_launcher(self.placement, notice) if places_engines(args) else self.registry
        fleet = self.fleet = self.processes.enter_context(EngineFleet(args, str(args.run_dir), launcher, notice))
        self.processes.watchers.append(fleet.check)
        yield
        fleet.wait_ready()
        self.observer.ready("engine")
        if self.trained:
            engines = self.engines = fleet.control(args.update_weights_timeout_s)
            self.processes.local("engines", engines, end_s=lambda: PUBLISH_END_S, then=engines.close)
            if args.offload_rollout:
                engines.release_memory()  # the models of others are built next

    def _devices(self) -> Part:
        self.session.connect()
        starts = self.asks_engine and starts_engines(self.args)
        self.placement = self.processes.enter_context(placed(self.args, starts, self.observer.notice))
        yield

    def _source(self) -> Part:
        """The user's data source, constructed: what its constructor raises must not wait for the engines."""
        actor = self.source = start_data_source(self.args, self.logs)
        self.processes.stops(ActorGroup("data_source", lambda _: actor))
        source_answers(self.args).call(actor, DataSourceActor.ready)
        text, notice = "the data source's process died and was replaced", self.observer.notice
        ready = DataSourceActor.ready
        watch = ReplacementWatch([actor], ready, replaced=lambda _, pid: notice(f"{text} (process {pid})"))
        self.processes.watchers.append(watch)
        self.processes.callback(watch.close)
        yield

    def _buffer(self) -> Part:
        args, notice = self.args, self.observer.notice
        actor = start_buffer(dump_args(args))
        self.processes.stops(ActorGroup("buffer", lambda _: actor))
        self.buffer = BufferClient(actor, timeout_s=args.buffer_timeout_s, caller="driver")
        self.num_rollouts = self._num_rollouts()
        self.role_plan = self._role_plan()

        def show(progress: Mapping[str, Any]) -> None:
            if progress.get("wanted"):
                self.observer.groups(progress["finished"], progress["wanted"], progress["dropped"])

        ledger = Path(args.run_dir, FILE_NAME)
        self.processes.watchers.append(watch_buffer(actor, args, lambda: ledger_writer(ledger), show, notice))
        yield

    def _trainers(self) -> Part:
        args, limit = self.args, self.args.train_timeout_s
        for role in self.role_plan.trained:
            text = dump_args(with_decay_iters(args, self.role_plan.num_updates(role, self.num_rollouts)))
            group = start_train_group(role, args, text, self.buffer.actor, self.logs, self.placement)
            self.trained[role] = self.processes.stops(group)
        yield
        if self.trained and uses_reference(args) and self.num_rollouts > 0:  # the trainer or a role has the model
            self.reference = FolderUpdates.of("ref", args, self._write_hf, self._load_reference)
        yield
        for role, trained in self.trained.items():
            master, port = trained.call(TrainRank.host, timeout_s=limit)
            if role == ACTOR:  # the one whose weights are published
                require_local_trainer(args.weight_sync_mode, master)
            trained.call(TrainRank.setup, master, port, timeout_s=limit)
            if self.checkpoint is not None:
                if role == ACTOR and self.reference is not None:  # first, as building a model may draw random numbers
                    self.reference.restore(self.checkpoint.folder / REFERENCE_FOLDER, self.checkpoint.step)
                trained.call(TrainRank.load, str(self.checkpoint.folder / checkpoint_folder(role)), timeout_s=limit)
            if args.offload_train and self.engines is not None and begins_asleep(self.role_plan):
                trained.call(TrainRank.sleep, tuple(Memory), timeout_s=limit)
        if self.checkpoint is not None and self.trained and self.num_rollouts > 0:
            # A run that only evaluates may have other data, or none.
            self.buffer.call(BufferActor.load, str(self.checkpoint.folder))
        if self.trained:
            self.observer.ready("trainer")

    def _roles(self) -> Part:
        roles, text = self.role_plan.dedicated_roles, dump_args(self.args)
        groups = start_roles(self.args, self.registry, roles, text, self.buffer.actor, self.logs, self.placement)
        self.roles = {role: self.processes.stops(group) for role, group in groups.items()}
        yield from self._loading(*groups.values())

    def _reward_model(self) -> Part:
        group = self.processes.stops(start_reward_model(self.args, self.logs, self.placement))
        self.reward = group
        yield from self._loading(group)
        self.processes.watchers.append(watch_reward_model(group, self.args.role_max_restarts, self.observer.notice))

    def _storage(self) -> Part:
        """The processes that own large payloads; without them the Buffer does."""
        args = self.args
        self.storage = start_storage(args.num_data_storage_units, self.buffer.actor, args.buffer_timeout_s)
        units = [*self.storage.values()]
        group = self.processes.stops(ActorGroup("storage", lambda index: units[index], len(units)))
        group.call(Member.ready, timeout_s=args.train_timeout_s)
        yield

    def _rollout_workers(self) -> Part:
        addresses = {} if self.fleet is None else self.fleet.addresses
        self.args = args = self.args.model_copy(update=addresses)
        reward = () if self.reward is None else self.reward.actors
        shared = self.placement, self.storage, self.source, reward, self.began
        workers = start_rollout_workers(args, dump_args(args), self.buffer.actor, self.logs, *shared)
        self.rollout = self.processes.stops(workers, RolloutWorker.close, CLOSE_TIMEOUT_S)
        yield from self._loading(workers)

    def _loading(self, *groups: ActorGroup) -> Part:
        """The later steps of processes that load by themselves, while trainers are set up."""
        yield
        loading = [group.start(Member.ready) for group in groups]
        yield
        for call in loading:
            call.wait(self.args.train_timeout_s)

    def _num_rollouts(self) -> int:
        args = self.args
        if args.num_rollout is not None:
            return args.num_rollout
        assert args.num_epoch is not None  # checked with the options
        rows = None if self.source is None else source_answers(args).call(self.source, DataSourceActor.num_rows)
        return self.buffer.call(BufferState.get_num_rollout_per_epoch, args.num_epoch, rows)

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

    # -- the driver, and the roles in its process ----------------------------------------------------

    def driver(self, stop: StopRequest) -> Driver:
        """The driver, with its plan, roles and watchers."""
        plan, fleet = self._plan(), self.fleet
        self._start_local_roles(plan)
        self.observer.planned(plan.num_rollouts)
        groups = [*self.trained.values(), *self.roles.values(), self.reward, self.rollout]
        watched = [group for group in groups if group is not None]
        self.processes.watchers.append(HangWatch(watched, self.args.hang_timeout_s, self.observer.notice))
        self.processes.watchers.append(check_local_ray)
        runtime = RayRuntime(self.processes.targets, self.processes.watchers)
        starved = fleet.starved_version if fleet is not None and self.engines is not None else lambda: None
        return Driver(plan, runtime, self.observer, stop, starved)

    def _start_local_roles(self, plan: RunPlan) -> None:
        args, buffer, local = self.args, self.buffer, self.processes.local
        local("buffer", buffer, call=buffer.call)
        if not self.generates:
            local("rollout", RecordedRollouts(args, buffer))
        if (publisher := self.publisher()) is not None:
            publishing = local("publish", publisher, end_s=lambda: PUBLISH_END_S)
            self.processes.callback(lambda: wait(publishing.start(Publisher.close).futures, timeout=PUBLISH_END_S))
        if self.reference is not None:
            local("reference", self.reference)
        if plan.schedule.by_window:
            # Calls that wait for groups have a thread and a client of their own.
            waiting = BufferClient(buffer.actor, timeout_s=args.buffer_timeout_s, caller="selection")
            local("selection", waiting)
        if plan.saves:
            facts = self.session.provenance | {"num_rollouts": plan.num_rollouts}
            facts |= {LINEAGE: self.session.lineage, START: self.began.name}
            checkpoints = RunCheckpoints(self.session.args, buffer, self.trained, self.reference, facts)
            local("save", checkpoints, end_s=lambda: max(CLOSE_TIMEOUT_S, checkpoints.time_left()))
        if args.save_debug_rollout_data:
            local("record", RolloutRecorder(args.save_debug_rollout_data, buffer))

    def publisher(self) -> Publisher | RolePublisher | None:
        """The publisher to the engines and to the roles that need the actor's weights; None without any."""
        args = self.args
        if (train := self.trained.get(ACTOR)) is None:
            return None
        senders = Senders(lambda *call: train.start(TrainRank.send_weights, *call))
        publisher = None if self.engines is None else self._engine_publisher(self.engines, senders)
        if (role := self.roles.get("actor_fwd")) is None:
            return publisher
        updates: RoleBroadcasts | FolderUpdates
        if getattr(transport := self._transport(), "reaches_roles", False):
            limit, works = args.update_weights_timeout_s, args.stream_gradients or self.role_plan.models_of(ACTOR)
            is_busy = Schedule.of(args).streams and bool(works)  # with groups of rollouts that run
            updates = RoleBroadcasts(role, transport, senders, timeout_s=limit, trainer_is_busy=is_busy)
        else:
            take = RoleWorker.update_weights_from_disk
            updates = FolderUpdates.of("actor_fwd", args, self._write_hf, lambda *to: role.call_and_keep(take, *to))
        return RolePublisher(publisher, "actor_fwd", updates.update, self.observer.notice)

    def _engine_publisher(self, engines: EngineControlClient, senders: Senders) -> Publisher:
        args, schedule = self.args, Schedule.of(self.args)
        follow = FollowFolder.from_args(args, self.save_hf)
        log_probs, base = (partial(self._log_probs, model) for model in ("actor", "base"))
        transport, check = self._transport(), LogProbCheck.from_args(args, log_probs)
        more: dict[str, Any] = {}
        if publishes_adapters(args):
            transport = adapters = AdapterTransport(
                args,
                lambda folder: self._of_actor(TrainRank.write_adapter, folder),
                lambda adapter: self.rollout and self.rollout.call_and_keep(RolloutWorker.use_adapter, adapter),
            )
            check = AdapterCheck.of(args, log_probs, base, lambda: adapters.newest)
            more["announce"] = adapters.announce
        elif args.lora_rank:
            more["measure"] = MergedShare(args, lambda: self._of_actor(TrainRank.unchanged_share), self.observer.notice)
        publisher = Publisher(
            transport,
            senders,
            engines,
            compare=args.check_weight_update_equal,
            check=check,
            timeout_s=2 * args.update_weights_timeout_s + args.engine_start_timeout_s,
            notice=self.observer.notice,
            hold=lambda: self._of_workers(RolloutWorker.hold, float(args.rollout_timeout_s)),
            unhold=lambda: self._of_workers(RolloutWorker.unhold),
            drains=schedule.by_window and schedule.drains,
            follow=None if follow is None else follow.write,
            **more,
        )
        if schedule.max_staleness:
            self.observer.notice(staleness_notice(args))
            if schedule.by_window and not schedule.drains and not publishes_adapters(args):
                publisher.try_retraction()
        return publisher

    def _of_workers(self, method: Method[*Ts], *args: *Ts) -> None:
        """A call of all rollout workers, which may wait for the requests that run: each has a deadline of its own."""
        if self.rollout is not None:
            self.rollout.call(method, *args, timeout_s=self.args.rollout_timeout_s + GRACE_S)

    def _of_actor(self, method: Method[*Ts], *args: *Ts) -> Any:
        """The answer of the actor's ranks."""
        return self.trained[ACTOR].call(method, *args, timeout_s=self.args.train_timeout_s)

    def _log_probs(self, model: str, sequences: Sequence[Sequence[int]], num_tokens: int) -> Any:
        return self._of_actor(TrainRank.log_probs_of, sequences, num_tokens, model)

    def _load_reference(self, path: str, version: int) -> bool:
        """Have the processes with the reference take a folder's weights: those of the role, else the trainer."""
        if (members := self.roles.get("ref")) is not None:
            return members.call_and_keep(RoleWorker.update_weights_from_disk, path, version)
        self._of_actor(TrainRank.load_ref, path)
        return True

    def _transport(self) -> WeightTransport:
        name = self.args.weight_sync_mode
        transport = construct("weight_transport", name, self.registry.resolve("weight_transport", name), self.args)
        return cast("WeightTransport", transport)

    def save_hf(self, path: str) -> None:
        """Write the actor's weights as a Hugging Face folder in the number format of ``--save-dtype``."""
        self._of_actor(TrainRank.save_hf, path)

    def _write_hf(self, path: str) -> None:
        """The same, as they are trained: for the run's own models."""
        self._of_actor(TrainRank.write_hf, path)

    def _plan(self) -> RunPlan:
        args, trains, schedule = self.args, bool(self.trained), Schedule.of(self.args)
        drain_s = args.rollout_timeout_s if schedule.mixes_versions else 0.0
        compares = self.rollouts_ask_engine and not is_supervised(args)
        return RunPlan(
            num_rollouts=self.num_rollouts,
            schedule=schedule,
            first_rollout=self.checkpoint.step if self.checkpoint else 0,
            publish_at_start=self.checkpoint is not None or engines_may_differ(args) or args.offload_rollout,
            compare_log_probs=compares and args.max_logprob_diff is not None,
            publish_each_step=(self.rollouts_ask_engine or "actor_fwd" in self.roles) and trains,
            ref_update_interval=args.ref_update_interval if trains else None,
            roles=self.role_plan,
            evaluate=self.evaluates,
            eval_interval=args.eval_interval,
            eval_before_train=not args.skip_eval_before_train,
            evaluated=self.session.observer.evaluated if self.num_rollouts > 0 else -1,
            offload_train=args.offload_train and self.engines is not None,
            offload_rollout=args.offload_rollout and self.engines is not None,
            saves=bool(args.save) and trains,
            save_interval=args.save_interval,
            async_save=args.async_save,
            save_on_exit_s=args.save_on_exit_s,
            records=bool(args.save_debug_rollout_data),
            early_stop=parse_early_stop(args.early_stop) if args.early_stop else None,
            rollout_timeout_s=args.rollout_timeout_s + 2 * GRACE_S,  # the worker's own deadline comes first
            train_timeout_s=args.train_timeout_s,
            publish_timeout_s=3 * args.update_weights_timeout_s + args.engine_start_timeout_s + GRACE_S + drain_s,
            save_timeout_s=args.save_timeout_s + GRACE_S,  # each call's own deadline, which says more, comes first
            buffer_timeout_s=args.buffer_timeout_s,
            max_rollout_retries=args.buffer_max_restarts,
            workers_per_ticket=self.workers_per_ticket,
            passes_on_tickets=not (args.rollout_sample_filter_path or args.rollout_all_samples_process_path),
        )
