"""What an engine answers to ``/generate``, read and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from buffer_rl.errors import EngineError
from buffer_rl.types import Status, VersionSpan, tile

_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateResult:
    """One answer. ``log_probs[i]``, in nats, belongs to ``output_ids[i]``; finish_reason: stop, length or abort.

    matched: the token id or the string that stopped it, if any. cached_tokens: prompt tokens that another request
    had computed. spans: which weight version sampled which tokens; they tile ``output_ids``.
    """

    output_ids: list[int]
    text: str
    log_probs: list[float]
    finish_reason: str
    spans: list[VersionSpan]
    matched: int | str | None = None
    cached_tokens: int = 0

    @property
    def status(self) -> Status:
        """The status of a sample with this answer."""
        return _STATUS[self.finish_reason]


def parse_answer(answer: Any, url: str) -> GenerateResult:
    """Read one answer of ``/generate``. Raises EngineError if it breaks the protocol.

    Empty spans, which SGLang sends for an answer without tokens, say nothing and are left out.
    """
    try:
        meta = answer["meta_info"]
        reason = meta["finish_reason"]
        pairs = meta["output_token_logprobs"]
        result = GenerateResult(
            output_ids=list(answer["output_ids"]),
            text=answer.get("text") or "",
            log_probs=[float(pair[0]) for pair in pairs],
            finish_reason=reason["type"],
            spans=[
                VersionSpan(int(span["version"]), int(span["start"]), int(span["end"]))
                for span in meta["weight_versions"]
                if span["start"] != span["end"]
            ],
            matched=reason.get("matched"),
            cached_tokens=int(meta.get("cached_tokens", 0)),
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise EngineError(
            f"an answer of /generate breaks the protocol: {type(error).__name__}: {error}",
            where=url,
            expected="output_ids and meta_info with finish_reason, output_token_logprobs, weight_versions",
            hint="start the engine with a whole number as --weight-version",
        ) from error
    if [pair[1] for pair in pairs] != result.output_ids:
        raise EngineError("output_token_logprobs does not belong to output_ids", where=url)
    if not tile(result.spans, len(result.output_ids)):
        raise EngineError(
            f"weight_versions {meta['weight_versions']} of {len(result.output_ids)} output tokens",
            where=url,
            expected="spans {version, start, end} that cover every output token once, in order",
            hint="the engine has to report which weights sampled each token, as a current SGLang does",
        )
    if result.finish_reason not in _STATUS:
        raise EngineError(
            f"unknown finish reason {result.finish_reason!r}", where=url, expected=f"one of {', '.join(_STATUS)}"
        )
    return result
