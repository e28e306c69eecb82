"""docs/evidence/conformance.md: what each server answered to each case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.steps import Case, mismatch

HEAD = """# Conformance with SGLang

`python tests/conformance/run.py --server ... --write` sends the cases below to a SGLang 0.5.23 server, to the embedded
engine, and to the embedded engine behaving as SGLang, each with the same tiny model, and writes this page. Greedy
tokens and all log-probabilities are compared with transformers' (to 0.002 nats). A row says how each answer ended;
*same* means that SGLang and the embedded engine agree in status, tokens, texts, ends, versions and log-probabilities.
Not among the cases is what ends a SGLang server: an empty text, token ids below 0 or beyond the padded vocabulary,
files of weights that are cut short. The embedded engine answers 400, and behaving as SGLang ends as well at the
first two.

"""
REASONS = {
    "strict": "the embedded engine refuses what SGLang ignores or answers with nonsense",
    "context margin": "SGLang keeps the last tokens of the context free",
    "pause": "the embedded engine is ready in a pause, and a request that came in one can be aborted",
    "status": "both refuse",
    "top_k 1": "SGLang takes it for greedy and reports log-probabilities without the temperature",
    "settings": "SGLang's `/server_info` shows the weight version that the server was started with",
    "detail": "an empty span of versions, or the number of paused requests, which nothing here reads",
    "absent": "the embedded engine has it, SGLang 0.5.23 does not",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The normalised answers of a server, and what is not as expected of it."""

    found: list[dict[str, Any]]
    wrong: str


def page(cases: Sequence[Case], results: Mapping[str, Sequence[Result]]) -> str:
    """The page. results: of "SGLang", "embedded" and "as SGLang"."""
    lines = ["| request | SGLang | embedded | as SGLang | |", "|---|---|---|---|---|"]
    same = like = requests = 0
    topic = ""
    for case, real, own, imitating in zip(
        cases, results["SGLang"], results["embedded"], results["as SGLang"], strict=True
    ):
        if case.topic != topic:
            lines.append(f"| **{(topic := case.topic)}** | | | | |")
        requests += sum(step.path != "" for step in case.steps)
        is_same, is_like = not disagreement(case, real, own), not disagreement(case, real, imitating)
        same, like = same + is_same, like + is_like
        columns = [brief(result.found) for result in (real, own, imitating)]
        note = "same" if is_same else case.why or "differs"
        lines.append(f"| {case.name} | {' | '.join(columns)} | {note} |")
    words = [f"- *{word}*: {text}." for word, text in REASONS.items() if any(case.why == word for case in cases)]
    counts = (
        f"{len(cases)} cases of {requests} requests: {same} the same at SGLang and the embedded engine, "
        f"{like} at SGLang and the embedded engine behaving as SGLang."
    )
    return HEAD + "\n".join([counts, "", *words, "", *lines, ""])


def disagreement(case: Case, one: Result, other: Result) -> str:
    """Where two servers' answers differ, or ""; random tokens are not compared."""
    return mismatch(_comparable(case, one.found), _comparable(case, other.found))


def _comparable(case: Case, found: Sequence[dict[str, Any]]) -> list[Any]:
    """Answers without the words of errors, and without random tokens."""
    return [_without(case, part) for part in found]


def _without(case: Case, part: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in part.items() if key not in ("message", "rows", "models")}
    if "rows" in part:
        dropped = {"num_retractions", "chunks"}
        dropped |= {"ids", "text", "completion_tokens", "spans"} if case.sampled else set()
        kept["rows"] = [{key: row[key] for key in row if key not in dropped} for row in part["rows"]]
    return kept


def brief(found: Sequence[Mapping[str, Any]]) -> str:
    """Answers in a few words."""
    if not found:
        return "no answer"
    return "; ".join(_brief(part) for part in found).replace("|", "\\|").replace("\n", "\\n")


def _brief(part: Mapping[str, Any]) -> str:
    words = [str(part["status"])]
    ends = [str(row.get("finish")) for row in part.get("rows", [])]
    if ends:
        words.append(ends[0] if len(set(ends)) == 1 else ", ".join(ends))
        words += [f"x {len(ends)}"] if len(ends) > 1 and len(set(ends)) == 1 else []
        judged = {str(row.get("log_probs")) for row in part["rows"]} - {"right", "None", "none"}
        words += [f"log-probabilities {word}" for word in sorted(judged)]
    return " ".join(words)
