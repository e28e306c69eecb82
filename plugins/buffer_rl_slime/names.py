"""The import names of slime, for functions that were written for it, and where each is here.

``buffer_rl.plugin.import_names`` makes the modules. A package that has modules alone needs no row.
"""

from __future__ import annotations

from buffer_rl.plugin.import_names import NameTable

PAGE = "plugins/buffer_rl_slime/README.md"
FULLY_ASYNC = "take --schedule async with the built-in rollout, without --rollout-function-path"

SLIME = NameTable(
    page=PAGE,
    modules={
        "backends.sglang_utils.server_control": {"buffer_rl_slime.rollout": "abort_servers_until_idle"},
        "observability.trace_utils": {
            "buffer_rl_slime.tools": "build_sglang_meta_trace_attrs, trace_event, trace_function, trace_span",
        },
        "rollout.base_types": {"buffer_rl_slime.rollout": "RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn"},
        "rollout.data_source": {"buffer_rl_slime.data_source": "DataSource, pop_first"},
        "rollout.filter_hub.base_types": {
            "buffer_rl_slime.rewards": (
                "DynamicFilterOutput, MetricGatherer, call_dynamic_filter, should_drop_dynamic_filter_output"
            ),
        },
        "rollout.filter_hub.dynamic_sampling_filters": {
            "buffer_rl_slime.rewards": "check_reward_nonzero_std, check_reward_nonzero_std_with_fallback",
        },
        "rollout.fully_async_rollout": {},
        "rollout.rm_hub": {
            "buffer_rl_slime.rewards": (
                "async_rm, batched_async_rm, compute_gpqa_reward, f1_score, get_deepscaler_rule_based_reward, "
                "grade_answer_verl, remote_rm"
            ),
        },
        "rollout.rm_hub.deepscaler": {"buffer_rl_slime.rewards": "get_deepscaler_rule_based_reward"},
        "rollout.rm_hub.f1": {"buffer_rl_slime.rewards": "f1_score"},
        "rollout.rm_hub.gpqa": {"buffer_rl_slime.rewards": "compute_gpqa_reward"},
        "rollout.rm_hub.math_dapo_utils": {"buffer_rl_slime.rewards": "compute_score"},
        "rollout.rm_hub.math_utils": {"buffer_rl_slime.rewards": "extract_answer, grade_answer_verl"},
        "rollout.sample_hooks": {"buffer_rl_slime.tools": "apply_rollout_sample_hooks"},
        "rollout.sft_rollout": {"buffer_rl_slime.rollout": "generate_sft_rollout as generate_rollout"},
        "rollout.sglang_rollout": {
            "buffer_rl_slime.rollout": (
                "GenerateState, abort, eval_rollout, generate, generate_and_rm, generate_and_rm_group, "
                "generate_rollout, generate_rollout_async, get_model_url"
            ),
        },
        "utils.async_utils": {"buffer_rl_slime.tools": "run"},
        "utils.data": {"buffer_rl_slime.data_source": "Dataset"},
        "utils.eval_config": {"buffer_rl.data.eval_sets": "EvalDatasetConfig"},
        "utils.http_utils": {"buffer_rl_slime.http": "get, post", "buffer_rl_slime.tools": "get_rollout_num_engines"},
        "utils.mask_utils": {"buffer_rl_slime.tools": "MultiTurnLossMaskGenerator, get_response_lengths"},
        "utils.misc": {
            "buffer_rl_slime.tools": (
                "Box, SingletonMeta, decode_int32_meta_array, group_by, load_function, should_run_periodic_action"
            ),
        },
        "utils.processing_utils": {
            "buffer_rl_slime.tools": (
                "build_processor_kwargs, encode_image_for_rollout_engine, load_processor, load_tokenizer"
            ),
        },
        "utils.trace_utils": {
            "buffer_rl_slime.tools": "build_sglang_meta_trace_attrs, trace_event, trace_function, trace_span",
        },
        "utils.types": {"buffer_rl.records.groups": "Sample"},
    },
    absent={
        "rollout.data_source.RolloutDataSource": "the Buffer reads --prompt-data itself",
        "rollout.data_source.RolloutDataSourceWithBuffer": "the Buffer reads --prompt-data and keeps the queue itself",
        "rollout.fully_async_rollout.AsyncRolloutWorker": FULLY_ASYNC,
        "rollout.fully_async_rollout.generate_rollout_fully_async": FULLY_ASYNC,
        "rollout.sglang_rollout.eval_rollout_single_dataset": "call generate_rollout(..., evaluation=True)",
        "utils.async_utils.get_async_loop": "coroutines run on the rollout's own event loop; use run(coroutine)",
        "utils.http_utils.init_http_client": "nothing has to be initialised",
    },
)
