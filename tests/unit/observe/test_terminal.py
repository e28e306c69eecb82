"""Text of models and data reaches a terminal as text, whatever is in it."""

from __future__ import annotations

import io
import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from buffer_rl.cli import main
from buffer_rl.errors import DataError
from buffer_rl.observe.gains import EvalGain, gain_table
from buffer_rl.observe.progress import Progress
from buffer_rl.observe.terminal import printable
from buffer_rl.verbs import generate

HOSTILE = "\x1b]0;owned\x07\x1b[2J\rhidden\x9b31m\u202e\x7f\x00"
SHOWN = r"\u001b]0;owned\u0007\u001b[2J\u000dhidden\u009b31m\u202e\u007f\u0000"


def obeyed(text: str) -> set[str]:
    """The characters that a terminal obeys, by their categories in Unicode's table: controls but two, and turns."""
    turning = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    return {
        c
        for c in text
        if (unicodedata.category(c) == "Cc" and c not in "\n\t")
        or unicodedata.category(c) in ("Cs", "Zl", "Zp")
        or unicodedata.bidirectional(c) in turning
    }


@given(st.text(st.characters(codec=None)))
def test_what_is_printable_holds_nothing_that_a_terminal_obeys(text: str) -> None:
    shown = printable(text)
    assert obeyed(shown) == set()
    shown.encode()  # raises for halves of pairs
    assert obeyed(text) or any(c in "\u061c\u200e\u200f" for c in text) or shown == text


@given(st.recursive(st.text(), lambda inner: st.dictionaries(st.text(), inner)))
@pytest.mark.slow
def test_printable_json_is_the_same_json(value: object) -> None:
    assert json.loads(printable(json.dumps(value, ensure_ascii=False))) == value


def test_line_ends_tabs_and_letters_of_any_script_stay() -> None:
    text = "a\n\tb é 漢字\u3000\N{FAMILY} \u200d"
    assert printable(text) == text


@pytest.mark.parametrize("as_json", [False, True])
def test_a_response_is_printed_without_its_control_sequences(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    answer = {"sample_index": 0, "status": "completed", "tokens": 3, "prompt": HOSTILE, "response": HOSTILE}
    answer |= {"label": HOSTILE, "reward": 0.5}
    generate._print(answer, as_json=as_json)
    out = capsys.readouterr().out
    assert obeyed(out) == set()
    assert json.loads(out) == answer if as_json else out.count(SHOWN) == 3


def test_rows_of_a_file_and_errors_in_it_are_printed_so_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": HOSTILE, "label": "x"}, ensure_ascii=True) + "\n")
    assert main(["data", "show", str(file)]) == 0
    shown = capsys.readouterr().out
    assert (obeyed(shown), json.loads(shown)["prompt"]) == (set(), HOSTILE)
    odd = tmp_path / "odd\x1b[2J.jsonl"
    odd.write_text("{")
    assert main(["data", "validate", str(odd)]) == 2
    assert main(["data", "show", str(odd)]) == 2
    said = capsys.readouterr().err
    assert (obeyed(said), said.count(r"odd\u001b[2J.jsonl")) == (set(), 2)


def test_an_error_that_quotes_a_response_is_printed_so_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise DataError(f"the reward of {HOSTILE}", where="r")

    monkeypatch.setattr("buffer_rl.verbs.data.read_dataset", fail)
    monkeypatch.setenv("BUFFER_RL_TRACEBACK", "1")
    assert main(["data", "show", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert (obeyed(said), said.count(SHOWN)) == (set(), 2)  # in the traceback and in the error


def test_lines_panel_and_table_of_a_run_show_names_of_users_functions_as_text() -> None:
    out = io.StringIO()
    console = Console(file=out, width=300)
    with Progress("plain", 3, f"run {HOSTILE}", console=console) as progress:
        progress.notice(f"reward failed on {HOSTILE}")
        progress.step({"train/loss": 1.0, f"rollout/drop_{HOSTILE}": 2.0}, 0)
        progress.eval({f"eval/{HOSTILE}": 1.0}, 1)
        progress.groups(1, 2, {HOSTILE: 1})
        console.print(progress.render())
    console.print(gain_table([EvalGain(name=HOSTILE, before=0.0, after=1.0, first_step=0, last_step=1)]))
    text = out.getvalue()
    assert obeyed(text) == set()
    assert text.count(r"\u001b]0;owned") >= 5


def test_a_set_that_was_evaluated_once_has_its_value_where_it_was_measured() -> None:
    """Step 0 is before the training, any other after it; nothing was gained that could be known."""
    once = [EvalGain(name="dev", before=0.25, after=0.25, first_step=step, last_step=step) for step in (0, 7)]
    columns = gain_table(once).columns
    assert [list(column.cells) for column in columns[1:]] == [["0.250", "-"], ["-", "0.250"], ["-", "-"], ["0", "7"]]
