"""``buffer-rl import slime``: the report, the file, and a dry run of it, for scripts in the shape of slime's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from buffer_rl.cli import main
from buffer_rl.testing.tiny import make_tiny_model

SCRIPT = r"""#!/bin/bash
pkill -9 sglang
set -ex
LINKS=$(nvidia-smi topo -m | grep -c NV)
if [ "$LINKS" -gt 0 ]; then HAS_LINK=1; else HAS_LINK=0; fi
GPUS=${GPUS:-4}
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/tiny.sh"

CKPT_ARGS=(
   --hf-checkpoint ${FOLDER}/model
   --ref-load ${FOLDER}/model_torch_dist
   --load ${FOLDER}/checkpoints/
   --save ${FOLDER}/checkpoints/
   --save-interval 20
)
ROLLOUT_ARGS=(
   --prompt-data ${FOLDER}/train.jsonl
   --input-key question
   --label-key answer
   --rm-type deepscaler
   --num-rollout 30
   --rollout-batch-size 4
   --n-samples-per-prompt 8
   --rollout-max-response-len 64
   --global-batch-size 32
)
EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data dev ${FOLDER}/train.jsonl
)
PERF_ARGS=(
   --tensor-model-parallel-size 2   # a comment
   --sequence-parallel
   # --micro-batch-size 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 9216
)
ALGORITHM_ARGS=(
   --advantage-estimator ${ESTIMATOR:-grpo}
   --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl
   --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
)
WANDB_ARGS=(
   --use-wandb
   --wandb-key 0123456789abcdef
)
ENGINE_ARGS=(--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 --sglang-cuda-graph-bs 1 2 $(seq 4 4 8))
JOB="{ \"env_vars\": { \"PYTHONPATH\": \"/root/Megatron-LM/:${SCRIPT_DIR}\", \"LINK\": \"${HAS_LINK}\" } }"

ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json="${JOB}" \
   -- python3 train.py \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node ${GPUS} \
   --colocate \
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${EVAL_ARGS[@]} ${PERF_ARGS[@]} \
   ${ALGORITHM_ARGS[@]} ${WANDB_ARGS[@]} ${ENGINE_ARGS[@]}
"""
MODEL = 'MODEL_ARGS=(\n   --swiglu\n   --num-layers 2\n   --rotary-base "${BASE:-10000}"\n)\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script and the model's arguments, in which nothing else is yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text(MODEL)
    (tmp_path / "run.sh").write_text(SCRIPT)
    return tmp_path


def report(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, dict[str, str]]:
    """What the verb prints: by heading, each flag with the rest of its line."""
    assert main(["import", "slime", "run.sh", *argv]) == 0
    sections: dict[str, dict[str, str]] = {}
    section: dict[str, str] = {}
    for line in capsys.readouterr().out.splitlines():
        if line.endswith(")") and line[0].isupper():
            section = sections.setdefault(line, {})
        elif line.startswith(("--", "(no --")):
            flag, _, rest = line.partition("  ")
            section[flag] = rest.strip()
        elif line.startswith("notice: "):
            sections.setdefault("notices", {})[line.removeprefix("notice: ")] = ""
    return sections


WITHOUT_MEGATRON = ("-p", "no:megatron")


def test_every_flag_has_one_line_under_its_verdict(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, *WITHOUT_MEGATRON)
    headings = [heading for heading in found if heading != "notices"]
    assert headings == [
        "Same (26)",
        "Renamed (1)",
        "Not needed (6)",
        "Changes the result (3)",
        "Not there yet (2)",
        "Added, because slime does so by itself (9)",
    ]
    assert [len(found[heading]) for heading in headings] == [26, 1, 6, 3, 2, 9]
    line = SCRIPT.splitlines().index("   --actor-num-gpus-per-node ${GPUS} \\") + 1
    assert found["Same (26)"]["--actor-num-gpus-per-node"].split() == ["4", str(line)]
    assert found["Not needed (6)"]["--rotary-base"].endswith("tiny.sh:4")
    assert "rm_hub/README.md" in found["Changes the result (3)"]["--rm-type"]
    assert list(found["Not there yet (2)"]) == ["--tensor-model-parallel-size", "--sequence-parallel"]
    assert "WANDB_API_KEY" in found["Not needed (6)"]["--wandb-key"]
    assert "0123456789abcdef" not in str(found)
    (notice,) = found["notices"]
    assert f"PYTHONPATH={folder};" in notice


def test_a_dry_run_of_the_file_on_a_laptop_follows(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report(capsys, "--laptop", "--output", "train.yaml")
    monkeypatch.setenv("FOLDER", str(folder))
    make_tiny_model(folder / "model")
    (folder / "installed").mkdir()
    (folder / "installed" / "wandb.py").touch()
    monkeypatch.syspath_prepend(folder / "installed")
    (folder / "train.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    assert main(["train", "--config", "train.yaml", "--dry-run", "--json"]) == 0
    out, err = capsys.readouterr()
    shown = {name: entry["value"] for name, entry in json.loads(out)["options"].items()}
    assert (shown["kl_loss_type"], shown["input_key"], shown["rollout_shuffle"]) == ("low_var_kl", "question", False)
    assert (shown["loss_agg_mode"], shown["adam_beta2"]) == ("seq-mean-token-mean", 0.999)
    assert (shown["dynamic_sampling_filter_path"], shown["rollout_engine"]) == ("nonzero_std", "embedded")
    assert (shown["use_wandb"], shown["logger"]) == (True, ["tensorboard", "wandb"])
    assert (shown["load"], shown["save"]) == (None, f"{folder}/checkpoints/")
    assert "has no checkpoint yet" in err


def test_the_file_for_a_cluster_has_gpus_and_servers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--set", "GPUS=8", "ESTIMATOR=gspo", f"FOLDER={folder}"]
    report(capsys, "--output", "train.yaml", *given, *WITHOUT_MEGATRON)
    text = (folder / "train.yaml").read_text()
    for line in (
        "rollout_engine: sglang  # slime's engines are always SGLang's",
        "actor_num_gpus_per_node: 8",
        "advantage_estimator: gspo",
        f"hf_checkpoint: {folder}/model  # the initial weights too",
        "sglang_cuda_graph_bs: [1, 2, 4, 8]",
        f"eval_prompt_data: [dev={folder}/train.jsonl]",
        "#   --tensor-model-parallel-size 2: a model is not split over GPUs without --train-backend megatron",
    ):
        assert line in text.splitlines()


def test_with_a_megatron_trainer_its_flags_are_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "--output", "train.yaml")
    same = next(lines for heading, lines in found.items() if heading.startswith("Same"))
    assert "with --train-backend megatron" in same["--tensor-model-parallel-size"]
    assert "train_backend: megatron  # slime's trainer" in (folder / "train.yaml").read_text()
    assert "tensor_model_parallel_size: 2" in (folder / "train.yaml").read_text()
    report(capsys, "--output", "torch.yaml", "--train-backend", "torch")
    assert "# tensor_model_parallel_size: 2  # with train_backend: megatron" in (folder / "torch.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "argv", "words"),
    [
        ("ls", [], ["run.sh", "starts no training", "train.py FLAGS"]),
        ("python3 serve.py --x", [], ["starts no training", "serve.py (run.sh:1)"]),
        ("python3 train.py --lr 1\npython3 train.py --lr 2", [], ["2 trainings: run.sh:1, run.sh:2"]),
        ("python3 train.py --lr 1", ["--output", "there.yaml"], ["there.yaml", "--force"]),
        ("python3 train.py --lr 1", ["--output", "no/x.yaml"], ["no/x.yaml", "cannot be written"]),
        ("python3 train.py --lr 1", ["--set", "X"], ["--set", "NAME=VALUE"]),
        ("python3 train.py --lr 1", ["--train-backend", "jax"], ["'jax' is not known"]),
    ],
)
def test_mistakes_are_one_error(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, argv: list[str], words: list[str]
) -> None:
    (folder / "run.sh").write_text(text)
    (folder / "there.yaml").write_text("kept")
    assert main(["import", "slime", "run.sh", *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith("buffer-rl: error: ")
    assert [word for word in words if word not in err] == []
    assert (folder / "there.yaml").read_text() == "kept"


def test_a_file_that_is_there_is_overwritten_on_demand(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "there.yaml").write_text("old")
    report(capsys, "--output", "there.yaml", "--force")
    assert (folder / "there.yaml").read_text().startswith("# buffer-rl import slime run.sh\n")
