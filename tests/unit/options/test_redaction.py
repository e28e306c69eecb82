"""Secrets of options and URLs are not written down."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer_rl.options.redaction import holds_credentials, mask_command, mask_secrets, mask_url


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:pass@host:80/score?key=abc&model=m#x", "https://***@host:80/score?key=***&model=***#x"),
        ("s3://KEY:SECRET@bucket/run", "s3://***@bucket/run"),
        ("dev=https://host/d.jsonl?X-Amz-Signature=ab%20c@[0:3]", "dev=https://host/d.jsonl?X-Amz-Signature=***"),
        ("two: http://a:b@c/d and http://e:f@g?h=i", "two: http://***@c/d and http://***@g?h=***"),
        ("s3://bucket/file@[0:10]", "s3://bucket/file@[0:10]"),
        ("data/train.jsonl@[0:10]", "data/train.jsonl@[0:10]"),
        ("you@example.org?a=b", "you@example.org?a=b"),
    ],
)
def test_urls_lose_user_password_and_the_values_of_their_query(text: str, shown: str) -> None:
    assert mask_url(text) == shown


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("https://user:pass@host:80/score", True),
        ("https://ghp_token@host/score", True),
        ("s3://KEY:SECRET@bucket/run", True),
        ("dev=s3://KEY:SECRET@bucket/run@[0:3]", True),
        ('{"url": "http://u:p@h/x"}', True),
        ("http://host/score?model=m&token=abc", True),
        ("http://host/score?api_key=abc", True),
        ("https://host/d.jsonl?X-Amz-Credential=a&X-Amz-Date=1", True),
        ("https://host/d.jsonl?sv=2020&sig=abc", True),
        ("https://host/d.jsonl?X-Goog-Signature=abc", True),
        ("sftp://me@host/data.jsonl", False),
        ("s3://bucket/file.jsonl@[0:10]", False),
        ("http://127.0.0.1:8000/score?model=m&version=2", False),
        ("data/user:pass@host?token=abc", False),
        ("you@example.org", False),
    ],
)
def test_credentials_in_addresses_are_found(text: str, holds: bool) -> None:
    assert holds_credentials(text) is holds


def test_values_are_masked_by_the_names_of_secrets_and_only_by_these() -> None:
    values = {
        "my_judge_api_key": "sk-1",
        "wandb_key": "w",
        "hf_token": "t",
        "password": "p",
        "headers": {"Authorization": "Bearer b", "Accept": "json"},
        "label_key": "label",
        "id_key": "id",
        "rollout_stop_token_ids": [1, 2],
        "max_tokens_per_gpu": 16,
        "api_key": None,
        "secret": "",
        "rm_url": "http://u:p@h/x",
        "eval_prompt_data": ["dev=s3://u:p@b/x"],
    }
    assert mask_secrets(values) == {
        **values,
        "my_judge_api_key": "***",
        "wandb_key": "***",
        "hf_token": "***",
        "password": "***",
        "headers": {"Authorization": "***", "Accept": "json"},
        "rm_url": "http://***@h/x",
        "eval_prompt_data": ["dev=s3://***@b/x"],
    }


@given(st.text(st.characters(exclude_characters="/?#@", exclude_categories=["Cs", "Z", "Cc"]), min_size=1))
def test_no_userinfo_comes_through(secret: str) -> None:
    assert mask_url(f"s3://{secret}@bucket/a") == "s3://***@bucket/a"


@given(st.text())
def test_texts_without_an_address_stay_as_they_are(text: str) -> None:
    assert mask_url(text.replace("://", "")) == text.replace("://", "")


def test_a_command_line_loses_the_values_of_secret_flags_and_nothing_else() -> None:
    words = [
        "train",
        "--engine-api-key",
        "one",
        "--wandb-key=two",
        "--seed",
        "3",
        "--label-key",
        "answer",
        "s3://a:b@c/d",
    ]
    shown = [
        "train",
        "--engine-api-key",
        "***",
        "--wandb-key=***",
        "--seed",
        "3",
        "--label-key",
        "answer",
        "s3://***@c/d",
    ]
    assert mask_command(words) == shown
    words = ["--train-env-vars", '{"API_KEY": "x", "A": "b"}', '--more={"password": "x"}', "TOKEN=x", "{no json", "a=b"]
    shown = ["--train-env-vars", '{"API_KEY": "***", "A": "b"}', '--more={"password": "***"}', "TOKEN=***", *words[4:]]
    assert mask_command(words) == shown
    assert mask_command(["--engine-api-key", "--seed", "3"]) == ["--engine-api-key", "--seed", "3"]  # it has no value


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("serve --api-key sk-123 --port 1", "serve --api-key *** --port 1"),
        ("serve --env OPENAI_API_KEY='sk 1' --hf-token=t", "serve --env OPENAI_API_KEY=*** --hf-token=***"),
        ("curl -H 'Authorization: Bearer abc' x", "curl -H 'Authorization: Bearer ***' x"),
        ("Authorization: abc", "Authorization: ***"),
        ("OPENAI_API_KEY=sk-1", "OPENAI_API_KEY=***"),
        ("OPENAI_KEY=sk-1", "OPENAI_KEY=***"),
        ("serve --label-key answer --max-tokens 5 --api-key", "serve --label-key answer --max-tokens 5 --api-key"),
        ("--api-key --port 1", "--api-key --port 1"),
        ("a token is a word; label_key=answer", "a token is a word; label_key=answer"),
    ],
)
def test_secrets_inside_texts_are_masked_and_other_words_stay(text: str, shown: str) -> None:
    assert mask_secrets({"a": [text]}) == {"a": [shown]}
    assert mask_command(["--agent-command", text]) == ["--agent-command", shown]


def test_variables_of_the_environment_that_end_in_key_are_secrets() -> None:
    values = {"OPENAI_KEY": "sk-1", "sort_key": "a", "KEY": "b"}
    assert mask_secrets(values) == {**values, "OPENAI_KEY": "***"}
