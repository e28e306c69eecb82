"""Options of the Megatron trainer, under Megatron's own names, and their check before anything starts.

Without torch and Megatron: every run reads this module.
"""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from buffer_rl.errors import ConfigError
from buffer_rl.kinds.table import kind_named
from buffer_rl.options.checks import given, refuse
from buffer_rl.options.redaction import mask_url
from buffer_rl.options.section import Section, flag_of, option
from buffer_rl.plan.layout import Layout, layout_of
from buffer_rl.plugin.calls import plugin_error
from buffer_rl.plugin.hookspecs import hookimpl
from buffer_rl.plugin.registry import PluginRegistry
from buffer_rl.plugin.signature import keywords_for, signature_of
from buffer_rl_megatron.model_shape import check_mapped, check_shape, check_supported, read_configuration

if TYPE_CHECKING:
    from buffer_rl.args import Args

TRACKER = "latest_checkpointed_iteration.txt"
"""A file in each folder that Megatron saves checkpoints to: it names the newest one."""
BACKENDS = ("megatron", "buffer_rl_megatron.backend:build")
"""What ``--train-backend`` is where these options count."""
HOOKS = {
    "custom_megatron_init_path": ("args",),
    "custom_megatron_before_log_prob_hook_path": ("args", "model", "store_prefix"),
    "custom_megatron_before_train_step_hook_path": (
        *("args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"),
    ),
}
"""Options that name functions, and what each rank calls these with."""
RECOMPUTED = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts")
"""Parts of a layer that ``--recompute-modules`` may name."""


class MegatronOptions(Section):
    """The Megatron trainer: parallelism, precision, recomputation."""

    heading: ClassVar[str] = "Megatron"

    tensor_model_parallel_size: int = option(1, "number of ranks that share each matrix", ge=1)
    pipeline_model_parallel_size: int = option(1, "number of pipeline stages of consecutive layers", ge=1)
    virtual_pipeline_model_parallel_size: int | None = option(
        None,
        "number of parts per pipeline stage, run in turn (interleaved schedule)",
        ge=1,
        one_of="virtual_stages",
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None, "number of layers per such part, in place of the number of parts", ge=1, one_of="virtual_stages"
    )
    context_parallel_size: int = option(1, "number of ranks that share each row", ge=1)
    expert_model_parallel_size: int = option(1, "number of ranks of a pipeline stage that share the experts", ge=1)
    expert_tensor_parallel_size: int | None = option(
        None, "number of ranks that share each expert's matrices; if not set: as for other matrices", ge=1
    )
    sequence_parallel: bool = option(
        False, "split norms along the sequence over tensor-parallel ranks; no effect with one rank"
    )
    transformer_impl: Literal["local", "transformer_engine"] = option(
        "local", "layers of Megatron (local) or of TransformerEngine, which needs a GPU"
    )
    qkv_format: Literal["thd", "bshd"] = option(
        "thd", "rows of a micro-batch concatenated without padding (thd), or padded to the longest (bshd)"
    )
    accumulate_allreduce_grads_in_fp32: bool = option(True, "with --bf16: sum gradients in float32")
    use_distributed_optimizer: bool = option(True, "split the optimizer state over data-parallel ranks")
    overlap_grad_reduce: bool = option(
        False, "after the last micro-batch, reduce all gradient buckets together, asynchronously"
    )
    overlap_param_gather: bool = option(
        False, "gather the parameters of a distributed optimizer during the next forward pass"
    )
    recompute_method: Literal["uniform", "block"] | None = option(
        None, "with 'full': recompute equal runs of layers (uniform), or the first layers of each stage (block)"
    )
    recompute_num_layers: int | None = option(None, "with 'full': number of layers per run, or per stage", ge=1)
    recompute_modules: list[str] = option([], "with 'selective': modules to recompute; if not set: core_attn")
    moe_aux_loss_coeff: float | None = option(
        None,
        "weight of the experts' load-balancing loss; if not set: that of the model's configuration",
        ge=0,
    )
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"] = option(
        "none", "load-balancing loss of experts, which adds to the gradient of the objective"
    )
    moe_token_dispatcher_type: Literal["alltoall"] = option(
        "alltoall", "transport of tokens to experts; rows of any length need this one"
    )
    moe_router_dtype: Literal["fp32", "fp64"] | None = option(
        None, "number format of the router's expert scores; if not set: that of the weights"
    )
    moe_grouped_gemm: bool = option(
        False, "use one kernel for all experts of a rank; requires --transformer-impl transformer_engine"
    )
    custom_megatron_init_path: str | None = option(
        None, "MODULE:FUNCTION(args), called once per rank after the process groups are created"
    )
    custom_megatron_before_log_prob_hook_path: str | None = option(
        None, "MODULE:FUNCTION(args, model, store_prefix), called before log-probabilities are computed"
    )
    custom_megatron_before_train_step_hook_path: str | None = option(
        None,
        "MODULE:FUNCTION(args, rollout_id, step_id, model, optimizer, opt_param_scheduler), called before the "
        "forward passes of an optimizer step; the last argument is None",
    )


if TYPE_CHECKING:

    class MegatronArgs(Args, MegatronOptions):
        """The options of a run with those of this plugin, for a type checker."""


def is_megatron(args: MegatronArgs) -> bool:
    """Whether the run trains with this backend."""
    return getattr(args, "train_backend", None) in BACKENDS


def layout(args: MegatronArgs) -> Layout:
    """The ranks of the run. Raises ConfigError unless tensor, pipeline and context parallelism divide them."""
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    replica = f"whole replicas of {tp * pp * cp} (tensor {tp} x pipeline {pp} x context {cp})"
    what = f"--num-train-ranks: {args.num_train_ranks} ranks are not {replica}"
    refuse(args.num_train_ranks % (tp * pp * cp), what, expected=f"a multiple of {tp * pp * cp}")
    return layout_of(args.num_train_ranks, tp_size=tp, pp_size=pp, cp_size=cp)


def has_auxiliary_loss(args: MegatronArgs) -> bool:
    """Whether an auxiliary load-balancing loss of experts is part of the gradient; scripts ask for one with the weight
    0."""
    return bool(args.moe_router_load_balancing_type != "none" and args.moe_aux_loss_coeff != 0)


def is_in_step(args: MegatronArgs) -> bool:
    """Whether a forward pass has a collective over replicas: of experts, of the tokens that each has in all
    replicas, or of parameters that are still gathered."""
    counts_tokens = args.moe_router_load_balancing_type == "global_aux_loss" and has_auxiliary_loss(args)
    return bool(args.expert_model_parallel_size > 1 or args.overlap_param_gather or counts_tokens)


def virtual_stages(args: MegatronArgs, num_layers: int) -> int | None:
    """Parts of each pipeline stage; None without virtual stages. Raises ConfigError where layers do not fit."""
    pp, parts = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    if (each := args.num_layers_per_virtual_pipeline_stage) is not None:
        where = "--num-layers-per-virtual-pipeline-stage"
        what = f"{where} and --virtual-pipeline-model-parallel-size: two options say the same thing"
        refuse(parts is not None, what, "leave one of them out")
        what = f"{where}: {num_layers} layers are not whole parts of {each} layers on {pp} stages"
        refuse(num_layers % (pp * each), what, expected="a divisor of the layers of a stage")
        parts = num_layers // (pp * each)
    what = "--virtual-pipeline-model-parallel-size: there is one pipeline stage"
    refuse(parts is not None and pp == 1, what, "take it out", "two or more")
    what = f"{num_layers} layers cannot be shared equally among {pp * (parts or 1)} parts of the pipeline"
    uneven = num_layers % (pp * (parts or 1))
    refuse(uneven, f"--pipeline-model-parallel-size: {what}", expected="a divisor of the number of layers")
    return parts if parts is not None and parts > 1 else None


def check(args: MegatronArgs) -> None:
    """Raises ConfigError for options that do not fit each other, the model or what is installed."""
    absent = find_spec("megatron") is None or find_spec("megatron.core") is None or find_spec("mbridge") is None
    what, hint = "megatron-core or mbridge is not installed", "pip install 'buffer-rl[megatron]'"
    refuse(absent, f"--train-backend megatron: {what}", hint)
    other = given(args, "fsdp_size", "lora_rank", "optimizer_cpu_offload")
    other = other or ("" if args.save_optim else "--no-save-optim")
    refuse(other, "{}: the Megatron trainer cannot do it", "take it out, or --train-backend torch")
    ranks, where = layout(args), "--transformer-impl"
    is_te, has_te = args.transformer_impl == "transformer_engine", find_spec("transformer_engine") is not None
    refuse(is_te and not args.bf16, f"{where}: its attention of packed rows takes halves alone", "add --bf16")
    refuse(is_te and not has_te, f"{where}: TransformerEngine is not installed", expected="local")
    early = args.overlap_param_gather and not (args.use_distributed_optimizer and args.overlap_grad_reduce)
    what = "only the distributed optimizer gathers parameters, once gradients are reduced asynchronously"
    hint = "add --use-distributed-optimizer --overlap-grad-reduce"
    refuse(early, f"--overlap-param-gather: {what}", hint)
    what = "--model-converter-path: names and layouts of weights are those of the architecture's mapping"
    hint = "leave it out; plugins/buffer_rl_megatron_glm4/README.md says how to write a mapping"
    refuse(args.model_converter_path is not None, what, hint)
    _check_experts(args, ranks)
    _check_recomputed(args, has_te=has_te)
    _check_functions(args)
    if args.hf_checkpoint is not None and (configuration := read_configuration(args.hf_checkpoint)):
        check_mapped(str(configuration.get("model_type")))
        check_supported(configuration)
        check_shape(args, configuration)
        _check_splits(args, configuration)


def _check_experts(args: MegatronArgs, ranks: Layout) -> None:
    tp, ep, expert_tp = ranks.tp_size, args.expert_model_parallel_size, args.expert_tensor_parallel_size
    split, where = expert_tp or tp, "--expert-tensor-parallel-size"
    what = f"{where}: experts are split over more ranks ({split}) than other layers ({tp})"
    refuse(split > tp, what, expected="at most --tensor-model-parallel-size")
    of_stage, where = ranks.dp_size * ranks.cp_size * tp, f"--expert-model-parallel-size and {where}"
    axes = f"(data {ranks.dp_size} x context {ranks.cp_size} x tensor {tp})"
    what = f"experts cannot be spread over {ep} x {split} of the {of_stage} ranks of a pipeline stage {axes}"
    refuse(of_stage % (ep * split), f"{where}: {what}", expected=f"sizes whose product divides {of_stage}")
    local = args.moe_grouped_gemm and args.transformer_impl != "transformer_engine"
    refuse(local, "--moe-grouped-gemm: the kernel is TransformerEngine's", "add --transformer-impl transformer_engine")
    uneven = has_auxiliary_loss(args) and args.moe_router_load_balancing_type == "seq_aux_loss"
    what = "rows of different lengths would have wrong weights in a loss of each sequence"
    refuse(uneven, f"--moe-router-load-balancing-type: {what}", "aux_loss, or --moe-aux-loss-coeff 0")


def _check_recomputed(args: MegatronArgs, *, has_te: bool) -> None:
    full, chosen = args.recompute_granularity == "full", args.recompute_method or args.recompute_num_layers
    what, hint = "--recompute-method: only whole layers are chosen this way", "--recompute-granularity full"
    refuse(bool(chosen) and not full, what, hint)
    what, hint = "which layers are computed again is not said", "--recompute-method uniform --recompute-num-layers 1"
    refuse(full and not (args.recompute_method and args.recompute_num_layers), f"--recompute-granularity: {what}", hint)
    where, parts = "--recompute-modules", set(args.recompute_modules)
    whole, hint = args.recompute_granularity != "selective", "add --recompute-granularity selective"
    refuse(parts and whole, f"{where}: parts of layers are chosen this way", hint)
    unknown = ", ".join(sorted(parts - set(RECOMPUTED)))
    refuse(unknown, f"{where}: {{}}: there is no such part", expected=", ".join(RECOMPUTED))
    what = f"{where}: Megatron recomputes norms with a function of TransformerEngine's"
    refuse("layernorm" in parts and not has_te, what, "leave layernorm out")
    ungrouped = "moe_act" in parts and not args.moe_grouped_gemm
    refuse(ungrouped, f"{where}: moe_act is a part of the grouped kernel", "add --moe-grouped-gemm")


def _check_functions(args: MegatronArgs) -> None:
    registry = PluginRegistry.from_flags(args.plugin)
    for name, parameters in HOOKS.items():
        if path := getattr(args, name):
            try:
                inspect.signature(registry.load(path)).bind(*parameters)
            except TypeError as error:
                what, expected = f"{path} cannot be called: {error}", f"({', '.join(parameters)})"
                raise ConfigError(what, where=flag_of(name), expected=expected) from error
    if args.custom_model_provider_path is not None:
        resolve_provider(args.custom_model_provider_path, registry)


def resolve_provider(path: str, registry: PluginRegistry) -> Any:
    """The function of ``--custom-model-provider-path``. Raises PluginError if it takes no parts of a model."""
    kind = "model_provider"
    function = registry.resolve(kind, path)
    if len(keywords_for(function, dict.fromkeys(("pre_process", "post_process")))) < 2:
        what = "it builds a whole model, and each rank has a part"
        raise plugin_error(kind_named(kind), path, what, actual=signature_of(function))
    return function


def _check_splits(args: MegatronArgs, configuration: dict[str, Any]) -> None:
    tp, ep = args.tensor_model_parallel_size, args.expert_model_parallel_size
    heads, where = configuration.get("num_attention_heads") or 0, "--tensor-model-parallel-size"
    refuse(heads % tp, f"{where}: {heads} attention heads are split over {tp} ranks", expected="a divisor")
    groups = configuration.get("num_key_value_heads") or heads
    refuse(groups % tp, f"{where}: {groups} query groups are split over {tp} ranks", expected="a divisor")
    experts = configuration.get("num_experts") or configuration.get("num_local_experts") or 0
    what, where = "the model has no experts", "--expert-model-parallel-size"
    refuse(ep > 1 and not experts, f"{where}: {what}", expected="1")
    refuse(has_auxiliary_loss(args) and not experts, f"--moe-router-load-balancing-type: {what}", expected="none")
    refuse(experts % ep, f"{where}: {experts} experts are spread over {ep} ranks", expected="a divisor")
    whole = experts and tp > 1 and not args.sequence_parallel
    refuse(whole, "--sequence-parallel: experts under tensor parallelism need it", "add --sequence-parallel")
    shared = experts and ep == 1 and (args.expert_tensor_parallel_size or tp) < tp
    what = "Megatron sums gradients of experts on several tensor ranks only where experts are spread"
    hint = "or --expert-model-parallel-size 2 or more"
    refuse(shared, f"--expert-tensor-parallel-size: {what}", hint, f"{tp}")
    if layers := configuration.get("num_hidden_layers"):
        virtual_stages(args, int(layers))


def _check_save_folder(args: MegatronArgs) -> None:
    from buffer_rl.files.remote import is_remote, local_path  # what reads data, which naming a plugin must not need

    folder = local_path(args.save or "")
    is_theirs = bool(args.save) and not is_remote(folder) and Path(folder, TRACKER).exists()
    what = f"--save {mask_url(args.save or '')}: the checkpoints in the folder are Megatron's: it has {TRACKER}"
    hint = "another folder for --save and --load; --trainer-load begins a run of a Megatron trainer with these"
    refuse(is_theirs, what, hint)


@hookimpl
def buffer_rl_add_options() -> list[str]:
    """The sections, by reference."""
    return [f"{__name__}:MegatronOptions", "buffer_rl_megatron.model_shape:ModelShapeOptions"]


@hookimpl
def buffer_rl_configure(config: Any) -> None:
    """Checks the options of a run with this trainer. Raises ConfigError for those of it in a run without, but for the
    model's shape, which scripts say whatever trains, and in any run for a folder of Megatron's own checkpoints."""
    _check_save_folder(config)
    if is_megatron(config):
        check(config)
        return
    found = given(config, *sorted(MegatronOptions.model_fields.keys() & config.model_fields_set))
    refuse(found, "{}: the run has no Megatron trainer", "add --train-backend megatron")
