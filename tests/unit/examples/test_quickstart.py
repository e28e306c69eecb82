from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from buffer_rl.observe.gains import EvalGain
from buffer_rl.records.groups import Sample, Status

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "quickstart"


def _load(name):
    spec = importlib.util.spec_from_file_location(f"quickstart_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


prepare, run, my_reward = _load("prepare"), _load("run"), _load("my_reward")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    paths = prepare.make_data(tmp_path_factory.mktemp("data"), seed=3)
    return {name: [json.loads(line) for line in path.read_text().splitlines()] for name, path in paths.items()}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    prepare.make_model(folder, seed=3)
    return folder


def test_no_word_is_in_two_of_the_files_or_twice_in_one(data):
    words = [row["id"] for rows in data.values() for row in rows]
    assert {name: len(rows) for name, rows in data.items()} == {"heldout": 400, "dev": 256, "train": 20_000}
    assert len(set(words)) == len(words)


def test_every_label_is_the_word_of_its_prompt_spelt_backwards(data):
    for row in (row for rows in data.values() for row in rows):
        word, end = row["prompt"][:-1], row["prompt"][-1]
        assert end == "="
        assert list(row["label"]) == [word[i] for i in range(len(word) - 1, -1, -1)]
        assert 3 <= len(word) <= 10
        assert set(word) <= set("abcdefghijklmnopqrstuvwxyz")


def test_reasoning_gym_gives_full_marks_for_the_label_of_a_row(data):
    import reasoning_gym

    row = data["heldout"][0]
    score = reasoning_gym.get_score_answer_fn(row["metadata"]["source_dataset"])
    assert score(answer=row["label"], entry={"answer": row["label"], "metadata": row["metadata"]}) == 1.0


def test_the_seed_alone_decides_the_split(data, tmp_path):
    again = prepare.make_data(tmp_path / "a", seed=3)
    other = prepare.make_data(tmp_path / "b", seed=4)
    assert [json.loads(line) for line in again["heldout"].read_text().splitlines()] == data["heldout"]
    assert other["heldout"].read_text() != again["heldout"].read_text()


def test_the_tokenizer_gives_one_token_a_character_and_gives_the_text_back(data, model_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    for row in data["dev"]:
        ids = tokenizer.encode(row["prompt"] + row["label"])
        assert len(ids) == len(row["prompt"] + row["label"])
        assert tokenizer.decode(ids) == row["prompt"] + row["label"]
        assert tokenizer.unk_token_id not in ids
    assert tokenizer.eos_token_id not in tokenizer.encode("snarleyyow=")


def test_the_model_is_a_small_qwen3_that_ends_with_the_tokenizers_end_token(model_folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    # embeddings, then per layer: q and o, k and v, the two head norms, the MLP, the two layer norms; the last norm
    layer = 2 * 96 * 96 + 2 * 96 * 48 + 2 * 24 + 3 * 96 * 192 + 2 * 96
    assert model.num_parameters() == len(tokenizer) * 96 + 2 * layer + 96 == 175_968
    assert model.config.model_type == "qwen3"
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_the_model_has_room_for_the_longest_prompt_and_answer(data, model_folder):
    from transformers import AutoConfig

    longest = max(len(row["prompt"]) for rows in data.values() for row in rows)
    assert longest + 12 <= AutoConfig.from_pretrained(model_folder).max_position_embeddings


def _gain(before, after, name="heldout"):
    return EvalGain(name=name, first_step=0, before=before, last_step=150, after=after)


def test_the_quickstart_fails_if_accuracy_rose_by_less_than_25_points():
    assert run.verdict([_gain(0.25, 0.5)]) is None
    assert "nothing was learned" in run.verdict([_gain(0.25, 0.375)])
    assert "+12.5 points" in run.verdict([_gain(0.25, 0.375)])
    assert "heldout" in run.verdict([_gain(0.0, 1.0, name="dev")])


@pytest.mark.parametrize(
    ("response", "status", "reward"),
    [
        ("tac", Status.COMPLETED, 1.0),
        ("tat", Status.COMPLETED, 2 / 3),
        ("tacs", Status.COMPLETED, 3 / 4),
        ("", Status.COMPLETED, 0.0),
        ("tac", Status.TRUNCATED, 0.0),
    ],
)
def test_the_example_reward_gives_partial_credit_only_to_answers_that_ended(response, status, reward):
    assert my_reward.score(None, Sample(response=response, label="tac", status=status)) == pytest.approx(reward)
