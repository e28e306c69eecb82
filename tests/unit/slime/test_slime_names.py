"""The finder of import names, and requests under slime's names."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.errors import PluginError, RolloutError
from buffer_rl.options.section import compose
from buffer_rl.plugin.import_names import ImportNameFinder, is_provided
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.rollout.context import RolloutContext
from buffer_rl.rollout.lease import Lease
from buffer_rl.rollout.requests import Requests
from buffer_rl.testing.tiny import make_char_tokenizer
from buffer_rl_slime import http, rewards, tools
from buffer_rl_slime.names import SLIME
from buffer_rl_slime.tools import run
from harness.scripted_server import ScriptedServer, served


@pytest.fixture
def clean() -> Iterator[None]:
    """Without the names, and without what this test imports afterwards."""

    def forget() -> None:
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, ImportNameFinder)]
        for name in [name for name in sys.modules if name.partition(".")[0] in ("slime", "miles")]:
            del sys.modules[name]

    forget()
    yield
    forget()


def plugin(folder: Path, source: str) -> str:
    file = folder / "mine.py"
    file.write_text(source)
    return f"{file}:f"


@pytest.mark.parametrize("package", ["slime", "miles"])
def test_a_plugin_that_imports_the_name_inside_a_function_finds_it(package: str, tmp_path: Path, clean: None) -> None:
    source = f"def f(args, sample):\n    from {package}.utils.types import Sample\n    return Sample\n"
    function = PluginRegistry().resolve("reward", plugin(tmp_path, source))
    from buffer_rl.records.groups import Sample

    assert function(None, None) is Sample


def test_a_file_that_asks_for_a_name_that_cannot_be_had_is_executed_once(tmp_path: Path, clean: None) -> None:
    source = (
        f"open({str(tmp_path / 'runs')!r}, 'a').write('x')\nfrom slime.utils.types import Sample\nimport slime.ray\n"
    )
    with pytest.raises(PluginError, match=r"plugins/buffer_rl_slime/README\.md"):
        PluginRegistry().resolve("reward", plugin(tmp_path, f"{source}def f(args, sample):\n    return 1.0\n"))
    assert (tmp_path / "runs").read_text() == "x"


def test_nothing_is_found_where_no_plugin_asks_for_it(tmp_path: Path, clean: None) -> None:
    PluginRegistry().resolve("reward", plugin(tmp_path, "def f(args, sample):\n    return 1.0\n"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("slime")


def test_a_neighbour_that_imports_it_is_enough(tmp_path: Path, clean: None) -> None:
    (tmp_path / "near_slime.py").write_text("from slime.utils.types import Sample\n")
    source = "import near_slime\ndef f(args, sample):\n    return near_slime.Sample\n"
    function = PluginRegistry().resolve("reward", plugin(tmp_path, source))
    from buffer_rl.records.groups import Sample

    assert function(None, None) is Sample


def test_an_installed_package_of_the_name_is_left_alone_unless_p_asks(
    tmp_path: Path, clean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime/__init__.py").write_text("REAL = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    reference = plugin(tmp_path, "import slime\ndef f(args, sample):\n    return 1.0\n")
    PluginRegistry().resolve("reward", reference)
    assert sys.modules["slime"].REAL
    with pytest.raises(PluginError, match="loaded already"):
        PluginRegistry.from_flags(["slime"])
    del sys.modules["slime"]
    PluginRegistry.from_flags(["slime"])
    assert is_provided(importlib.import_module("slime"))


def test_a_blocked_name_is_not_provided(tmp_path: Path, clean: None) -> None:
    registry = PluginRegistry.from_flags(["no:slime"])
    with pytest.raises(PluginError, match="No module named 'slime'"):
        registry.resolve("reward", plugin(tmp_path, "import slime\ndef f(args, sample):\n    return 1.0\n"))


@pytest.mark.parametrize(
    "line",
    [
        "import slime.backends.megatron_utils",
        "from slime.rollout.data_source import RolloutDataSource",
        "from slime.utils.http_utils import init_http_client",
        "import slime.ray",
        "from slime.agent.adapters import OpenAIAdapter",
        "from slime.rollout.sglang_rollout import _prepare_prompt_ids",
        "from slime.utils import nothing",
        "from slime.utils.types import nothing",
    ],
)
def test_what_cannot_be_had_says_which_page_to_read(line: str, clean: None) -> None:
    PluginRegistry.from_flags(["slime"])
    with pytest.raises(ImportError, match=r"plugins/buffer_rl_slime/README\.md"):
        exec(line, {})


def test_a_module_is_imported_from_its_package(clean: None) -> None:
    PluginRegistry.from_flags(["slime"])
    found: dict[str, Any] = {}
    exec("from slime.utils import http_utils", found)
    exec("from slime.rollout import sglang_rollout as rollout", found)
    assert found["http_utils"].post is http.post
    assert found["rollout"].generate.__module__ == "buffer_rl_slime.rollout"


def test_every_module_of_the_names_is_importable_and_exports_what_it_lists(clean: None) -> None:
    PluginRegistry.from_flags(["slime"])
    for name in SLIME.modules:
        module = importlib.import_module(f"slime.{name}" if name else "slime")
        names = SLIME.names_of(name)
        assert {*names} == {*getattr(module, "__all__", ())}
        assert bool(names) or SLIME.is_package(name) or any(each.startswith(f"{name}.") for each in SLIME.absent)
        for here, (where, there) in names.items():
            assert getattr(module, here) is getattr(importlib.import_module(where), there)


def test_torch_and_transformers_are_not_loaded_by_the_names_that_rewards_import() -> None:
    code = (
        "import sys; from buffer_rl.plugin.registry import PluginRegistry; PluginRegistry.from_flags(['slime']); "
        "from slime.utils.types import Sample; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


async def opened(url: str, **options: Any) -> RolloutContext:
    args = compose(CORE_SECTIONS)(router_url=url, engine_api_key="key", generate_timeout_s=60.0, **options)
    return RolloutContext.build(args, registry=PluginRegistry(), engine=None, tokenizer=make_char_tokenizer())


async def test_the_key_goes_to_the_runs_own_router_and_to_no_other_server() -> None:
    server = ScriptedServer(tokenizer=make_char_tokenizer(), say=lambda text: "x", key="key")
    async with server.serving():
        context = await opened(server.url)
        with context.active():
            body = {"text": "a", "sampling_params": {"max_new_tokens": 3}}
            assert (await http.post(f"{server.url}/generate", body))["text"] == "x"
            assert (await http.post(server.search_url, {"queries": ["q"]}))["result"]
        with pytest.raises(http.RequestError, match="401"):  # outside of a rollout there is no key; 401 is final
            await http.post(f"{server.url}/generate", body)


async def test_a_request_is_known_by_its_id_and_one_after_the_rollout_has_enough_is_answered_as_aborted() -> None:
    seen: list[set[str]] = []
    requests = Requests()

    async def answer(request: web.Request) -> web.Response:
        seen.append(set(requests._running))
        assert (await request.json())["rid"] in requests._running
        return web.json_response({"meta_info": {}})

    async with served([web.post("/generate", answer)]) as url:
        context = await opened(url)
        with Lease(context=context, requests=requests).active():
            await http.post(f"{url}/generate", {"input_ids": [1]})
            requests.stopped = True
            after = await http.post(f"{url}/generate", {"input_ids": [1]})
    assert len(seen) == 1
    assert requests._running == set()
    assert after["meta_info"]["finish_reason"]["type"] == "abort"


async def test_run_refuses_to_wait_for_itself() -> None:
    context = await opened("http://127.0.0.1:9")

    async def work() -> int:
        return 1

    with context.active(), pytest.raises(RolloutError, match="wait for itself"):
        run(work())


def test_graders_under_slimes_names() -> None:
    assert rewards.compute_score("so \\boxed{7}", "7", strict_box_verify=True) == {
        "score": 1.0,
        "acc": True,
        "pred": "7",
    }
    assert rewards.compute_score("Answer: 8", "7") == {"score": -1.0, "acc": False, "pred": "8"}
    assert rewards.get_deepscaler_rule_based_reward("</think>\\boxed{7}", "7") == 1.0
    assert rewards.f1_score("a cat sat", "cat ran there") == pytest.approx((0.4, 0.5, 1 / 3))
    assert rewards.compute_gpqa_reward("I choose B", "B") == 1.0
    assert rewards.grade_answer_verl("so \\boxed{2/4}", "1/2") is False  # not in lowest terms
    assert rewards.grade_answer_verl("7", "7") is False  # not in a box
    assert rewards.compute_score("Answer: 33<|im_end|>", "033")["acc"] is True


def test_helpers() -> None:
    assert tools.group_by([1, 2, 3], key=lambda n: n % 2) == {1: [1, 3], 0: [2]}
    assert [n for n in range(6) if tools.should_run_periodic_action(n, 2, num_rollout=5)] == [1, 3, 4, 5]
    assert tools.get_response_lengths([[0, 1, 0], [0, 0]]) == [2, 0]
    drop = rewards.DynamicFilterOutput(keep=False, keep_when_insufficient=True)
    decide = rewards.should_drop_dynamic_filter_output
    assert decide(drop, remaining_batch_size=3, target_data_size=2)
    assert not decide(drop, remaining_batch_size=2, target_data_size=2)
