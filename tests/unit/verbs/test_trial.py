"""The trial of a few rows: mistakes that only a tokenizer or a reward shows, told before anything starts."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.cli import main
from buffer_rl.errors import BufferRLError, ConfigError, DataError, PluginError
from buffer_rl.options.section import compose
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import GroupUid, Sample
from buffer_rl.testing.tiny import make_char_tokenizer
from buffer_rl.verbs.engine_checks import ContextLimit
from buffer_rl.verbs.generate import _prompt_samples
from buffer_rl.verbs.row_sources import Trial
from buffer_rl.verbs.train import TrialProcess, read_data
from buffer_rl.verbs.trial import try_rows

pytestmark = pytest.mark.usefixtures("forked_processes")
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system messages') }}"
    "{% endif %}{{ message.role }}:{{ message.content }}<eos>{% endfor %}{% if add_generation_prompt %}assistant:"
    "{% endif %}"
)
REWARDS = """
import os
import sys
from buffer_rl.rollout.context import current_context

def share(args, sample):
    print("printed by the reward")
    return float(sample.status == "completed" and sample.response == sample.label)

def text(args, sample):
    return "0.5"

def raises(args, sample):
    return len(sample.response) / sample.metadata["length"]

def fails_on_empty(args, sample):
    return 1.0 / len(sample.response)

def equal(args, sample):
    return 0.25

def longest(args, sample):
    return float(sample.status == "truncated")

def boxed(args, sample):
    return float(sample.response == "\\\\boxed{" + sample.label + "}")

def mapping(args, sample):
    return {"right": share(args, sample), "note": "x"}

async def later(args, sample):
    return share(args, sample)

async def of_a_rollout(args, sample):
    return float(len(current_context().tokenizer))

def without_a_rollout(args, sample):
    return float(len(current_context().tokenizer))

async def group(args, group):
    return [share(args, sample) for sample in group]

def group_of_two(args, group):
    return [1.0, 0.0]

def ends(args, sample):
    sys.exit(3)

def says(args, sample):
    print("printed by the reward")
    sys.exit(3)

def hangs(args, sample):
    import time
    time.sleep(60)

def noted(args, sample):
    with open(os.environ["NOTES"], "a") as file:
        file.write("called\\n")
    return 1.0
"""


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of characters with a chat template that refuses system messages."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = make_char_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tokenizer_folder, tmp_path / "model")
    set_vocabulary(tmp_path, 200)
    (tmp_path / "model" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path


def set_vocabulary(folder: Path, rows: int) -> None:
    (folder / "model" / "config.json").write_text(json.dumps({"vocab_size": rows}))


def write(folder: Path, *rows: Any, name: str = "train.jsonl") -> None:
    """Rows after an empty line, so that lines are not numbers of rows."""
    (folder / name).write_text("\n" + "".join(json.dumps(row) + "\n" for row in rows))


def tried(folder: Path, engines: Any = (), **options: Any) -> Trial:
    scores = {} if any(name in options for name in ("custom_rm_path", "custom_group_rm_path")) else {"rm_type": "f1"}
    chosen = {"hf_checkpoint": "model", "prompt_data": ["train.jsonl"], "num_rollout": 1, **scores, **options}
    args = compose(CORE_SECTIONS).model_validate(chosen)
    registry = PluginRegistry()
    return try_rows(args, registry, read_data(args, registry), engines)


def refused(error: type[BufferRLError], words: str, folder: Path, **options: Any) -> str:
    with pytest.raises(error, match=words) as caught:
        tried(folder, **options)
    return str(caught.value)


def reward(name: str) -> str:
    return f"./rewards.py:{name}"


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_the_first_and_the_longest_prompt_are_encoded_as_the_model_reads_them(folder: Path) -> None:
    write(folder, {"prompt": [message("user", "abc")], "label": "x"}, {"prompt": [message("user", "abcd")]})
    (prompts,) = tried(folder, custom_rm_path=reward("equal")).prompts
    assert prompts.text == "user:abc<eos>assistant:"
    assert prompts.lengths == [8 + 1 + 10, 9 + 1 + 10]
    assert (prompts.longest, prompts.longest_at) == (20, "train.jsonl:3")


def test_prompts_of_an_evaluation_that_are_rendered_otherwise_than_those_of_training_are_a_notice(folder: Path) -> None:
    rows = {
        "text.jsonl": {"prompt": "abc", "label": "x"},
        "chat.jsonl": {"prompt": [message("user", "abc")], "label": "x"},
    }
    for name, row in rows.items():
        write(folder, row, name=name)

    def said(train: str, dev: str, **options: Any) -> list[str]:
        trial = tried(folder, prompt_data=[train], eval_prompt_data=[f"dev={dev}"], rm_type="f1", **options)
        return [notice for notice in trial.notices if "those of training" in notice]

    (notice,) = said("chat.jsonl", "text.jsonl")
    assert notice.startswith("the prompts of eval/dev are read as plain text, those of training with the chat template")
    (notice,) = said("text.jsonl", "chat.jsonl")
    assert notice.startswith("the prompts of eval/dev are read with the chat template, those of training as plain text")
    assert not said("chat.jsonl", "text.jsonl", apply_chat_template=True)
    assert not said("text.jsonl", "text.jsonl")
    assert not said("chat.jsonl", "chat.jsonl")


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ([[message("system", "a")]], {}, r"train\.jsonl:2: the chat template refuses the prompt: .*no system messages"),
        (["a", [message("system", "a" * 9)]], {}, r"train\.jsonl:3: the chat template refuses the prompt"),
        (["a"], {"eval_prompt_data": ["dev=dev.jsonl"]}, r"dev\.jsonl:2: the chat template refuses the prompt"),
    ],
)
def test_a_prompt_that_cannot_be_rendered_is_named_with_file_and_line(
    folder: Path, rows: list[Any], options: dict[str, Any], words: str
) -> None:
    write(folder, *({"prompt": prompt, "label": "x"} for prompt in rows))
    write(folder, {"prompt": [message("system", "a")], "label": "x"}, name="dev.jsonl")
    refused(DataError, words, folder, **options)


def test_a_prompt_that_only_a_function_of_the_users_reads_is_not_refused(folder: Path) -> None:
    write(folder, {"prompt": [message("system", "a")], "label": "x"})
    (folder / "own.py").write_text(
        "async def generate(args, sample, params): ...\nasync def produce(a, r, b, e): ...\n"
    )
    (left_out,) = tried(folder, custom_generate_function_path="./own.py:generate").unchecked
    assert left_out.startswith("prompts of train (./own.py:generate may encode what fails here")
    (left_out,) = tried(folder, rollout_function_path="./own.py:produce").unchecked
    assert left_out.startswith("prompts and rewards of train (the rollout function ./own.py:produce")


SFT: dict[str, Any] = {"rollout_function_path": "sft", "loss_type": "sft_loss", "custom_rm_path": None}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a"}, "the label is None"),
        ({"prompt": "a", "label": 3}, "the label is 3"),
        ({"prompt": "a", "label": ""}, "the label is ''"),
        ({"prompt": [message("user", "a")]}, "there is no answer to train on"),
        ({"prompt": [message("assistant", "a")]}, "begins with an answer"),
    ],
)
def test_a_supervised_row_without_anything_to_train_on_is_named_wherever_it_stands(
    folder: Path, row: Any, words: str
) -> None:
    good = {"prompt": "a longer prompt than that", "label": "b"}
    write(folder, good, good | {"prompt": "the longest prompt of all of them"}, good, row, good)
    refused(DataError, rf"train\.jsonl:5: .*{re.escape(words)}", folder, **SFT)


def test_supervised_rows_that_cannot_be_used_are_in_one_error(folder: Path) -> None:
    write(folder, *({"prompt": "a", "label": label} for label in ("b", None, "c", *[None] * 21)))
    said = refused(DataError, r"^train\.jsonl:3: the label is None\ntrain\.jsonl:5: the label is None\n", folder, **SFT)
    assert said.count("the label is None") == 20
    assert "... and 2 more rows" in said


def test_the_loss_masks_of_all_conversations_are_made(folder: Path) -> None:
    conversation = [message("user", "a"), message("assistant", "b")]
    write(folder, *({"prompt": conversation} for _ in range(3)), {"prompt": "a", "label": "b"})
    trial = tried(folder, **SFT)
    assert trial.prompts[0].masks == 3
    assert trial.prompts[0].text == "user:a<eos>assistant:b<eos>"
    assert trial.prompts[0].lengths[0] == len("user:a") + 1 + len("assistant:")
    assert (trial.rows, trial.unchecked) == ([], [])


def test_supervised_rows_with_a_loss_that_trains_by_rewards_get_a_notice(folder: Path) -> None:
    write(folder, {"prompt": [message("user", "a"), message("assistant", "b")]})
    assert tried(folder, **SFT).notices == []
    for loss, shown in (None, "policy_loss"), ("cispo", "cispo"):
        (notice,) = tried(folder, **SFT | {"loss_type": loss}).notices
        assert notice.startswith(f"--rollout-function-path sft gives no rewards, and --loss-type {shown} is not the")
        assert notice.endswith("the loss on the answers is --loss-type sft_loss")


def test_conversations_whose_last_answer_has_no_end_token_are_counted(folder: Path) -> None:
    write(folder, *({"prompt": [message("user", "a"), message("assistant", text)]} for text in "bcd"))
    path = folder / "model" / "chat_template.jinja"
    assert tried(folder, **SFT).notices == []
    end = "{% if not loop.last or add_generation_prompt %}<eos>{% endif %}"
    path.write_text(TEMPLATE.replace("<eos>", end))
    (notice,) = tried(folder, **SFT).notices
    assert "the last answer of 3 of 3 conversations ends without a special token (train.jsonl:2)" in notice


def test_tokens_that_the_model_does_not_have_are_refused_and_spare_rows_are_normal(folder: Path) -> None:
    write(folder, {"prompt": "a", "label": "b"})
    size = len(make_char_tokenizer())
    set_vocabulary(folder, size)
    assert tried(folder).notices == []
    set_vocabulary(folder, size - 2)
    refused(ConfigError, f"--hf-checkpoint model: 2 tokens .* with {size - 2}", folder)
    shutil.copytree(folder / "model", folder / "reference")
    set_vocabulary(folder, size)
    refused(ConfigError, "--ref-load reference: 2 tokens", folder, ref_load="reference")
    shutil.rmtree(folder / "reference")
    path = folder / "model" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    added = dict(tokenizer["added_tokens"][0], id=size, content="<image>")
    path.write_text(json.dumps(tokenizer | {"added_tokens": [*tokenizer["added_tokens"], added]}))
    set_vocabulary(folder, size)
    (notice,) = tried(folder).notices
    assert "none for 1 special tokens, such as '<image>'" in notice


def test_prompts_beyond_a_limit_are_counted_and_refused_if_no_other_is_left(folder: Path) -> None:
    write(folder, *({"prompt": "a" * length, "label": "b"} for length in (4, 5, 9, 6)))
    (notice,) = tried(folder, rollout_max_prompt_len=5).notices
    assert notice.startswith("2 of 4 training prompts that were encoded have more than 5 tokens")
    assert "prompt_too_long" in notice
    (notice,) = tried(folder, rollout_max_context_len=9).notices
    assert notice.startswith("1 of 4 training prompts that were encoded have more than 8 tokens")
    assert tried(folder, rollout_max_prompt_len=9).notices == []
    assert (
        tried(folder, rollout_max_prompt_len=5, rollout_max_context_len=9).notices[1:] == []
    )  # 9 tokens never meet it
    limits = [ContextLimit(prompt=n, sequence=n + 1, of=of) for n, of in ((5, "the engine"), (9, "another"))]
    (notice,) = tried(folder, engines=limits).notices
    assert "2 of 4" in notice
    assert "more than 5 tokens (the engine); such a prompt is refused by the engines" in notice
    said = refused(
        ConfigError, "--rollout-max-prompt-len: 4 of 4 .* more than 3 tokens", folder, rollout_max_prompt_len=3
    )
    assert "expected: at least 4, " in said
    refused(ConfigError, "--rollout-max-prompt-len: 4 of 4", folder, rollout_max_prompt_len=3, **SFT)
    assert len(tried(folder, rollout_max_prompt_len=5, **SFT).notices) == 1


@pytest.mark.parametrize("name", ["share", "later"])
def test_the_label_an_empty_and_a_truncated_answer_are_scored_where_prints_do_no_harm(
    folder: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write(folder, *({"prompt": "a", "label": "word"} for _ in range(9)))
    write(folder, {"prompt": "a", "label": 7}, name="dev.jsonl")
    trial = tried(folder, custom_rm_path=reward(name))
    assert [row.where for row in trial.rows] == ["train.jsonl:2", "train.jsonl:5", "train.jsonl:8"]
    assert [row.scores for row in trial.rows] == [{"label": 1.0, "empty": 0.0, "truncated": 0.0}] * 3
    assert (trial.notices, trial.unchecked) == ([], [])
    out, err = capfd.readouterr()
    assert (out, err.count("printed by the reward")) == ("", 9)


@pytest.mark.parametrize("name", ["share", "says"])
def test_what_a_trial_in_its_process_prints_is_shown_after_the_line_that_grows(
    folder: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write(folder, {"prompt": "a", "label": "word"})
    options = {"hf_checkpoint": "model", "prompt_data": ["train.jsonl"], "custom_rm_path": reward(name)}
    trial = TrialProcess(compose(CORE_SECTIONS).model_validate({**options, "num_rollout": 1}), [])
    with nullcontext() if name == "share" else pytest.raises(PluginError, match="SystemExit: 3"):
        trial.result(lambda: print("; the line ends", file=sys.stderr, flush=True))
    out, err = capfd.readouterr()
    first, *others = err.splitlines()
    assert (out, first) == ("", "; the line ends")
    assert others == ["printed by the reward"] * 3


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("text", r"train\.jsonl:2, the label answer 'word': the reward is '0.5' \(str\)"),
        ("raises", r"train\.jsonl:2, the label answer 'word': KeyError: 'length'(.|\n)*rewards\.py\", line \d+"),
        ("fails_on_empty", r"train\.jsonl:2, the empty answer '': ZeroDivisionError"),
        ("mapping", "the reward is a mapping with keys .* --reward-key"),
        ("without_a_rollout", "there is no rollout context here"),  # a run calls it in a process of its own, too
        ("ends", "SystemExit: 3"),
        ("hangs", "no reward within --rm-timeout-s 0.2 s"),
    ],
)
def test_a_reward_that_fails_is_refused_with_the_row_and_the_answer(folder: Path, name: str, words: str) -> None:
    write(folder, {"prompt": "a", "label": "word"})
    timeout = {"rm_timeout_s": 0.2} if name == "hangs" else {}
    said = refused(PluginError, words, folder, custom_rm_path=reward(name), **timeout)
    assert said.startswith(f"reward {reward(name)!r}, ")
    assert ("--no-trial" in said) == (name != "text")  # a wrong type fails in the run as well


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("equal", r"gives 0\.25 to every answer that was tried \(train"),
        ("longest", r"does not score the label best at train\.jsonl:2: label 0, empty 0, truncated 1"),
    ],
)
def test_a_reward_that_does_not_tell_answers_apart_is_told(folder: Path, name: str, words: str) -> None:
    write(folder, {"prompt": "a", "label": "word"})
    (notice,) = tried(folder, custom_rm_path=reward(name)).notices
    assert re.search(words, notice)


def test_where_a_reward_raises_at_a_row_without_a_label_it_says_so(folder: Path) -> None:
    write(folder, {"prompt": "a"})
    where = r"train\.jsonl:2, a row without a label, the empty answer ''"
    refused(PluginError, where, folder, custom_rm_path=reward("boxed"))


def test_a_label_is_also_tried_in_the_forms_that_rewards_ask_for(folder: Path) -> None:
    write(folder, {"prompt": "a", "label": "word"})
    trial = tried(folder, custom_rm_path=reward("boxed"))
    assert (trial.rows[0].scores["label"], trial.rows[0].form) == (1.0, "\\boxed{{{}}}")
    assert trial.notices == []


def test_a_mapping_is_scored_by_its_key_and_a_group_as_a_whole(folder: Path) -> None:
    write(folder, {"prompt": "a", "label": "word"})
    scores = {"label": 1.0, "empty": 0.0, "truncated": 0.0}
    assert tried(folder, custom_rm_path=reward("mapping"), reward_key="right").rows[0].scores == scores
    assert tried(folder, custom_group_rm_path=reward("group")).rows[0].scores == scores
    words = r"group_reward .*, train\.jsonl:2, a group of three answers: the reward is \[1.0, 0.0\]"
    refused(PluginError, words, folder, custom_group_rm_path=reward("group_of_two"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rm_url": "http://127.0.0.1:9", "rm_type": "remote"}, "--rm-url"),
        ({"custom_rm_path": "./rewards.py:of_a_rollout"}, "only while a rollout runs"),
        ({"rm_model": "model", "rm_type": None}, "--rm-model"),
        ({"use_opd": True, "rm_type": None}, "the teacher"),
    ],
)
def test_rewards_that_need_more_than_a_row_are_not_tried(folder: Path, options: Any, words: str) -> None:
    write(folder, {"prompt": "a", "label": "word"})
    trial = tried(folder, **options)
    assert (trial.rows, trial.notices) == ([], [])
    assert words in trial.unchecked[0]
    assert trial.unchecked[0].startswith("rewards of train (")


def test_with_a_generate_function_of_the_users_a_reward_may_need_what_that_function_adds(folder: Path) -> None:
    write(folder, {"prompt": "a", "label": "word"})
    (folder / "own.py").write_text("async def generate(args, sample, params): ...\n")
    own = {"custom_generate_function_path": "./own.py:generate"}
    (left_out,) = tried(folder, custom_rm_path=reward("raises"), **own).unchecked
    assert re.search(r"rewards of train \(on an answer that \./own\.py:generate did not give: .*KeyError", left_out)
    assert tried(folder, rm_type=None, **own).unchecked == ["rewards of train (./own.py:generate scores)"]
    trial = tried(folder, custom_rm_path=reward("share"), **own)
    assert (len(trial.rows), trial.unchecked) == (1, [])


def test_a_dry_run_says_what_it_tried_and_no_trial_calls_nothing(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTES", str(folder / "notes"))
    write(folder, {"prompt": "a\x1b[2Jäß", "label": "word"}, {"prompt": "abc", "label": "word"})
    flags = ["--hf-checkpoint", "model", "--prompt-data", "train.jsonl", "--num-rollout", "1", "--logger", "--dry-run"]
    assert main(["train", *flags, "--custom-rm-path", reward("noted"), "--no-trial"]) == 0
    assert not (folder / "notes").exists()
    assert capfd.readouterr().out.endswith("Not checked: prompts and rewards (--no-trial).\n")
    assert main(["train", *flags, "--custom-rm-path", reward("noted")]) == 0
    out, err = capfd.readouterr()
    assert len((folder / "notes").read_text().splitlines()) >= 6
    assert "  train  first: 'a\\x1b[2Jäß'" in out
    assert "tokens: 7 in the first, 7 in the longest (train.jsonl:2)" in out
    assert "train  label 1       empty 1       truncated 1       ./rewards.py:noted  train.jsonl:2" in out
    assert "notice: the reward './rewards.py:noted' gives 1 to every answer" in err
    assert out.endswith("Dry run: everything that can be checked before a run is right.\n")
    assert not (folder / "runs").exists()
    assert main(["train", *flags, "--custom-rm-path", reward("text")]) == 2


def test_an_evaluation_tries_its_own_sets_alone(folder: Path, run_verb: Callable[..., str]) -> None:
    write(folder, {"prompt": [message("system", "of the training alone")]})
    write(folder, {"prompt": "a", "label": "word"}, name="dev.jsonl")
    flags = ["--hf-checkpoint", "model", "--prompt-data", "train.jsonl", "--eval-prompt-data", "dev=dev.jsonl"]
    out = run_verb("eval", *flags, "--rm-type", "exact_match", "--logger", "--dry-run", "--json")
    trial = json.loads(out)["trial"]
    assert [prompts["use"] for prompts in trial["prompts"]] == ["eval/dev"]
    assert [row["scores"] for row in trial["rows"]] == [{"label": 1.0, "empty": 0.0, "truncated": 0.0}]


def test_data_show_prints_the_prompt_as_a_run_encodes_it(folder: Path, run_verb: Callable[..., str]) -> None:
    write(folder, {"q": [message("user", "ab")], "a": "word"}, {"q": "plain", "a": "word"})
    (folder / "run.yaml").write_text("hf_checkpoint: model\ninput_key: q\nlabel_key: a\nnum_rollout: 3\n")
    flags = ("--input-key", "q", "--label-key", "a", "--hf-checkpoint", "model")
    first, second = map(json.loads, run_verb("data", "show", "train.jsonl", *flags).splitlines())
    assert (first["text"], first["tokens"]) == (
        "user:ab<eos>assistant:",
        7 + 1 + 10,
    )  # a token per character, <eos> one
    assert (second["text"], second["tokens"]) == ("plain", 5)
    assert json.loads(run_verb("data", "show", "train.jsonl", "--config", "run.yaml", "-n", "1")) == first
    _, templated = map(
        json.loads, run_verb("data", "show", "train.jsonl", *flags, "--apply-chat-template").splitlines()
    )
    assert templated["text"] == "user:plain<eos>assistant:"
    run_verb_flags = ("--prompt-data", "train.jsonl", "--rm-type", "exact_match", "--num-rollout", "1", "--logger")
    trial = json.loads(run_verb("train", *flags, *run_verb_flags, "--dry-run", "--json"))["trial"]
    assert trial["prompts"][0]["text"] == first["text"]


def test_data_show_prints_a_conversation_as_fine_tuning_reads_it(folder: Path, run_verb: Callable[..., str]) -> None:
    write(folder, {"messages": [message("user", "ab"), message("assistant", "ba")]})
    shown = json.loads(run_verb("data", "show", "train.jsonl", "--input-key", "messages", "--hf-checkpoint", "model"))
    assert shown["text"] == "user:ab<eos>assistant:ba<eos>"
    assert (shown["tokens"], shown["trained_tokens"]) == (7 + 1 + 10 + 2 + 1, 3)


def test_data_show_without_a_model_names_the_flag(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(folder, {"prompt": "a"})
    assert main(["data", "show", "train.jsonl"]) == 0
    out, err = capfd.readouterr()
    assert "text" not in json.loads(out)
    assert "notice: --hf-checkpoint FOLDER also shows" in err


@pytest.mark.parametrize(("given", "is_templated"), [({}, True), ({"apply_chat_template": False}, False)])
def test_generate_asks_a_chat_model_in_its_template_unless_told_otherwise(
    folder: Path, capfd: pytest.CaptureFixture[str], given: dict[str, bool], is_templated: bool
) -> None:
    args: Any = compose(CORE_SECTIONS)(hf_checkpoint="model", **given)
    (sample,), encoder = _prompt_samples(args, ["ab"], 1)
    as_message = encoder.encode(Sample(uid=GroupUid("s", 0, 0), prompt=[message("user", "ab")]))
    as_text = encoder.encode(Sample(uid=GroupUid("s", 0, 0), prompt="ab"))
    assert as_message != as_text
    assert encoder.encode(sample) == (as_message if is_templated else as_text)
    assert ("--no-apply-chat-template sends it as plain text" in capfd.readouterr().err) == is_templated


def test_generate_names_a_prompt_that_cannot_be_encoded_before_an_engine_starts(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(folder, {"prompt": "a"}, {"prompt": [message("system", "a")]})
    assert main(["generate", "--hf-checkpoint", "model", "--prompt-data", "train.jsonl"]) == 2
    assert "train.jsonl:3: the chat template refuses the prompt" in capfd.readouterr().err
    plain = ["--no-apply-chat-template", "--prompt", "a", "--prompt", ""]
    assert main(["generate", "--hf-checkpoint", "model", *plain]) == 2
    assert "--prompt, number 2: the prompt has no tokens" in capfd.readouterr().err


@pytest.fixture
def run_verb(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*argv: str) -> str:
        assert main([*argv]) == 0
        return capfd.readouterr().out

    return run
