"""Cases of information, aborts, pauses, and weight updates by disk."""

from __future__ import annotations

from typing import Any

from conformance.cases_generate import P, bad, count, generate, row
from conformance.reference import Reference
from conformance.steps import Case, again, answer, ask, get, leave, quiet, start

LONG = 400
UPDATE = "/update_weights_from_disk"
DONE = {"status": 200}


def cases(ref: Reference) -> list[Case]:
    """All of them."""
    return [*_information(ref), *_aborts(ref), *_pauses(ref), *_updates(ref)]


def long(rid: str, new: int = LONG) -> dict[str, Any]:
    """A request that runs for a while."""
    return generate(max_new_tokens=new, top={"rid": rid})


def pause(mode: str) -> Any:
    """The step."""
    return quiet("/pause_generation", {"mode": mode})


GO_ON = quiet("/continue_generation", {})


def _information(ref: Reference) -> list[Case]:
    def of(path: str, why: str = "", **expect: Any) -> Case:
        return Case(name=path, steps=[get(path)], expect=[{"status": 200, **expect}], topic="information", why=why)

    return [
        of("/health"),
        of("/ready"),
        of("/health_generate"),
        of("/model_info", weight_version="0", is_generation=True, model_path=ref.folder("0")),
        of("/get_model_info", weight_version="0"),
        of("/server_info", "settings"),
        of("/get_server_info", "settings"),
        Case(name="no such path", steps=[get("/nonsense")], expect=[{"status": 404}], topic="information"),
        Case(name="a wrong method", steps=[get("/generate")], expect=[{"status": 405}], topic="information"),
    ]


def _aborts(ref: Reference) -> list[Case]:
    some = {"finish": "abort", "ids": lambda ids: 0 < len(ids) < LONG, "log_probs": "right"}

    def case(name: str, steps: list[Any], expect: list[Any], **more: Any) -> Case:
        return Case(name=name, steps=steps, expect=expect, topic="aborts", **more)

    def abort(rid: str) -> Any:
        return quiet("/abort_request", {"rid": rid})

    aborted, whole = {"status": 200, "rows": [some]}, {"rows": [{"finish": f"length {LONG}"}]}
    return [
        case("a running request", [start("r", long("r1")), abort("r1"), answer("r")], [aborted], sampled=True),
        case(
            "all",
            [start("r", long("r2")), quiet("/abort_request", {"abort_all": True}), answer("r")],
            [aborted],
            sampled=True,
        ),
        case(
            "the requests whose ids begin so",
            [start("a", long("s1")), start("b", long("s10")), abort("s1"), answer("a"), answer("b")],
            [aborted, aborted],
            sampled=True,
        ),
        case(
            "not the others",
            [start("a", long("t1")), start("b", long("t2")), abort("t1"), answer("a"), answer("b")],
            [aborted, whole],
            sampled=True,
        ),
        case("an unknown id", [ask("/abort_request", {"rid": "nonsense"})], [DONE]),
        case("neither an id nor all", [ask("/abort_request", {})], bad(), as_sglang=[DONE], why="strict"),
        case(
            "the same id while the first is under way",
            [start("r", long("d1")), ask("/generate", long("d1", 2)), answer("r")],
            [*bad("Duplicate request ID"), whole],
        ),
        case(
            "the same id once the first is gone",
            [start("r", long("d2")), abort("d2"), answer("r"), again("/generate", long("d2", 2))],
            [aborted, {"rows": [row("length 2", count(2))]}],
            sampled=True,
        ),
        case(
            "the same id after the client has gone",
            [start("r", long("d3")), leave("r"), again("/generate", long("d3", 2))],
            [{"rows": [row("length 2", count(2))]}],
        ),
        case("an answered id again", [quiet("/generate", long("d4", 2)), ask("/generate", long("d4", 2))], [DONE]),
    ]


def _pauses(ref: Reference) -> list[Case]:
    ids = ref.greedy(P, 40)
    whole = {"rows": [row("length 40", ids, spans=[["0", 0, 40]])]}

    def case(name: str, steps: list[Any], expect: list[Any], **more: Any) -> Case:
        return Case(name=name, steps=steps, expect=expect, topic="pauses", **more)

    def body(rid: str) -> dict[str, Any]:
        return long(rid, 40)

    def mode(name: str) -> Case:
        steps = [start("r", long(f"p-{name}")), pause(name), start("n", body(f"n-{name}"), wait=False)]
        full = {"rows": [{"finish": f"length {LONG}", "log_probs": "right"}]}
        return case(
            f"{name}: a running request and a new one", [*steps, GO_ON, answer("r"), answer("n")], [full, whole]
        )

    aborted = {"rows": [{"finish": "abort", "log_probs": "right"}]}
    stopped = {"rows": [{"finish": "abort", "ids": lambda found: 0 < len(found) < LONG, "log_probs": "right"}]}
    queued = start("q", body("q1"), wait=False)
    end = [GO_ON, answer("q")]
    return [
        mode("in_place"),
        mode("retract"),
        case(
            "abort: a running request", [start("r", long("pa")), pause("abort"), answer("r")], [stopped], sampled=True
        ),
        case("an unknown mode", [ask("/pause_generation", {"mode": "nonsense"})], [{"status": lambda s: s >= 400}]),
        case("/health", [pause("in_place"), get("/health")], [DONE]),
        case("/ready", [pause("in_place"), get("/ready")], [DONE], as_sglang=[{"status": 503}], why="pause"),
        case("/server_info", [pause("retract"), get("/server_info")], [DONE], why="settings"),
        case("flush: nothing there", [ask("/flush_cache", {})], [DONE]),
        case("flush: a running request", [start("r", long("f1")), ask("/flush_cache", {})], [{"status": 400}]),
        case(
            "flush: paused in place",
            [start("r", long("f2")), pause("in_place"), ask("/flush_cache", {})],
            [{"status": 400}],
        ),
        case("flush: retracted", [start("r", long("f3")), pause("retract"), ask("/flush_cache", {})], [DONE]),
        case(
            "an abort of a retracted request",
            [start("r", long("ar")), pause("retract"), quiet("/abort_request", {"rid": "ar"}), answer("r")],
            [stopped],
            sampled=True,
        ),
        case(
            "an abort of a request that came in a pause",
            [pause("in_place"), queued, quiet("/abort_request", {"rid": "q1"}), *end],
            [aborted],
            as_sglang=[whole],
            why="pause",
        ),
        case("continue twice", [GO_ON, ask("/continue_generation", {})], [DONE]),
        case("pause twice", [pause("in_place"), pause("retract"), get("/health")], [DONE]),
    ]


def _updates(ref: Reference) -> list[Case]:
    new, ids = ref.update("1"), ref.greedy(P, 8, version="1")
    named = {"model_path": ref.folder("1")}
    greedy = ask("/generate", generate())

    def case(name: str, steps: list[Any], expect: list[Any], **more: Any) -> Case:
        return Case(name=name, steps=steps, expect=expect, topic="weights by disk", **more)

    def tokens(version: str) -> dict[str, Any]:
        return {"rows": [row("length 8", ids, spans=[[version, 0, 8]])]}

    info = get("/model_info")
    moved = {"status": 200, "success": True}
    both = {
        "rows": [{"finish": f"length {LONG}", "spans": lambda spans: [s[0] for s in spans] == ["0", "1"]}],
    }
    retracted = {"rows": [{**both["rows"][0], "log_probs": "right", "num_retractions": 1}]}
    return [
        case("new weights", [ask(UPDATE, new), greedy, info], [moved, tokens("1"), {"weight_version": "1"}]),
        case(
            "while a request runs: it ends with the old ones",
            [start("r", long("u1")), ask(UPDATE, new), answer("r")],
            [moved, {"rows": [{"finish": f"length {LONG}", "spans": [["0", 0, LONG]], "log_probs": "right"}]}],
        ),
        case(
            "while a request is retracted: it goes on with the new ones",
            [start("r", long("u2")), pause("retract"), ask(UPDATE, {**new, "flush_cache": True}), GO_ON, answer("r")],
            [moved, retracted],
            sampled=True,
            why="detail",
        ),
        case(
            "while a request is paused in place",
            [start("r", long("u3")), pause("in_place"), ask(UPDATE, {**new, "flush_cache": False}), GO_ON, answer("r")],
            [moved, both],
            sampled=True,
            why="detail",
        ),
        case(  # SGLang may flush before the aborted request has ended, and says 400 then
            "with an abort of all",
            [
                start("r", long("u4")),
                ask(UPDATE, {**new, "abort_all_requests": True, "flush_cache": False}),
                answer("r"),
                again("/flush_cache", {}),
                greedy,
            ],
            [moved, {"rows": [{"finish": "abort"}]}, {"status": 200}, tokens("1")],
            sampled=True,
        ),
        case(
            "a folder that is not there",
            [ask(UPDATE, {"model_path": "/nonsense"}), info],
            [{"status": 400}, {"weight_version": "0"}],
        ),
        case("no folder", [ask(UPDATE, {})], [{"status": 400}]),
        case("a version that is a number", [ask(UPDATE, {**new, "weight_version": 1})], [{"status": 400}]),
        case("an unknown field", [ask(UPDATE, {**new, "nonsense": 1})], [moved]),
        case(
            "no version: the name stays",
            [ask(UPDATE, named), info, quiet(UPDATE, ref.update("1")), quiet(UPDATE, ref.update("0"))],
            [moved, {"weight_version": "0"}],
        ),
        case("checksums", [ask("/weights_checker", {"action": "checksum"})], [DONE]),
        case("an unknown check", [ask("/weights_checker", {"action": "nonsense"})], [{"status": 400}]),
    ]
