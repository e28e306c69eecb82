"""Functions that import slime, where no slime is installed: what they ask for is what they get from slime."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from buffer_rl.args import CORE_SECTIONS
from buffer_rl.engines.client import GenerateResult
from buffer_rl.engines.http import RequestGate
from buffer_rl.engines.protocol import RowSeeds
from buffer_rl.errors import ConfigError
from buffer_rl.options.section import compose
from buffer_rl.options.user_args import user_args
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.records.groups import GroupUid, RolloutOutput, Sample, SampleGroup, Status, Ticket, VersionSpan
from buffer_rl.rollout.context import RolloutContext
from buffer_rl.rollout.conversion import GroupConverter
from buffer_rl.rollout.default import DefaultRollout
from buffer_rl.rollout.user_functions import LogFunctions
from buffer_rl.rollout.user_rollout import run_user_rollout
from buffer_rl.testing.fake_buffer import FakeBuffer
from buffer_rl.testing.tiny import make_char_tokenizer
from harness.fake_client import client_of
from harness.scripted_server import ScriptedServer

FILE = Path(__file__).with_name("importing_slime.py")
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
KEY = "secret"


def ref(name: str) -> str:
    return f"{FILE}:{name}"


class Engine:
    """What ``agenerate`` of an engine's client answers, by the same script as the server's."""

    def __init__(self, server: ScriptedServer) -> None:
        self.server = server
        self.gate, self.timeout_s, self.adapter = RequestGate(), 60.0, None
        self.seeds: list[int] = []

    async def row_seeds(self) -> RowSeeds:
        return RowSeeds.SHARED  # each sample asks for itself

    async def agenerate(self, rid: str, input_ids: list[int], params: dict[str, Any], **more: Any) -> GenerateResult:
        text = self.server.say(self.server.tokenizer.decode(input_ids))[: params["max_new_tokens"]]
        ids = self.server.tokenizer.encode(text, add_special_tokens=False)
        self.seeds.append(params["sampling_seed"])
        return GenerateResult(
            output_ids=ids,
            text=text,
            log_probs=[-0.25] * len(ids),
            finish_reason="stop",
            spans=[VersionSpan(3, 0, len(ids))],
        )


def groups_of(prompt: Any, label: Any, count: int = 4, samples: int = 2) -> list[SampleGroup]:
    made = []
    for row in range(count):
        uid = GroupUid("source", row, 0)
        own = [
            Sample(uid=uid, sample_index=i, group_index=row, index=samples * row + i, prompt=prompt, label=label)
            for i in range(samples)
        ]
        made.append(SampleGroup(uid=uid, samples=own, attempt=1, incarnation="inc"))
    return made


@asynccontextmanager
async def rollout(
    say: Callable[[str], str], groups: list[SampleGroup], *, name: str | None = None, wanted: int = 1, **options: Any
) -> AsyncIterator[Any]:
    """A rollout of functions in ``FILE``; yields a call that runs it, with the server and the context."""
    tokenizer = make_char_tokenizer()
    tokenizer.chat_template = TEMPLATE
    evaluation = bool(options.pop("evaluation", False))
    async with ScriptedServer(tokenizer=tokenizer, say=say, key=KEY).serving() as server:
        defaults = {"rollout_batch_size": wanted, "n_samples_per_prompt": len(groups[0]), "engine_api_key": KEY}
        args = compose(CORE_SECTIONS)(**{**defaults, "router_url": server.url, **options})
        ticket = Ticket(
            rollout_id=3, evaluation=evaluation, num_groups=wanted, version=3, incarnation="inc", max_staleness=0
        )
        buffer, registry = FakeBuffer(groups, ticket), PluginRegistry()
        function: Any = registry.resolve("rollout", ref(name)) if name else DefaultRollout(args)
        engine: Any = Engine(server)
        context = RolloutContext.build(args, registry=registry, engine=engine, tokenizer=tokenizer)

        async def run() -> RolloutOutput:
            with context.active():
                output = await run_user_rollout(function, args, client_of(buffer, context), where=f"train_3, {name}")
                for group in output.groups:
                    buffer.finish(group)
                return output

        try:
            yield run, server, buffer, args
        finally:
            await context.aclose()


def searching(text: str) -> str:
    if "<information>" not in text:
        return "I ask <search>abc</search> and more"
    return "<answer>3</answer> and more"


async def test_a_search_is_found_by_its_stop_string_and_the_prompt_is_rendered() -> None:
    options = {"custom_generate_function_path": ref("search_generate"), "custom_rm_path": ref("search_reward")}
    groups = groups_of([{"role": "user", "content": "who?"}], {"ground_truth": "3"})
    async with rollout(searching, groups, apply_chat_template=True, **options) as (run, server, buffer, args):
        user_args(args).search_url = server.search_url
        await run()
    assert server.searches == ["abc", "abc"]
    sample = buffer.finished[0][0]
    rendered = "[user]who?[assistant]"
    assert server.tokenizer.decode(sample.tokens[: sample.prompt_length]) == sample.prompt == rendered
    told = "<information>Title\nthe answer is 3</information>"
    assert sample.response == f"I ask <search>abc</search>{told}<answer>3</answer>"
    assert server.tokenizer.decode(sample.tokens[sample.prompt_length :]) == sample.response
    mask = "".join(map(str, sample.loss_mask))
    assert mask == "1" * 26 + "0" * len(told) + "1" * 18
    assert sample.weight_versions == [VersionSpan(3, 0, 26), VersionSpan(3, 26 + len(told), 44 + len(told))]
    assert sample.reward == 1.0
    assert sample.status is Status.COMPLETED
    assert all(body["sampling_params"]["no_stop_trim"] is True for body in server.bodies)
    assert not hasattr(args, "search_url")


async def test_a_tool_counts_its_calls_on_the_sample_and_the_reward_is_a_mapping_with_text() -> None:
    options = {"custom_generate_function_path": ref("tool_generate"), "custom_rm_path": ref("tool_reward")}

    def say(text: str) -> str:
        return "call " if "[7]" not in text else "so \\boxed{7}"

    groups = groups_of("2+5=", "7")
    async with rollout(say, groups, reward_key="score", **options) as (run, _, buffer, args):
        await run()
        _, columns = GroupConverter.from_args(args, PluginRegistry()).encode(buffer.finished[0], False)
    sample = buffer.finished[0][1]
    assert sample.reward == {"score": 1.0, "acc": 1.0, "pred": "7"}
    assert (sample.tool_call_count, sample.response) == (1, "call [7]so \\boxed{7}")
    assert sample.loss_mask == [1] * 5 + [0] * 3 + [1] * 12
    assert columns["raw_reward"].tolist() == [1.0, 1.0]
    assert columns["loss_mask"][1].tolist() == sample.loss_mask


async def test_agents_write_on_args_and_fan_out() -> None:
    options = {"custom_generate_function_path": ref("agents_generate"), "rm_type": "exact_match"}
    async with rollout(lambda text: "x", groups_of("ab", "x"), **options) as (run, server, buffer, args):
        await run()
    group = buffer.finished[0]
    assert [sample.row_id.sample_index for sample in group] == [0, 0, 1, 1]
    assert [sample.part for sample in group] == [0, 1, 0, 1]
    assert {server.tokenizer.decode(sample.tokens) for sample in group} == {"solver: abx", "critic: abx"}
    assert [sample.reward for sample in group] == [0.5] * 4
    assert [sample.rollout_id for sample in group] == [0, 0, 1, 1]
    assert not hasattr(args, "weight")


async def test_wrapped_generation_has_seeds_of_its_own_and_a_compact_sample_two_parts() -> None:
    options = {"custom_generate_function_path": ref("compact_generate"), "rm_type": "exact_match"}
    async with rollout(lambda text: "xy", groups_of("ab", "xy"), **options) as (run, _, buffer, _):
        await run()
    group = buffer.finished[0]
    assert [(s.sample_index, s.part, s.reward, s.response) for s in group] == [
        (0, 0, 1.0, "xy"),
        (0, 1, 1.0, "xy"),
        (1, 0, 1.0, "xy"),
        (1, 1, 1.0, "xy"),
    ]
    assert group[0].rollout_log_probs == [-0.25, -0.25]


async def test_an_environment_needs_no_reward_function_and_its_statuses_are_text() -> None:
    options = {"custom_generate_function_path": ref("environment_generate")}
    async with rollout(lambda text: "", groups_of("5", None), **options) as (run, _, buffer, _):
        output = await run()
    assert [sample.status for sample in buffer.finished[0]] == [Status.TRUNCATED] * 2
    assert [sample.reward for sample in buffer.finished[0]] == [5.0, 5.0]
    assert [sample.weight_versions for sample in buffer.finished[0]] == [[VersionSpan(3, 0, 2)]] * 2
    assert output.metrics["truncated_ratio"] == 1.0


async def test_a_score_by_the_run_leaves_the_sample_unscored() -> None:
    options = {"custom_generate_function_path": ref("scored_by_the_run"), "rm_type": "exact_match"}
    async with rollout(lambda text: "x", groups_of("ab", "x"), **options) as (run, _, buffer, _):
        await run()
    assert [sample.metadata["reward"] for sample in buffer.finished[0]] == [1.0, 1.0]


@pytest.mark.parametrize(("in_flight", "leased"), [(None, 2), (4, 4)])
async def test_a_group_that_is_not_wanted_stays_where_another_would_have_to_be_generated(
    in_flight: int | None, leased: int
) -> None:
    options = {"dynamic_sampling_filter_path": ref("keep_or_stay"), "over_sampling_batch_size": in_flight}
    options["custom_generate_function_path"] = ref("environment_generate")
    async with rollout(lambda text: "", groups_of("5", None, 8), wanted=2, **options) as (run, _, buffer, _):
        await run()
    assert len(buffer.leased) == leased
    assert len(buffer.finished) == 2
    assert [reason for _, reason in buffer.rejected] == ["never"] * (leased - 2)


async def test_what_one_function_writes_on_args_another_reads() -> None:
    options = {"custom_generate_function_path": ref("environment_generate")}
    options["rollout_all_samples_process_path"] = ref("count_on_args")
    options["custom_rollout_log_function_path"] = ref("log_on_args")
    async with rollout(lambda text: "", groups_of("5", None), **options) as (run, _, buffer, args):
        await run()
        log = LogFunctions(args, PluginRegistry())
        assert (await log.metrics(buffer.ticket, buffer.finished, {}, 1.0))["processed"] == 1.0


@pytest.mark.parametrize("name", ["own_rollout", "groups_at_once"])
async def test_a_whole_rollout_of_the_users_own(name: str) -> None:
    options = {"over_sampling_batch_size": 3, "rm_type": "exact_match", "partial_rollout": False}
    async with rollout(lambda text: "x", groups_of("ab", "x"), name=name, wanted=2, **options) as (run, _, buffer, _):
        output = await run()
    assert len(buffer.finished) == 2
    assert {sample.reward for group in buffer.finished for sample in group} == {1.0}
    assert output.metrics["raw_reward"] == 1.0


async def test_a_function_around_the_default_rollout_changes_its_samples() -> None:
    options = {"rm_type": "exact_match", "name": "around_the_default"}
    async with rollout(lambda text: "x", groups_of("ab", "x"), wanted=2, **options) as (run, _, buffer, _):
        await run()
    assert [sample.reward for group in buffer.finished for sample in group] == [11.0] * 4


async def test_an_evaluation_of_the_users_own() -> None:
    options = {"rm_type": "exact_match", "name": "own_evaluation", "evaluation": True}
    async with rollout(lambda text: "x", groups_of("ab", "x", 2), wanted=2, **options) as (run, _, buffer, _):
        output = await run()
    assert output.metrics["eval/mine"] == 1.0
    assert len(buffer.finished) == 2


async def test_an_evaluation_that_reads_its_sets_itself(tmp_path: Path) -> None:
    file = tmp_path / "dev.jsonl"
    file.write_text('{"q": "ab", "label": "x"}\n{"q": "cd", "label": "y"}\n{"q": "too long", "label": "y"}\n')
    (tmp_path / "eval.yaml").write_text(
        f"datasets: [{{name: own, path: {file}, n_samples_per_eval_prompt: 3, metadata_overrides: {{a: 1}}}}]\n"
    )
    options = {
        "rollout_function_path": ref("reads_data_sets"),
        "eval_prompt_data": [f"dev={file}"],
        "eval_config": str(tmp_path / "eval.yaml"),
        "input_key": "q",
        "n_samples_per_eval_prompt": 2,
        "eval_temperature": 0.25,
        "rollout_max_response_len": 5,
        "rollout_max_prompt_len": 3,
        "rm_type": "exact_match",
    }
    options |= {"name": "reads_data_sets", "evaluation": True}
    async with rollout(lambda text: "x", groups_of("ab", "x"), **options) as (run, _, _, args):
        sets = user_args(args).eval_datasets
        output = await run()
    assert [(s.name, s.n_samples_per_eval_prompt, s.temperature, s.top_p) for s in sets] == [
        ("dev", 2, 0.25, 1.0),
        ("own", 3, 0.25, 1.0),
    ]
    assert [s.inject_metadata({"b": 2}) for s in sets] == [{"b": 2}, {"a": 1, "b": 2}]
    assert (output.metrics["eval/dev"], output.metrics["eval/own"]) == (0.5, 0.5)
    assert output.metrics["eval/own/response_len"] == 1.0


async def test_conversations_become_rows_with_the_masks_of_the_library() -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    options = {"loss_type": "sft_loss", "loss_mask_type": "qwen", "name": "conversations", "hf_checkpoint": "m"}
    async with rollout(lambda text: "", groups_of(talk, None, 1, 1), **options) as (run, server, buffer, _):
        server.tokenizer.chat_template = (
            "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}[assistant]{% endif %}"
        )
        await run()
    sample = buffer.finished[0][0]
    assert server.tokenizer.decode(sample.tokens) == "[user]hi[assistant]yo"
    assert sample.loss_mask == [1, 1]


@pytest.mark.parametrize("attribute", ["custom_rm_path", "generate_function_path"])
async def test_a_sample_does_not_choose_code(attribute: str) -> None:
    groups = groups_of("ab", "x")
    for sample in groups[0]:
        setattr(sample, attribute, "os.system")
    async with rollout(lambda text: "x", groups, name="groups_at_once", rm_type="exact_match") as (run, *_):
        with pytest.raises(ConfigError, match=r"os\.system"):
            await run()
