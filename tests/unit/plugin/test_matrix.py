"""Every plugin kind, by every route, sync and async, right and wrong in five ways, through the code that calls it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import textwrap
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.cluster.calling import Call
from buffer_rl.data.custom import CustomSource, DeliveryRequest
from buffer_rl.engines.fleet import EngineFleet
from buffer_rl.engines.protocol import RowSeeds
from buffer_rl.errors import BufferRLError, PluginError
from buffer_rl.kinds.table import KINDS
from buffer_rl.observe.observer import RunObserver
from buffer_rl.options.section import compose
from buffer_rl.plan.roles import Role
from buffer_rl.plugin.calls import construct
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import (
    GroupUid,
    QueueHeader,
    RowId,
    Sample,
    SampleGroup,
    Status,
    Ticket,
    Topology,
    TrainBatch,
    VersionSpan,
)
from buffer_rl.rollout.context import RolloutContext
from buffer_rl.rollout.conversion import GroupConverter
from buffer_rl.rollout.default import DefaultRollout
from buffer_rl.rollout.user_functions import LogFunctions, UserFunction, choose_queued
from buffer_rl.rollout.user_rollout import run_user_rollout
from buffer_rl.testing.fake_buffer import FakeBuffer
from buffer_rl.testing.tiny import make_char_tokenizer, make_tiny_model
from buffer_rl.trainer.objective import Objective
from buffer_rl.trainer.rank import build_trainer
from buffer_rl.trainer.role_worker import own_stage
from buffer_rl.weights.publish import Publisher
from buffer_rl.weights.sender import RankSender, Senders
from harness.fake_client import client_of
from harness.fake_roles import FakeEngines, of_one_rank
from harness.trainers import make_trainer
from harness.trainers import step as step_of

OPTION_OF = {
    "rollout": "rollout_function_path",
    "generate": "custom_generate_function_path",
    "agent": "agent_path",
    "environment": "environment",
    "reward": "custom_rm_path",
    "group_reward": "custom_group_rm_path",
    "filter": "dynamic_sampling_filter_path",
    "sample_filter": "rollout_sample_filter_path",
    "all_samples_process": "rollout_all_samples_process_path",
    "rollout_log": "custom_rollout_log_function_path",
    "eval_rollout_log": "custom_eval_rollout_log_function_path",
    "buffer_filter": "buffer_filter_path",
    "reward_post_process": "custom_reward_post_process_path",
    "samples_to_train_data": "custom_convert_samples_to_train_data_path",
    "advantage": "custom_advantage_function_path",
    "loss": "custom_loss_function_path",
    "correction": "custom_tis_function_path",
    "data_source": "data_source_path",
    "converter": "model_converter_path",
    "model_provider": "custom_model_provider_path",
    "trainer": "train_backend",
    "role": "role_path",
    "engine": "rollout_engine",
    "router": "router",
    "weight_transport": "weight_sync_mode",
    "logger": "logger",
}


@dataclasses.dataclass
class Answer:
    output_ids: list[int]
    text: str = "by engine"
    log_probs: list[float] = dataclasses.field(default_factory=lambda: [-0.5])
    finish_reason: str = "stop"
    spans: list[VersionSpan] = dataclasses.field(default_factory=lambda: [VersionSpan(0, 0, 1)])
    matched: int | None = None
    kept: list[bytes] | None = None


class Engine:
    async def agenerate(
        self, rid: str, input_ids: Sequence[int], sampling_params: dict[str, Any], **more: Any
    ) -> Answer:
        return Answer([5])

    async def agenerate_rows(
        self, rid: str, input_ids: Sequence[int], num_rows: int, sampling_params: dict[str, Any], **more: Any
    ) -> list[Answer]:
        return [Answer([5])] * num_rows

    async def row_seeds(self) -> RowSeeds:
        return RowSeeds.OWN


@dataclasses.dataclass(frozen=True, kw_only=True)
class Here:
    """Where a plugin is put to work. model: a folder with a tiny model. run_dir: the run's."""

    kind: str
    path: str
    model: str
    run_dir: Path

    def args(self, **changes: Any) -> Any:
        name = OPTION_OF[self.kind]
        options = {"hf_checkpoint": self.model, "run_dir": str(self.run_dir), "progress": "none", "logger": []}
        named = {name: [self.path] if name in ("logger", "role_path") else self.path}
        fallback = {} if self.kind == "group_reward" else {"custom_rm_path": f"{__file__}:is_right"}
        return compose(CORE_SECTIONS)(**{**options, **fallback, **changes, **named})


async def is_right(args: Any, sample: Sample) -> float:
    """A reward that needs no process."""
    return float(sample.response == sample.label)


# -- the code that calls each kind -----------------------------------------------------------------


def make_group(row: int = 0) -> SampleGroup:
    uid = GroupUid("source", row, 0)
    samples = [Sample(uid=uid, sample_index=i, prompt="ab", label="x") for i in range(2)]
    return SampleGroup(uid=uid, samples=samples, attempt=3, incarnation="inc")


def finished_group() -> SampleGroup:
    group = make_group()
    for i, sample in enumerate(group):
        sample.tokens, sample.response_length, sample.reward, sample.status = [3, 4], 1, float(i), Status.COMPLETED
    return group


async def roll(here: Here) -> Any:
    """One rollout of one group, two rows offered."""
    args, registry = here.args(), PluginRegistry()
    ticket = Ticket(rollout_id=0, evaluation=False, num_groups=1, version=0, incarnation="inc")
    buffer = FakeBuffer([make_group(0), make_group(1)], ticket)
    engine: Any = Engine()
    own = here.kind == "rollout"
    function = registry.resolve("rollout", here.path) if own else DefaultRollout(args)
    tokenizer = make_char_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    context = RolloutContext.build(args, registry=registry, engine=engine, tokenizer=tokenizer)
    try:
        with context.active():
            output = await run_user_rollout(
                function, args, client_of(buffer, context), where=f"rollout {here.path!r}, train_0"
            )
    finally:
        await context.aclose()
    for group in output.groups:
        buffer.finish(group)
    (group,) = buffer.finished
    drops = [reason for _, reason in buffer.rejected]
    return group.uid.row, drops, [(s.response, s.reward, s.remove_sample) for s in group]


async def choose(here: Here) -> Any:
    chosen = UserFunction("buffer_filter", here.path, PluginRegistry().resolve("buffer_filter", here.path))
    headers = [QueueHeader(uid=GroupUid("s", row, 0), admitted=row, prompt_length=1) for row in range(3)]
    return [uid.row for uid in choose_queued(chosen, here.args(), 0, headers, 1)]


async def log(here: Here) -> Any:
    evaluation = here.kind == "eval_rollout_log"
    ticket = Ticket(rollout_id=4, evaluation=evaluation, num_groups=1, version=4, incarnation="inc")
    functions = LogFunctions(here.args(), PluginRegistry())
    return await functions.metrics(ticket, [finished_group()], {"rollout/raw_reward": 0.5}, 1.5)


async def encode(here: Here) -> Any:
    _, columns = GroupConverter.from_args(here.args(), PluginRegistry()).encode(finished_group(), False)
    return np.asarray(columns["reward"]).tolist()


def make_batch() -> TrainBatch:
    columns: dict[str, Any] = {
        "tokens": [np.asarray([3, 4, 5], dtype=np.int32)] * 2,
        "response_length": np.asarray([2, 2], dtype=np.int32),
        "loss_mask": [np.ones(2, dtype=np.float32)] * 2,
        "reward": np.asarray([1.0, -1.0], dtype=np.float32),
        "rollout_log_probs": [np.full(2, -1.0, dtype=np.float32)] * 2,
    }
    rows = [RowId(GroupUid("data", 0, 0), i) for i in range(2)]
    return TrainBatch(rollout_id=0, task="train_0", row_ids=rows, columns=columns)


async def train(here: Here) -> Any:
    trainer = make_trainer(here.args(train_device="cpu"))
    batch = make_batch()
    metrics = step_of(trainer, batch)
    names = {name for bucket in trainer.export() for name in bucket}
    trainer.save_hf(str(here.run_dir / "hf"))
    found = here.run_dir / "hf" / "model.safetensors"
    return metrics.get("mine"), float(batch.columns["advantages"][0][0]), "lm_head.weight" in names, found.is_file()


async def correct(here: Here) -> Any:
    trainer = make_trainer(here.args(train_device="cpu", use_tis=True))
    return step_of(trainer, make_batch())["mismatch/rejected"]


async def step(here: Here) -> Any:
    args, registry = here.args(), PluginRegistry()
    return build_trainer(args, registry, 0, 1, Objective(args, registry)).optimizer_step(1.0)


async def add_fields(here: Here) -> Any:
    row, batch = Role(name="mine", fields=("length",)), make_batch()
    stage = own_stage(here.path, row, here.args(), PluginRegistry())
    columns = stage.compute(batch)
    stage.check(batch, columns)
    return {name: list(column) for name, column in columns.items()}


async def launch(here: Here) -> Any:
    with EngineFleet(here.args(), str(here.run_dir), PluginRegistry()) as fleet:
        return fleet.engine_urls


async def launch_router(here: Here) -> Any:
    engine: Any = SimpleNamespace(url="http://engine:1", wait_ready=print, check=print, stop=lambda: None)
    with EngineFleet(here.args(), str(here.run_dir), lambda *_: engine) as fleet:
        return fleet.router_url


async def publish(here: Here) -> Any:
    args, engines = here.args(), FakeEngines()
    factory = PluginRegistry().resolve("weight_transport", here.path)
    transport = construct("weight_transport", here.path, factory, args)
    place = Topology(dp_rank=0, dp_size=1)

    def start(method: str, *arguments: Any) -> Call:
        answer: Future[Any] = Future()
        answer.set_result(RankSender(here.path, factory, args, place)(method, iter([{"a": 1}, {"b": 2}]), *arguments))
        return of_one_rank(answer)

    Publisher(transport, Senders(start), engines).publish(3)
    return engines.version, engines.calls


async def observe(here: Here) -> Any:
    with RunObserver(here.args(), PluginRegistry()) as observer:
        observer.step(4, {"train/loss": 0.5})
    return (here.run_dir / "mine").read_text()


async def take(here: Here) -> Any:
    source = CustomSource(here.args(n_samples_per_prompt=2), PluginRegistry())
    request = DeliveryRequest(number=0, num_groups=1, first_group=0)
    delivery = await asyncio.to_thread(source.take, request)  # its process has no running event loop either
    return [sample.prompt for sample in delivery.groups[0]], delivery.state


# -- the table -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """call: puts it to work. head: ``name(arguments)``, or the text of a class. body: the right one.

    effect: what ``call`` returns then. wrong: what the broken one returns, ``expected``: what is said then.
    method: for a class, the method that is broken in place of the function.
    """

    call: Callable[[Here], Any]
    head: str
    effect: Any
    body: str = "pass"
    wrong: str = "'nonsense'"
    expected: str
    method: str = ""

    def text(self, prefix: str = "def", body: str = "") -> str:
        if not self.method:
            text = textwrap.indent(body or self.body, "    ").replace("AWAIT ", "await " if prefix != "def" else "")
            return f"{prefix} plug({self.head}):\n{text}\n"
        whole = textwrap.dedent(self.head).replace("ASYNC ", "async " if prefix != "def" else "")
        return (
            f"{whole}\nclass plug(plug):\n    {prefix} {self.method}(self, *args):\n        {body}\n" if body else whole
        )


FILLED = 'sample.tokens, sample.response_length, sample.response = [3, 4], 1, "by plug"\nsample.status = "completed"\n'
MODEL = "from transformers import AutoModelForCausalLM\nreturn AutoModelForCausalLM.from_pretrained(args.hf_checkpoint)"
NUMBERS = """
import numpy as np
rows = [np.full(2, 0.25, dtype=np.float32) for _ in batch.row_ids]
batch.columns["advantages"] = batch.columns["returns"] = rows
"""
TRAINER = """
from buffer_rl.records.groups import Topology
class plug:
    def __init__(self, args, rank, world_size, objective):
        self.rank, self.topology = rank, Topology(dp_rank=rank, dp_size=world_size)
    def optimizer_step(self, scale): return {"mine": scale + self.rank}
""" + "".join(
    f"    def {name}(self{arguments}): ...\n"
    for name, arguments in {
        "log_probs": ", model, batch", "accumulate": ", batch", "zero_grad": "", "save": ", path", "export": "",
        "save_hf": ", path", "load": ", path",
    }.items()
)  # fmt: skip
SOURCE = """
from pathlib import Path
from buffer_rl.records.groups import GroupUid, Sample, SampleGroup
class plug:
    def __init__(self, args): self.n = args.n_samples_per_prompt
    def __len__(self): return 1
    ASYNC def get_samples(self, num_samples):
        uid = GroupUid("mine", 0, 0)
        samples = [Sample(uid=uid, sample_index=i, prompt="by plug") for i in range(self.n)]
        return [SampleGroup(uid=uid, samples=samples)]
    def save(self, path): Path(path).write_text("state")
    def load(self, path): ...
"""
GAME = """
class plug:
    def reset(self, **row): ...
    ASYNC def step(self, action): return None, 0.25, True
"""
BY_ENGINE = ("by engine", 0.0, False)
CASES = {
    "rollout": Case(
        call=roll, head="args, rollout_id, buffer, evaluation=False", expected="RolloutOutput(groups=[...]",
        body="groups = buffer.get_samples(1)\nfor sample in groups[0]:\n"
        + textwrap.indent(FILLED, "    ") + "    sample.reward = 1.0\nreturn groups",
        effect=(0, [], [("by plug", 1.0, False)] * 2),
    ),
    "generate": Case(
        call=roll, head="args, sample, sampling_params", body=FILLED + "return sample",
        effect=(0, [], [("by plug", 0.0, False)] * 2), expected="a Sample, or a list of them",
    ),
    "agent": Case(
        call=roll, head="args, sample, session", body="AWAIT session.generate([3, 4])\nreturn 0.25",
        effect=(0, [], [("2", 0.25, False)] * 2), expected="None, a number or a mapping",
    ),
    "environment": Case(
        call=roll, head=GAME, effect=(0, [], [("2", 0.25, False)] * 2), expected="(observation, reward, done)",
        method="step",
    ),
    "reward": Case(
        call=roll, head="args, sample", body="return 0.25", effect=(0, [], [("by engine", 0.25, False)] * 2),
        expected="a finite number",
    ),
    "group_reward": Case(
        call=roll, head="args, group", body="return [0.5 for _ in group]",
        effect=(0, [], [("by engine", 0.5, False)] * 2), expected="a list of 2 numbers",
    ),
    "filter": Case(
        call=roll, head="args, group", body="return group.uid.row == 1", effect=(1, ["filtered"], [BY_ENGINE] * 2),
        expected="FilterDecision",
    ),
    "sample_filter": Case(
        call=roll, head="args, groups", body="groups[0][1].remove_sample = True",
        effect=(0, [], [BY_ENGINE, ("by engine", 0.0, True)]), expected="None: it marks samples",
    ),
    "all_samples_process": Case(
        call=roll, head="args, groups, data_source", body="groups[0][1].response = data_source.ticket.task",
        effect=(0, [], [BY_ENGINE, ("train_0", 0.0, False)]), expected="None",
    ),
    "rollout_log": Case(
        call=log, head="rollout_id, args, samples, rollout_extra_metrics, rollout_time",
        body="rollout_extra_metrics['rollout/mine'] = rollout_id + rollout_time + len(samples)",
        effect={"rollout/raw_reward": 0.5, "rollout/mine": 7.5}, expected="True (it did",
    ),
    "eval_rollout_log": Case(
        call=log, head="rollout_id, args, data, extra_metrics",
        body="extra_metrics['eval/mine'] = sum(data['default']['rewards'])",
        effect={"rollout/raw_reward": 0.5, "eval/mine": 1.0}, expected="True (it did",
    ),
    "buffer_filter": Case(
        call=choose, head="args, rollout_id, buffer, num_samples", body="return buffer[-num_samples:]", effect=[2],
        expected="a list of some of the headers",
    ),
    "reward_post_process": Case(
        call=encode, head="args, samples", body="return [0.0, 1.0], [-3.0, 3.0]", effect=[-3.0, 3.0],
        expected="(raw_rewards, rewards), 2 finite numbers each",
    ),
    "samples_to_train_data": Case(
        call=encode, head="args, samples", effect=[7.0, 7.0], expected="a dict with at least loss_mask",
        body="return {'tokens': [[3, 4]] * 2, 'response_length': [1, 1], 'loss_mask': [[1], [1]], 'reward': [7, 7]}",
    ),
    "advantage": Case(
        call=train, head="args, batch", body=NUMBERS, effect=(None, 0.25, False, True),
        expected="None, with batch.columns['advantages'] and ['returns'] set",
    ),
    "loss": Case(
        call=train, head="args, inputs", effect=(2.5, 1.0, False, True),
        expected="buffer_rl.kinds.token_loss.TokenLoss",
        body="from buffer_rl.kinds.token_loss import TokenLoss\n"
        "return TokenLoss(-inputs.log_probs, metrics={'mine': 0 * inputs.log_probs + 2.5})",
    ),
    "correction": Case(
        call=correct, head="args, inputs", effect=1.0, expected="a tensor of weights [2, 2]",
        body="return 0 * inputs.log_probs",
    ),
    "model_provider": Case(
        call=train, head="args", body=MODEL, effect=(None, 1.0, False, True), expected="a torch module with forward",
    ),
    "converter": Case(
        call=train, method="export", effect=(None, 1.0, False, True), expected="an iterator of (name, tensor)",
        head="""
        class plug:
            def __init__(self, args): ...
            def load(self, model, folder):
                from safetensors.torch import load_file
                model.load_state_dict(load_file(folder + "/model.safetensors"), strict=False)
            def export(self, model): yield from model.named_parameters()
        """,
    ),
    "trainer": Case(
        call=step, head=TRAINER, method="optimizer_step", effect={"mine": 1.0}, expected="", wrong="",
    ),
    "role": Case(
        call=add_fields, method="compute", effect={"length": [2.0, 2.0]}, expected="a mapping with the fields length",
        head="""
        class plug:
            def __init__(self, args): ...
            def compute(self, batch): return {"length": [float(n) for n in batch.columns["response_length"]]}
        """,
    ),
    "engine": Case(
        call=launch, head="args, index, log_path", effect=["http://mine:0"], expected="an object with url, wait_ready",
        body="class Process:\n    url = f'http://mine:{index}'\n    def wait_ready(self, timeout_s): ...\n"
        "    def check(self): ...\n    def stop(self): ...\nreturn Process()",
    ),
    "router": Case(
        call=launch_router, head="args, log_path", effect="http://mine:1",
        expected="an object with url, wait_ready(timeout_s), check(), stop(), add(*urls) and remove(url)",
        body="class Process:\n    url = 'http://mine:1'\n    def wait_ready(self, timeout_s): ...\n"
        "    def check(self): ...\n    def stop(self): ...\n"
        "    def add(self, *urls, **more): ...\n    def remove(self, url): ...\nreturn Process()",
    ),
    "weight_transport": Case(
        call=publish, method="prepare", expected="", wrong="",
        effect=(3, ["pause", "flush", "begin", "update", "end", "versions", "resume"]),
        head="""
        class Side:
            def __init__(self, args, topology): ...
            def names(self, buckets, version): return f"{version}:" + "".join(name for b in buckets for name in b)
        class plug:
            sender, staged = Side, True
            def __init__(self, args): ...
            def connect(self, trainer, engines): self.trainer, self.engines = trainer, engines
            def prepare(self, version): self.answers = self.trainer.send(Side.names, version)
            def publish(self, version):
                assert self.answers == ["3:ab"]
                self.engines.update_weights_from_disk("folder", version)
            def close(self): ...
        """,
    ),
    "logger": Case(
        call=observe, method="log", effect="4 {'train/loss': 0.5}", expected="", wrong="",
        head="""
        from pathlib import Path
        class plug:
            def __init__(self, args, run_dir): self.file = Path(run_dir) / "mine"
            def log(self, metrics, step): self.file.write_text(f"{step} {dict(metrics)}")
            def close(self): ...
        """,
    ),
    "data_source": Case(
        call=take, head=SOURCE, method="get_samples", effect=(["by plug"] * 2, b"state"), expected="a list",
    ),
}  # fmt: skip
ALL = list(KINDS)
ASYNC_TOO = [(kind, prefix) for kind in ALL for prefix in ("def", "async def")[: 1 + KINDS[kind].may_be_async]]
RETURNING = [kind for kind, case in CASES.items() if case.wrong]
CLASSES = [kind for kind, row in KINDS.items() if row.constructed]


def reference(place: Any, route: str, kind: str, text: str) -> str:
    """Put the code where the route finds it; the reference that leads there."""
    if route == "entry point":
        place.install("matrix-party", {f"buffer_rl.{kind}": {"plugged": "matrix_party:plug"}}, matrix_party=text)
        return "plugged"
    place.write("matrix_code.py", text)
    return {"path string": "matrix_code.plug", "colon": "matrix_code:plug", "file path": "./matrix_code.py:plug"}[route]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_model(tmp_path_factory.mktemp("model"), characters="abc")


@pytest.fixture
def put(place: Any, model: str, tmp_path: Path) -> Callable[..., Here]:
    def put_there(kind: str, text: str, route: str = "file path") -> Here:
        path = reference(place, route, kind, text)
        return Here(kind=kind, path=path, model=model, run_dir=tmp_path / "run")

    return put_there


def test_every_kind_is_in_the_table() -> None:
    assert set(CASES) == set(OPTION_OF) == set(KINDS)


@pytest.mark.parametrize("route", ["path string", "colon", "file path", "entry point"])
@pytest.mark.parametrize(("kind", "prefix"), ASYNC_TOO)
async def test_it_is_found_called_and_has_its_effect(
    put: Callable[..., Here], kind: str, route: str, prefix: str
) -> None:
    case = CASES[kind]
    assert await case.call(put(kind, case.text(prefix), route)) == case.effect


@pytest.mark.parametrize("route", ["path string", "file path", "entry point"])
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def other(): ...\n", "has no 'plug'"),
        ("plug = 3\n", "int is not callable; found 3 (int)"),
        ("def plug(): ...\n", "it cannot be c"),
    ],
    ids=["missing", "not callable", "wrong signature"],
)
def test_what_is_wrong_with_the_object_is_said_before_a_run(
    place: Any, kind: str, route: str, text: str, problem: str
) -> None:
    if kind == "environment":  # one that takes nothing is right
        text = text.replace("plug()", "plug(one, another)")
    path = reference(place, route, kind, text)
    with pytest.raises(PluginError) as caught:
        PluginRegistry().resolve(kind, path)
    message = str(caught.value)
    assert message.startswith(f"{kind} {path!r}")
    assert problem in message
    assert ".py" in message
    assert f"expected: {KINDS[kind].signature}, for {KINDS[kind].flags[0]}" in message
    if problem.startswith("it cannot"):
        assert f"found {'plug(one, another)' if kind == 'environment' else 'plug()'}" in message


@pytest.mark.parametrize(("kind", "prefix"), ASYNC_TOO)
async def test_what_it_raises_is_shown_with_its_name_and_its_place(
    put: Callable[..., Here], kind: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Even if it is what would end a process, or the event loop that it runs in."""
    here = put(kind, CASES[kind].text(prefix, "raise SystemExit('my bug')"))
    if kind == "logger":  # what one sees must not end what one trains: it is named and dropped
        with caplog.at_level(logging.WARNING), RunObserver(here.args(), PluginRegistry()) as observer:
            observer.step(4, {"train/loss": 0.5})
        message = caplog.text
    else:
        with pytest.raises(BufferRLError) as caught:
            await CASES[kind].call(here)
        message = str(caught.value)
        assert "matrix_code.py" in message
        assert ", line " in message
    assert f"{kind} {here.path!r}" in message
    assert "SystemExit: my bug" in message


@pytest.mark.parametrize(("kind", "prefix"), [pair for pair in ASYNC_TOO if pair[0] in RETURNING])
async def test_what_it_returns_is_checked(put: Callable[..., Here], kind: str, prefix: str) -> None:
    case = CASES[kind]
    here = put(kind, case.text(prefix, f"return {case.wrong}"))
    with pytest.raises(BufferRLError) as caught:
        await case.call(here)
    message = str(caught.value)
    assert f"{kind} {here.path!r}" in message
    assert f"expected: {case.expected}" in message
    assert "nonsense" in message or "str" in message


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind != "environment"])  # made for each play
async def test_what_a_factory_raises_or_builds_is_checked(put: Callable[..., Here], kind: str) -> None:
    arguments = ", ".join(KINDS[kind].positional)
    here = put(kind, f"def plug({arguments}):\n    return 'nonsense'\n")
    with pytest.raises(PluginError) as caught:
        await CASES[kind].call(here)
    assert f"{kind} {here.path!r}, while it was constructed: it returned 'nonsense' (str)" in str(caught.value)
    assert f"expected: an object with {KINDS[kind].methods[0]}" in str(caught.value)
    here = put(kind, f"def plug({arguments}):\n    raise SystemExit('my bug')\n", "entry point")
    with pytest.raises(PluginError, match=f"{kind} 'plugged', while it was constructed: it raised SystemExit: my bug"):
        await CASES[kind].call(here)
