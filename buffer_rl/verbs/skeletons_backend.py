"""The texts of ``buffer-rl plugins new`` for the kinds of the trainer, the engine and what stands around them."""

from __future__ import annotations

from buffer_rl.verbs.skeletons import Skeleton

BACKEND = {
    "advantage": Skeleton(
        imports="import numpy as np\nfrom buffer_rl.scope import scoped\nfrom buffer_rl.types import TrainBatch\n",
        code='''\
@scoped("row")  # each row by itself; "group" if it compares the rows of a prompt (batch.row_ids[i].uid)
def $name(args: Any, batch: TrainBatch) -> None:
    """Every response token gets its row's reward, as advantage and as return."""
    rows = zip(batch.columns["reward"], batch.columns["response_length"], strict=True)
    values = [np.full(length, reward, dtype=np.float32) for reward, length in rows]
    batch.columns["advantages"] = values
    batch.columns["returns"] = values
''',
        test="""\
    columns = {"reward": np.asarray([0.5], dtype=np.float32), "response_length": np.asarray([2], dtype=np.int32)}
    row_ids = [RowId(GroupUid("data", 0, 0), 0)]
    batch = TrainBatch(rollout_id=0, task="train_0", row_ids=row_ids, columns=columns, total_samples=1, total_tokens=2)
    $name(None, batch)
    assert batch.columns["advantages"][0].tolist() == [0.5, 0.5]
""",
        test_imports="import numpy as np\n\nfrom buffer_rl.types import GroupUid, RowId, TrainBatch\n",
    ),
    "loss": Skeleton(
        imports="from buffer_rl.algo.aggregation import aggregate\n"
        "from buffer_rl.contracts import LossInputs, LossOutputs\n"
        "from buffer_rl.scope import scoped\n",
        code='''\
@scoped("group")  # a sum over rows, divided by the totals that --loss-agg-mode names
def $name(args: Any, inputs: LossInputs) -> LossOutputs:
    """The policy gradient without clipping, aggregated over the response tokens of the whole step."""
    losses = -inputs.advantages * inputs.log_probs
    loss = aggregate(losses, inputs, args.loss_agg_mode)
    return LossOutputs(loss=loss, metrics={"pg_loss": loss.detach()})
''',
        test="""\
    log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    ones = torch.ones(1, 2)
    inputs = LossInputs(
        log_probs=log_probs, old_log_probs=None, rollout_log_probs=None, ref_log_probs=None, advantages=2 * ones,
        loss_mask=ones, entropy=None, total_samples=1, total_tokens=2, sample_total_tokens=2 * ones[:, 0],
    )
    outputs = $name(SimpleNamespace(loss_agg_mode="token-mean"), inputs)
    outputs.loss.backward()
    assert outputs.loss.item() == 3.0
    assert log_probs.grad.tolist() == [[-1.0, -1.0]]
""",
        test_imports="from types import SimpleNamespace\nimport torch\nfrom buffer_rl.contracts import LossInputs\n",
    ),
    "data_source": Skeleton(
        imports="import json\nfrom pathlib import Path\n\nfrom buffer_rl.types import GroupUid, Sample, SampleGroup\n",
        code='''\
class $name:
    """Ten prompts over and over. A group's uid is its source, its row there, and the epoch."""

    def __init__(self, args: Any) -> None:
        self._num_samples: int = args.n_samples_per_prompt
        self._next = 0
        self._returned: list[GroupUid] = []

    def __len__(self) -> int:
        return 10

    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        """The next num_samples groups, those given back first."""
        return [self._make(self._returned.pop(0) if self._returned else self._advance()) for _ in range(num_samples)]

    def add_samples(self, groups: list[SampleGroup]) -> None:
        """Take groups back, as prompts."""
        self._returned.extend(group.uid for group in groups)

    def save(self, path: str) -> None:
        """Write the state, so that a resumed run goes on with the same groups."""
        state = {"next": self._next, "returned": [str(uid) for uid in self._returned]}
        Path(path).write_text(json.dumps(state), encoding="utf-8")

    def load(self, path: str) -> None:
        """The inverse of save."""
        state = json.loads(Path(path).read_text(encoding="utf-8"))
        self._next, self._returned = state["next"], [GroupUid.parse(uid) for uid in state["returned"]]

    def _advance(self) -> GroupUid:
        epoch, row = divmod(self._next, len(self))
        self._next += 1
        return GroupUid("$name", row, epoch)

    def _make(self, uid: GroupUid) -> SampleGroup:
        samples = [
            Sample(uid=uid, sample_index=i, prompt=f"{uid.row}+1=", label=str(uid.row + 1))
            for i in range(self._num_samples)
        ]
        return SampleGroup(uid=uid, samples=samples)
''',
        test="""\
    args = SimpleNamespace(n_samples_per_prompt=2)
    source = $name(args)
    first, second = source.get_samples(2)
    source.add_samples([first])
    source.save(str(tmp_path / "state"))
    restored = $name(args)
    restored.load(str(tmp_path / "state"))
    assert source.get_samples(10) == restored.get_samples(10)
    assert (len(second), second[0].label) == (2, "2")
""",
        test_imports="from types import SimpleNamespace\n",
    ),
    "converter": Skeleton(
        imports="from collections.abc import Iterator\n",
        code='''\
class $name:
    """The trainer's names are Hugging Face's, as with the built-in model. Rename, split and join tensors here."""

    def __init__(self, args: Any) -> None:
        self._args = args

    def to_trainer(self, name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
        """One tensor of Hugging Face as any number of the trainer's."""
        yield name, tensor

    def to_hf(self, name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
        """The inverse."""
        yield name, tensor
''',
        test="""\
    converter = $name(None)
    ((name, tensor),) = converter.to_trainer("lm_head.weight", 3)
    assert list(converter.to_hf(name, tensor)) == [("lm_head.weight", 3)]
""",
    ),
    "model_provider": Skeleton(
        code='''\
def $name(args: Any) -> Any:
    """The model of --hf-checkpoint, as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(args.hf_checkpoint)
''',
        test="    assert list(inspect.signature($name).parameters) == ['args']\n",
        test_imports="import inspect\n",
    ),
    "trainer": Skeleton(
        imports="from buffer_rl.train.torch_trainer import TorchTrainer\n",
        code='''\
class $name(TorchTrainer):
    """The built-in trainer with one metric more; see buffer_rl.contracts.Trainer for all that can be replaced."""

    def __init__(self, args: Any, rank: int, world_size: int) -> None:
        super().__init__(args, rank, world_size)

    def optimizer_step(self) -> dict[str, float]:
        """Step, and say something about it."""
        return {**super().optimizer_step(), "my_metric": 1.0}
''',
        test="    assert issubclass($name, TorchTrainer)\n",
        test_imports="from buffer_rl.train.torch_trainer import TorchTrainer\n",
    ),
    "engine": Skeleton(
        imports="from buffer_rl.contracts import EngineProcess\n",
        code='''\
def $name(args: Any, index: int, log_path: str) -> EngineProcess:
    """The embedded engine, started by this function. Anything with url, wait_ready and stop may be returned."""
    from buffer_rl.engine.embedded.launcher import launch

    return launch(args, index, log_path)
''',
        test="    assert list(inspect.signature($name).parameters) == ['args', 'index', 'log_path']\n",
        test_imports="import inspect\n",
    ),
    "weight_transport": Skeleton(
        imports="from buffer_rl.weights.disk import DiskTransport\n",
        code='''\
class $name(DiskTransport):
    """The transport by disk, with a line for each version."""

    def prepare(self, source: Any, version: int) -> Any:
        """Bring the version to where the engines can take it."""
        print(f"publishing version {version}")
        return super().prepare(source, version)
''',
        test="    assert issubclass($name, DiskTransport)\n",
        test_imports="from buffer_rl.weights.disk import DiskTransport\n",
    ),
    "logger": Skeleton(
        imports="from collections.abc import Mapping\nfrom pathlib import Path\n",
        code='''\
class $name:
    """Writes a line for each step into --run-dir."""

    def __init__(self, args: Any, run_dir: str) -> None:
        self._file = (Path(run_dir) / "my_log.txt").open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """metrics: flat numbers by name."""
        print(step, dict(metrics), file=self._file, flush=True)

    def close(self) -> None:
        """Called once, at the end of the run."""
        self._file.close()
''',
        test="""\
    logger = $name(None, str(tmp_path))
    logger.log({"train/loss": 0.5}, 3)
    logger.close()
    assert (tmp_path / "my_log.txt").read_text() == "3 {'train/loss': 0.5}\\n"
""",
    ),
}
