"""What a run needs in numbers: rows for its ranks, cores for its processes, space for its checkpoints."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path

from safetensors import safe_open

from buffer_rl.args import Args
from buffer_rl.cluster.process import starts_engines
from buffer_rl.driver.folders import nearest_folder
from buffer_rl.errors import ConfigError
from buffer_rl.files.hf_config import max_positions, read_config, text_config
from buffer_rl.files.model_folder import weight_files
from buffer_rl.files.remote import is_remote, local_path
from buffer_rl.options.section import flag_of, required
from buffer_rl.plan.algorithm import is_supervised, uses_critic, uses_reference
from buffer_rl.plan.roles import worker_counts
from buffer_rl.plan.schedule import rollout_only, train_only
from buffer_rl.rollout.options import generate_path, is_built_in_rollout, plays_agents

WEIGHT_BYTES, STATE_BYTES, HALF_BYTES = 4, 8, 2
"""Of a parameter in the built-in trainer: float32, the two float32 moments of Adam, bfloat16."""
KEPT_HALF_BYTES = 2.5
"""Of a number that a layer keeps with ``--bf16``: norms keep float32."""
PROCESS_BYTES = 250_000_000
"""Of a process with torch that does nothing yet."""
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")
"""Of the drivers of NVIDIA and AMD."""
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
ENGINE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a run takes of this machine. parameters: of ``--hf-checkpoint``, as its files say. disk: bytes that the
    folders of the run hold at its end. processes: those that compute, by name. rows: of the smallest optimizer step."""

    parameters: int
    disk: int
    processes: Mapping[str, int]
    cores: int
    rows: int

    @property
    def text(self) -> str:
        """``2 trainer ranks, 1 engine``."""
        return ", ".join(f"{count} {name}{'' if count == 1 else 's'}" for name, count in self.processes.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The folder that ``flag`` names, and the bytes written to it. least: without which the run cannot end; most: of
    the whole run."""

    flag: str
    folder: Path
    least: int
    most: int


def check_resources(args: Args) -> tuple[Needs, list[str]]:
    """What the run needs, and notices about what is scarce. Raises ConfigError for ranks without rows, and for a disk
    on which what the run writes cannot fit."""
    rows = args.rollout_batch_size // args.num_steps_per_rollout * args.n_samples_per_prompt
    _check_ranks(args, rows)
    parameters, on_disk = _size_of_model(args)
    spaces = _spaces(args, parameters, on_disk)
    processes, cores = _processes(args), num_cores()
    disk = sum(space.most for space in spaces)
    needs = Needs(parameters=parameters, disk=disk, processes=processes, cores=cores, rows=rows)
    return needs, [*_core_notices(args, needs), *_memory_notices(args, needs), *_disk_notices(spaces)]


def memory_of_processes(args: Args, needs: Needs, longest_prompt: int) -> dict[str, tuple[int, str]]:
    """An estimate of the bytes that one process of each name holds, and of what; of the built-in trainer and engine.
    longest_prompt: tokens; 0 if unknown."""
    if not needs.parameters:
        return {}
    shape = _Shape.of(args)
    found: dict[str, tuple[int, str]] = {}
    limits = [*filter(None, (args.rollout_max_context_len, args.engine_context_length, shape.max_positions))]
    tokens = min([longest_prompt + args.rollout_max_response_len, *limits])
    if plays_agents(args) and limits:  # a conversation, of any number of answers
        tokens = min(limits)
    if args.train_backend == "torch":
        found |= _memory_of_training(args, needs, shape, tokens)
    if args.rollout_engine == "embedded":
        rows = (args.over_sampling_batch_size or args.rollout_batch_size) * args.n_samples_per_prompt
        sequences = min(args.engine_max_running_requests, ceil(rows / args.rollout_num_engines))
        numbers = 2 * needs.parameters + sequences * _places(longest_prompt, tokens, limits) * shape.cached
        what = f"weights, also of the next version, cache of {sequences} sequences of {tokens} tokens"
        found["engine"] = numbers * ENGINE_BYTES[args.engine_dtype], what
    return {
        name: (PROCESS_BYTES + num_bytes, what) for name, (num_bytes, what) in found.items() if name in needs.processes
    }


def _places(first: int, last: int, limits: list[int]) -> int:
    """Of a sequence that grows from ``first`` to ``last`` tokens, in the embedded engine: it moves through pools of
    powers of two, from 64, whose memory stays."""
    begin, end = 1 << max(first, 63).bit_length(), 1 << max(first, last - 1, 63).bit_length()
    return end - begin + min([end, *limits])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Numbers of a token. cached: in an engine's keys and values. kept: of a layer, for its backward pass, as counted
    for Qwen3, and more than for models without norms of queries and keys. hidden: those that recomputation keeps."""

    layers: int
    hidden: int
    kept: int
    cached: int
    max_positions: int | None

    @classmethod
    def of(cls, args: Args) -> _Shape:
        config = text_config(read_config("--hf-checkpoint", required(args.hf_checkpoint, "hf_checkpoint")))

        def number(name: str) -> int:  # Gemma 3n has one for each layer
            found = config.get(name)
            each = found if isinstance(found, list) else [found]
            return max((value for value in each if isinstance(value, int)), default=0)

        hidden, layers, heads = number("hidden_size"), number("num_hidden_layers"), number("num_attention_heads") or 1
        head_dim, key_heads = number("head_dim") or hidden // heads, number("num_key_value_heads") or heads
        inner = max(number("intermediate_size"), number("num_experts_per_tok") * number("moe_intermediate_size"))
        return cls(
            layers=layers,
            hidden=hidden,
            kept=7 * hidden + 6 * (heads + key_heads) * head_dim + 4 * inner,
            cached=2 * layers * key_heads * head_dim,
            max_positions=max_positions(config),
        )


def _memory_of_training(args: Args, needs: Needs, shape: _Shape, row_tokens: int) -> dict[str, tuple[int, str]]:
    full, what = needs.parameters * (2 * WEIGHT_BYTES + STATE_BYTES), "weights, gradients, Adam's state"
    frozen = needs.parameters * (HALF_BYTES if args.bf16 else WEIGHT_BYTES)
    reference = uses_reference(args) and not args.num_ref_workers
    trained, of_actor = full, what
    if args.lora_rank:
        trained, of_actor, reference = frozen, "weights without adapters", reference and args.ref_load is not None
    own = trained + frozen * reference
    parts = args.num_train_ranks if args.fsdp_size == -1 else args.fsdp_size
    split = f", split over {parts} ranks" if parts > 1 else ""
    tokens = min(args.max_tokens_per_gpu, ceil(needs.rows / args.num_train_ranks) * row_tokens)
    kept = shape.layers * shape.kept
    if args.recompute_granularity == "full":
        kept = shape.layers * shape.hidden + shape.kept
    activations = int(tokens * kept * (KEPT_HALF_BYTES if args.bf16 else WEIGHT_BYTES))
    more = f"activations of {tokens} tokens (--max-tokens-per-gpu)"
    of_actor += f"{', reference model' if reference else ''}{split}, {more}"
    return {
        "trainer rank": (own // parts + activations, of_actor),
        "critic rank": (full + activations, f"{what}, {more}"),
    }


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def bytes_text(count: float) -> str:
    """``1.5 GB``, in powers of 1000."""
    for unit in UNITS[:-1]:
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} {UNITS[-1]}"


def _check_ranks(args: Args, rows: int) -> None:
    """Of the built-in trainer, each rank of which needs a row; others divide their ranks otherwise."""
    own = (generate_path(args), args.custom_convert_samples_to_train_data_path)
    if any(own) or not (is_built_in_rollout(args) or is_supervised(args)):
        return  # they may make several rows of a sample
    trains = args.num_rollout != 0 and not rollout_only(args) and not train_only(args)
    if not trains or args.train_backend != "torch" or rows >= args.num_train_ranks:
        return
    product = f"--rollout-batch-size {args.rollout_batch_size} x --n-samples-per-prompt {args.n_samples_per_prompt}"
    if args.num_steps_per_rollout > 1:
        product += f" in {args.num_steps_per_rollout} optimizer steps"
    what = f"{args.num_train_ranks} trainer ranks cannot share the {rows} rows of a step ({product})"
    where, hint = "--num-train-ranks and --rollout-batch-size", f"--num-train-ranks {rows}, or larger steps"
    raise ConfigError(what, where=where, expected="at least one row for each rank", hint=hint)


def _processes(args: Args) -> dict[str, int]:
    trains = args.num_rollout != 0 and not rollout_only(args)
    generates = not train_only(args)
    evaluates = bool(args.eval_prompt_data or args.eval_config)
    engines = starts_engines(args) and generates and (evaluates or not is_supervised(args))
    found = {
        "trainer rank": args.num_train_ranks if not rollout_only(args) else 0,
        "critic rank": args.num_train_ranks if trains and uses_critic(args) else 0,
        "engine": args.rollout_num_engines if engines else 0,
        **{f"{role} worker": count for role, count in worker_counts(args).items()},
        "rollout worker": args.num_rollout_workers if generates else 0,
    }
    return {name: count for name, count in found.items() if count}


def _core_notices(args: Args, needs: Needs) -> list[str]:
    if args.ray_address is not None or max(needs.processes.values(), default=0) <= needs.cores:
        return []
    turns = f"{needs.text} on {needs.cores} core{'' if needs.cores == 1 else 's'}: they take turns"
    hint = "fewer are quicker here; --ray-address joins a cluster"
    return [f"{turns}, and most of them hold a model in memory ({hint})"]


def _memory_notices(args: Args, needs: Needs) -> list[str]:
    """Of a run that holds all of it in this machine's own memory. Prompts are not read yet, and count nothing."""
    if args.ray_address is not None or any(map(os.path.exists, GPU_FILES)):
        return []
    found = memory_of_processes(args, needs, 0)
    whole, has = sum(needs.processes[name] * size for name, (size, _) in found.items()), memory_bytes()
    if whole <= has:
        return []
    name, (size, what) = max(found.items(), key=lambda item: item[1][0])
    hint = "a lower --max-tokens-per-gpu, or --recompute-granularity full, keeps fewer activations"
    held = f"a {name} {bytes_text(size)} for {what}"
    return [f"this machine has {bytes_text(has)} of memory, and the run may take {bytes_text(whole)}: {held} ({hint})"]


def memory_bytes() -> int:
    """Memory that this machine has, or that its container may use."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = ""
    with suppress(OSError):  # of a system without control groups, or one that does not show them
        limit = MEMORY_LIMIT.read_text().strip()
    return min(physical, int(limit)) if limit.isdecimal() else physical


def _size_of_model(args: Args) -> tuple[int, int]:
    """Parameters, and bytes of the files of the weights; 0 and 0 if the user's own code builds the model."""
    if args.custom_model_provider_path is not None:
        return 0, 0
    files = weight_files(flag_of("hf_checkpoint"), required(args.hf_checkpoint, "hf_checkpoint"))
    return sum(map(_num_parameters, files)), sum(file.stat().st_size for file in files)


def _num_parameters(file: Path) -> int:
    """Numbers in a file of weights; of a pickled one, which is not read, as many as 16-bit numbers fill it."""
    if file.suffix != ".safetensors":
        return file.stat().st_size // 2
    with safe_open(file, framework="np") as tensors:  # reads no weights
        return sum(prod(tensor.get_shape()) for tensor in map(tensors.get_slice, tensors.keys()))


def _spaces(args: Args, parameters: int, on_disk: int) -> list[Space]:
    """What a run that trains writes: the model at its end, the version that the engines read and the one before it,
    and checkpoints, of which ``--keep-last`` remain."""
    if args.num_rollout == 0 or rollout_only(args):
        return []
    built_in = args.train_backend == "torch"
    weights = parameters * WEIGHT_BYTES if built_in else on_disk
    state = parameters * (WEIGHT_BYTES + STATE_BYTES) if built_in else 0
    versions = 2 if args.weight_sync_mode == "disk" and args.update_weight_disk_dir is None else 0
    spaces = [Space(flag="--run-dir", folder=Path(args.run_dir), least=on_disk, most=weights * (1 + versions))]
    if args.save is not None and not is_remote(local_path(args.save)):
        models = 2 if uses_critic(args) else 1
        count = ceil(args.num_rollout / args.save_interval) if args.num_rollout and args.save_interval else 1
        if args.keep_last is not None:  # while one is written, those that are kept and the best are there
            count = min(count, args.keep_last + 1 + bool(args.keep_best))
        one = models * state + on_disk
        folder = Path(local_path(args.save))
        spaces.append(Space(flag="--save", folder=folder, least=one, most=one * count))
    return spaces


def _disk_notices(spaces: list[Space]) -> list[str]:
    disks: dict[int, list[Space]] = defaultdict(list)
    for space in spaces:
        disks[nearest_folder(space.folder).stat().st_dev].append(space)
    notices = []
    for together in disks.values():
        free = shutil.disk_usage(nearest_folder(together[0].folder)).free
        least, most = sum(space.least for space in together), sum(space.most for space in together)
        flags = " and ".join(space.flag for space in together)
        has, whole = bytes_text(free), bytes_text(most)
        if free < least:
            what = f"the disk has {has} free, and the run writes at least {bytes_text(least)}"
            hint, see = "name a folder on a larger disk", "docs/troubleshooting.md#the-disk-is-full"
            raise ConfigError(what, where=flags, expected=f"{whole} for the whole run", hint=hint, see=see)
        if free < most:
            hint = "a larger --save-interval writes fewer checkpoints, and --keep-last keeps fewer"
            notices.append(f"{flags}: the disk has {has} free, and the whole run writes {whole} ({hint})")
    return notices
