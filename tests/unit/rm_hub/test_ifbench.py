from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.errors import RewardError
from buffer_rl.records.groups import Sample, Status
from rm_hub.ifbench import score

REGISTRY = """
class AtLeast:
    def __init__(self, name): self.text = None
    def build_description(self, *, number=1, prompt=None): self.number, self.text = number, prompt
    def get_instruction_args(self): return {"number": self.number}
    def check_following(self, response): return len(response.split()) >= self.number

class Copies(AtLeast):
    def get_instruction_args(self): return {"prompt": self.text}
    def check_following(self, response): return self.text in response

INSTRUCTION_DICT = {"count:words": AtLeast, "custom:copy": Copies}
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with the interface of IFBench's."""
    (tmp_path / "ifbench").mkdir()
    (tmp_path / "ifbench" / "__init__.py").touch()
    (tmp_path / "ifbench" / "instructions_registry.py").write_text(REGISTRY)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("ifbench", "ifbench.instructions_registry"):
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]


def sample_of(response: str, ids: Any, kwargs: Any, status: Status = Status.COMPLETED, **more: Any) -> Sample:
    metadata = {"instruction_id_list": ids, "kwargs": kwargs, **more}
    return Sample(prompt="say it", response=response, metadata=metadata, status=status)


@pytest.mark.usefixtures("checkout")
def test_every_instruction_must_be_followed() -> None:
    both = (["count:words", "custom:copy"], [{"number": 3, "keyword": None}, None])
    assert score(None, sample_of("now say it", *both)) == 1.0
    assert score(None, sample_of("say it", *both)) == 0.0
    assert score(None, sample_of("I will not", *both)) == 0.0
    assert score(None, sample_of("say it now</think>done", *both)) == 0.0
    assert score(None, sample_of("now say it", *both, Status.TRUNCATED)) == 0.0
    assert score(None, sample_of("write this down", *both, prompt_text="this")) == 1.0
    assert score(None, sample_of("", ["count:words"], [{"number": 0}])) == 0.0


@pytest.mark.usefixtures("checkout")
def test_rows_that_say_no_instruction_or_an_unknown_one_are_errors() -> None:
    for ids, kwargs in ((None, None), ([], []), (["count:words"], [])):
        with pytest.raises(RewardError, match="does not say which instructions"):
            score(None, sample_of("x", ids, kwargs))
    with pytest.raises(RewardError, match="instruction 'os:system': there is no such instruction"):
        score(None, sample_of("x", ["os:system"], [{}]))


def test_without_a_checkout_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ifbench", None)
    with pytest.raises(RewardError, match="cannot be imported") as failure:
        score(None, sample_of("x", ["count:words"], [{}]))
    assert "PYTHONPATH" in failure.value.hint
