"""Runs slime's own examples, unchanged, on this library: ``python tests/slime_examples.py PATH`` of a slime checkout.

Prints a table in Markdown, one row an example, with the commit that was tried; exits with 1 where one fails. Nothing
of the checkout is copied, and no model is needed: a server scripted by each example answers in an engine's place.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).parent))

from buffer_rl.data.eval_sets import eval_datasets
from buffer_rl.options.user_args import user_args
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import GroupUid, QueueHeader, Sample, SampleGroup
from buffer_rl.rollout.conversion import GroupConverter
from buffer_rl.rollout.user_functions import LogFunctions, UserFunction, choose_queued
from buffer_rl.testing.tiny import make_char_tokenizer
from harness import stand_in_packages
from harness.slime_checkout import TEMPLATE, Checkout, expect, groups_of, trial

CONTRACTS = "tests/plugin_contracts"
GENERATE = "slime.rollout.sglang_rollout.generate"


async def search(checkout: Checkout) -> None:
    def say(text: str) -> str:
        return "<answer>3</answer> more" if "<information>" in text else "<search>abc</search> more"

    file = "examples/search-r1/generate_with_search.py"
    options = {"custom_generate_function_path": checkout.ref(file, "generate"), "apply_chat_template": True}
    options["custom_rm_path"] = checkout.ref(file, "reward_func")
    question = "who? As in <answer>me</answer>"
    groups = groups_of([{"role": "user", "content": question}], {"ground_truth": {"target": ["3"]}})
    async with trial(checkout, say, groups, **options) as (run, server, buffer, _):
        module = next(m for name, m in sys.modules.items() if name.endswith("generate_with_search"))
        module.SEARCH_R1_CONFIGS["local"]["search_url"] = server.search_url
        await run()
    sample = buffer.finished[0][0]
    expect(server.searches[:1], ["abc"])
    expect(sample.prompt, f"[user]{question}")
    expect(sample.response.endswith("<answer>3</answer>"), True)
    expect(server.tokenizer.decode(sample.tokens), sample.prompt + sample.response)
    expect(sample.reward >= 0.8, True)


async def retool(checkout: Checkout) -> None:
    file = "examples/retool/generate_with_retool.py"
    options = {"custom_generate_function_path": checkout.ref(file, "generate"), "reward_key": "score"}
    options["custom_rm_path"] = checkout.ref(file, "reward_func")

    def say(text: str) -> str:
        return "Answer: \\boxed{7}" if "<interpreter>" in text.split("assistant")[-1] else "<code>print(7)</code>"

    async with trial(checkout, say, groups_of("3+4=", "7"), **options) as (run, _, buffer, _):
        await run()
    sample = buffer.finished[0][0]
    expect(sample.reward["score"], 1.0)
    expect(sample.tool_call_count, 1)
    expect(0 in sample.loss_mask and len(sample.loss_mask) == sample.response_length, True)


async def agents(checkout: Checkout) -> None:
    options = {
        "custom_generate_function_path": "examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents"
    }
    options["rm_type"] = "deepscaler"

    def say(text: str) -> str:
        return "</think>so \\boxed{7}" if "Judgment" not in text else "</think>\\boxed{1}"

    async with trial(checkout, say, groups_of("3+4=", "7", samples=1), **options) as (run, _, buffer, args):
        await run()
    group = buffer.finished[0]
    expect(len(group) > 5, True)
    expect({sample.sample_index for sample in group}, {0})
    expect(any(hasattr(sample, "reason_content") for sample in group), True)
    expect(hasattr(args, "results_dict"), False)


async def environment(checkout: Checkout) -> None:
    stand_in_packages.install()
    options = {"custom_generate_function_path": checkout.ref("examples/tau-bench/generate_with_tau.py", "generate")}
    async with trial(checkout, lambda text: "right", groups_of("5", None), **options) as (run, server, buffer, _):
        server.tokenizer.chat_template = TEMPLATE + "{% if add_generation_prompt %}[assistant]{% endif %}"
        await run()
    sample = buffer.finished[0][0]
    expect((sample.reward, str(sample.status), sample.response), (1.0, "completed", "right"))
    expect(len(sample.loss_mask), sample.response_length)


async def fan_out(checkout: Checkout) -> None:
    file = "slime/rollout/_fanout_test_helpers.py"
    options = {"custom_generate_function_path": checkout.ref(file, "compact_generate"), "rm_type": "exact_match"}
    options["custom_reward_post_process_path"] = checkout.ref(file, "grpo_normalize_by_group_index")
    async with trial(checkout, lambda text: "xyxyxy", groups_of("ab", "xyxyxy"), **options) as (run, _, buffer, _):
        await run()
    expect(len(buffer.finished[0]) > 2, True)


@contextmanager
def their_rollout(checkout: Checkout) -> Iterator[Any]:
    """slime's own ``sglang_rollout`` over the names of this library."""
    name = "slime.rollout.sglang_rollout_of_the_checkout"
    spec = importlib.util.spec_from_file_location(name, checkout.path / "slime/rollout/sglang_rollout.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module


async def whole(checkout: Checkout, form: str) -> None:
    options: dict[str, Any] = {"rm_type": "exact_match", "wanted": 2}
    if form != "training":
        options["over_sampling_batch_size"] = 3
    if form == "partial":
        options |= {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True}
    with their_rollout(checkout) as module:
        options["name"] = module.generate_rollout
        async with trial(checkout, lambda text: "x", groups_of("ab", "x", 8), **options) as (run, _, buffer, _):
            output = await run()
    expect(len(buffer.finished), 2)
    expect({sample.reward for group in buffer.finished for sample in group}, {1.0})
    expect(output.metrics["raw_reward"], 1.0)


def two_rows(folder: str) -> Path:
    """An evaluation set."""
    file = Path(folder, "dev.jsonl")
    file.write_text('{"prompt": "ab", "label": "x"}\n{"prompt": "cd", "label": "y"}\n')
    return file


async def evaluation(checkout: Checkout) -> None:
    """slime's own function reads the evaluation set itself."""
    file = two_rows(checkout.folder)
    with their_rollout(checkout) as module:
        options = {"name": module.generate_rollout, "evaluation": True, "rm_type": "exact_match"}
        options |= {"eval_prompt_data": [f"mine={file}"]}
        async with trial(checkout, lambda text: "x", groups_of("ab", "x"), **options) as (run, _, _, args):
            user_args(args).eval_datasets = eval_datasets(args)  # as the context does for a function named by an option
            output = await run()
    expect(output.metrics["eval/mine"], 0.5)


async def fine_tuning(checkout: Checkout) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    options = {"name": checkout.ref("slime/rollout/sft_rollout.py", "generate_rollout"), "loss_type": "sft_loss"}
    async with trial(checkout, lambda text: "", groups_of(talk, None, 1, 1), **options) as (run, server, buffer, _):
        server.tokenizer.chat_template = TEMPLATE + "{% if add_generation_prompt %}[assistant]{% endif %}"
        await run()
    sample = buffer.finished[0][0]
    expect(server.tokenizer.decode(sample.tokens[sample.prompt_length :]), "yo")


async def filters(checkout: Checkout) -> None:
    file = "slime/rollout/filter_hub/dynamic_sampling_filters.py"
    registry = PluginRegistry.from_flags(["slime"])
    for name in ("check_reward_nonzero_std", "check_reward_nonzero_std_with_fallback"):
        theirs = registry.resolve("filter", checkout.ref(file, name))
        ours = registry.resolve("filter", f"slime.rollout.filter_hub.dynamic_sampling_filters.{name}")
        for rewards in ([0.0, 1.0], [1.0, 1.0], [0.0, 1e-6], [0.0, 2e-6], [0.1 + 0.2, 0.3]):
            group = SampleGroup(samples=[Sample(reward=reward) for reward in rewards])
            answers = [f(SimpleNamespace(reward_key=None), group) for f in (theirs, ours)]
            found, wanted = ((bool(a.keep), a.reason, a.keep_when_insufficient) for a in answers)
            expect(found, wanted)


def load_contracts(checkout: Checkout) -> PluginRegistry:
    """Makes the files of the contract tests importable: they name slime's own data source, and do not make one here."""
    registry = PluginRegistry.from_flags(["slime"])
    vars(importlib.import_module("slime.rollout.data_source"))["RolloutDataSourceWithBuffer"] = object
    sys.path.append(str(checkout.path / "tests"))
    return registry


def buffer_filters(checkout: Checkout) -> None:
    registry = load_contracts(checkout)
    headers = [QueueHeader(uid=GroupUid("source", row, 0), admitted=row, prompt_length=1) for row in range(3)]
    for file, name, rows in (
        ("slime/rollout/data_source.py", "pop_first", [0, 1]),
        (f"{CONTRACTS}/test_plugin_path_loading_contracts.py", "reference_buffer_filter", [2, 1]),
    ):
        function: Any = registry.resolve("buffer_filter", checkout.ref(file, name))
        chosen = UserFunction("buffer_filter", name, function)
        expect([uid.row for uid in choose_queued(chosen, None, 0, headers, 2)], rows)


async def hooks(checkout: Checkout) -> None:
    load_contracts(checkout)

    def ref(name: str, file: str = "path_loading") -> str:
        return checkout.ref(f"{CONTRACTS}/test_plugin_{file}_contracts.py", f"reference_{name}")

    options = {
        "custom_generate_function_path": GENERATE,
        "custom_rm_path": ref("single_rm"),
        "dynamic_sampling_filter_path": ref("dynamic_filter"),
        "rollout_sample_filter_path": ref("rollout_sample_filter"),
        "rollout_all_samples_process_path": ref("rollout_all_samples_process"),
        "custom_reward_post_process_path": ref("reward_post_process", "runtime_hook"),
        "custom_rollout_log_function_path": ref("custom_rollout_log", "runtime_hook"),
        "custom_eval_rollout_log_function_path": ref("custom_eval_rollout_log", "runtime_hook"),
    }
    groups = groups_of("ab", "x", 3)
    groups[0][0].metadata["drop"] = True
    async with trial(checkout, lambda text: "x", groups, wanted=2, **options) as (run, _, buffer, args):
        await run()
        expect([group.uid.row for group in buffer.finished], [1, 2])
        expect([sample.reward for sample in buffer.finished[0]], [2.1, 3.1])
        expect([sample.remove_sample for sample in buffer.finished[0]], [False, True])
        expect(user_args(args).processed_group_count, 3)  # the dropped one, too
        functions, registry = LogFunctions(args, PluginRegistry()), PluginRegistry()
        for evaluation, name in ((False, "logged_rollout_id"), (True, "logged_eval_rollout_id")):
            ticket = replace(buffer.ticket, evaluation=evaluation)
            await functions.metrics(ticket, buffer.finished, {}, 1.0)
            expect(getattr(user_args(args), name), 3)
        _, columns = GroupConverter.from_args(args, registry).encode(buffer.finished[0], False)
        expect([round(reward, 4) for reward in columns["reward"].tolist()], [3.1, 4.1])


async def rewards_of_groups(checkout: Checkout) -> None:
    load_contracts(checkout)
    file = f"{CONTRACTS}/test_plugin_path_loading_contracts.py"
    options = {"custom_group_rm_path": checkout.ref(file, "reference_batched_rm")}
    options["custom_generate_function_path"] = GENERATE
    async with trial(checkout, lambda text: "x", groups_of("ab", "x", 1), **options) as (run, _, buffer, _):
        await run()
    expect([sample.reward for sample in buffer.finished[0]], [0.2, 1.2])


def own_tests(checkout: Checkout, files: list[str]) -> Callable[[Checkout], Awaitable[None]]:
    """slime's own tests, in a process in which ``slime`` is this library's, and what it lacks is the checkout's."""
    start = "import sys, pytest; from buffer_rl.plugin.registry import PluginRegistry; "
    start += "PluginRegistry.from_flags(['slime']); "
    start += "import slime; slime.__path__.append(sys.argv[1] + '/slime'); sys.exit(pytest.main(sys.argv[2:]))"

    async def run(checkout: Checkout) -> None:
        paths = [str(checkout.path / "tests" / file) for file in files]
        command = [sys.executable, "-c", start, str(checkout.path), "-q", "-p", "no:cacheprovider", *paths]
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=300, cwd=checkout.folder
        )
        if done.returncode:
            raise AssertionError(done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-300:])

    return run


def trials(checkout: Checkout) -> dict[str, Callable[[Checkout], Awaitable[None]]]:
    return {
        "examples/search-r1: generate, reward_func": search,
        "examples/retool: generate, reward_func": retool,
        "examples/multi_agent": agents,
        "examples/tau-bench (tau_bench and SGLang's tool parser stand in)": environment,
        "rollout/_fanout_test_helpers: compact_generate, grpo_normalize_by_group_index": fan_out,
        "rollout/sglang_rollout: generate_rollout, training": lambda c: whole(c, "training"),
        "rollout/sglang_rollout: generate_rollout, over-sampling": lambda c: whole(c, "over-sampling"),
        "rollout/sglang_rollout: generate_rollout, partial rollout": lambda c: whole(c, "partial"),
        "rollout/sglang_rollout: generate_rollout, evaluation": evaluation,
        "rollout/sft_rollout: generate_rollout": fine_tuning,
        "rollout/filter_hub: dynamic sampling filters": filters,
        "rollout/data_source, tests/plugin_contracts: buffer filters": lambda c: asyncio.to_thread(buffer_filters, c),
        "tests/plugin_contracts: filters, log functions, post-processing, reward": hooks,
        "tests/plugin_contracts: reward of a group": rewards_of_groups,
        "tests/test_sample.py": own_tests(checkout, ["test_sample.py"]),
        "tests/test_agent": own_tests(checkout, ["test_agent"]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("-k", default="", help="only examples whose name has this text")
    parser.add_argument("--commit", default="", help="the commit, where the folder is no Git repository")
    parser.add_argument("--traceback", action="store_true")
    given = parser.parse_args()
    if not (given.checkout / "slime").is_dir():
        parser.error(f"{given.checkout} is no checkout of slime: it has no folder slime")
    sys.path.append(str(given.checkout))
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_char_tokenizer()
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder)
        checkout = Checkout(path=given.checkout.resolve(), folder=folder)
        print(f"| slime {given.commit or checkout.commit} | runs |\n|---|---|")
        for name, function in trials(checkout).items():
            if given.k not in name:
                continue
            verdict = "as it is"
            try:
                asyncio.run(asyncio.wait_for(function(checkout), 300))
            except Exception as error:  # the boundary to code of others
                failed += 1
                verdict = f"no: {type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
                if given.traceback:
                    traceback.print_exc()
            print(f"| {name} | {verdict} |", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
