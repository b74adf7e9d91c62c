"""Fixed facts of a running Megatron-LM job, each with its reason: one law for its command line, for
the parsed arguments of its workers, for live models and for checkpoints.

``--check-elastic`` and the coordinator apply it to the flags (``arguments.py``), a worker to the
namespace of ``get_args()`` (``patches/megatron/training_hooks.py``) and to the configurations of
its model (``patches/megatron/megatron_state.py``), ``scalai reshard`` to the arguments in a
checkpoint (``model_limits.py``). Rules differ between releases; a script's release is read from the
checkout around it. ``sums.py`` has a model's sums over tokens, grouped otherwise in another layout.

Source: megatron/training/arguments.py of 0.14.0 to 0.19.0 and of 0.20 (d98e8a64).
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scalai.converters.megatron.sums import MUON, MUONS, Release, Values, sums_of
from scalai.core.degrees.degrees import AXES, stage_sizes
from scalai.core.degrees.passes import PARTS, Part

Given = Mapping[str, tuple[str, ...]]
"""Flags as given: name with dashes -> its values, of the last occurrence."""

ALLOW_UNTESTED = "SCALAI_ALLOW_UNTESTED"
"""Environment variable: 1 to go on with built, but untested features."""

_OTHER_NAMES = {"fp8": "fp8-format", "fp4": "fp4-format"}
"""Flags with another name than their argument."""

FSDP = "its shards are not supported; use --use-distributed-optimizer"
_SCALED = "parameters are kept in {} with scales; leave it out"
_REFUSED: Mapping[str, str] = {
    "decrease_batch_size_if_needed": (
        "the global batch, and with it the order of samples, would depend on the data-parallel "
        "size; leave it out"
    ),
    "fp4": "scaling state is kept outside of the parameters; train in bf16 (--bf16)",
    "fp4_param": _SCALED.format("FP4"),
    "fp4_param_gather": _SCALED.format("FP4"),
    "fp8_param": _SCALED.format("FP8"),
    "fp8_param_gather": _SCALED.format("FP8"),
    "hybrid_context_parallel": "its batches depend on the degrees; leave it out",
    "logits_load_dir": "teacher's outputs are read in the order of one DP; train without them",
    "logits_save_dir": "outputs are saved by data-parallel rank; save them in a run of its own",
    "inprocess_restart": "it restarts the workers itself; leave it out",
    "moe_use_upcycling": "it would be repeated at every change; upcycle in a run of its own",
    "optimizer_cuda_graph": "a replayed update is not seen, so that snapshots would mix two; leave "
    "it out",
    "perform_rl_step": "the model makes its own data, no sampler does; train without it",
    "skip_train": "nothing is trained; run it without --elastic",
    "titles_data_path": "ICT's loss is a softmax over all samples of a pass; pretrain it elsewhere",
    "use_custom_fsdp": FSDP,
    "use_megatron_fsdp": FSDP,
    "use_mp_args_from_checkpoint_args": "the degrees would come from the checkpoint; leave it out",
    "use_torch_fsdp2": FSDP,
    "yaml_cfg": "its values replace the flags, so none can be appended; write them as flags",
}
"""Refused arguments, why, and the way out."""

INTERLEAVED: Mapping[str, str] = {
    "moe_mlp_glu_interleave_size": "etp", "moe_shared_expert_glu_interleave_size": "tp",
}  # fmt: skip
"""Arguments with which blocks of gate and up rows alternate in ``linear_fc1``, in memory and in
checkpoints, and the axis that cuts these rows (TEGroupedMLP, FusedSharedExpertMLP)."""

REFUSED_OPTIMIZERS: Mapping[str, str] = {
    "LayerWiseDistributedOptimizer": (
        "whole parameters belong to data-parallel ranks; use an optimizer that is not distributed"
    ),
    "FullyShardedOptimizer": FSDP,
}
"""Refused classes of optimizers, why, and the way out."""

_ELEMENTWISE = ("adam", "sgd", "lion")
"""Optimizers with elementwise state: one value for each of the parameter's."""
_SCALED_DTYPES = ("fp16", "fp8", "float16", "uint8")
"""Dtypes with a scale in Transformer Engine's FusedAdam, by flags' names and by torch's."""
_NO_OTHER_RECOMPUTE: Mapping[str, str] = {
    "cpu_offloading_num_layers": "does not go with it",
    "cpu_offloading": "does not go with it",
    "cuda_graph_impl": "does not go with it",
    "enable_cuda_graph": "does not go with it",
    "external_cuda_graph": "does not go with it",
    "fine_grained_activation_offloading": "does not go with it",
    "hybrid_attention_ratio": "has layers of Mamba, which are not computed again",
    "hybrid_layer_pattern": "has layers of other kinds, which are not computed again",
    "hybrid_override_pattern": "has layers of Mamba, which are not computed again",
    "moe_layer_recompute": "does not go with it (--recompute-modules moe says the same)",
    "overlap_moe_expert_parallel_comm": "does not go with it",
    "recompute_activations": "overrules it (--recompute-granularity selective says the same)",
}
"""Arguments against other recomputation than the flags', and why."""
_NO_OFFLOAD: Mapping[str, str] = {
    "fp8": "keeps scales beside the masters",
    "no_decoupled_weight_decay": "does not go with it",
    "overlap_param_gather_with_optimizer_step": "does not go with it",
    "use_precision_aware_optimizer": "keeps masters and moments in another way",
}
"""Arguments against the optimizer's state in host memory, and why."""
LAYOUT = "pipeline_model_parallel_layout"
UNEVEN_STAGES = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "hybrid_layer_pattern",
    LAYOUT,
)


_EVEN_STAGES = ("hybrid_layer_pattern", "overlap_param_gather_with_optimizer_step")
"""Arguments with which no layout of stages goes: layers of other kinds, chunks of one size."""


_EVEN_PASSES: Mapping[str, str] = {
    "cuda_graph_impl": "passes are captured for one number of them",
    "enable_cuda_graph": "passes are captured for one number of them",
    "external_cuda_graph": "passes are captured for one number of them",
    "fp8": "replicas exchange their largest values in a pass",
    "hybrid_context_parallel": "samples are not dealt by place",
    "iterations_to_skip": "a skipped step draws as many micro-batches on each replica",
    "num_experts": "replicas exchange tokens within a pass",
    "num_moe_experts": "replicas exchange tokens within a pass",
    "step_batch_size_schedule": "samples are not dealt by place",
    "virtual_pipeline_model_parallel_size": "virtual stages take micro-batches in groups",
    "vision_pretraining": "samples are not dealt by place",
}
"""Arguments with which all replicas make equally many passes, and why."""


def even_passes(values: Values) -> str:
    """Return the reason for equally many passes of all replicas; empty: they may differ."""
    for name, why in _EVEN_PASSES.items():
        if values.get(name) not in (None, False, 0, "none", "0", [], ""):
            return f"{_flag(name)}: {why}"
    if (kind := values.get("dataloader_type")) not in (None, "single"):
        return f"--dataloader-type {kind}: single alone deals samples by place"
    return ""


def layout_of(layers: int, pp: int, vpp: int = 1, predicted: int = 0) -> str:
    """Return the ``--pipeline-model-parallel-layout`` of stages as even as can be.

    Args:
        predicted: Layers for further tokens (MTP), which the last stage has.
    """
    stages = "|".join("t" * size for size in stage_sizes(layers, pp, vpp, predicted))
    return f"E{stages}{'m' * predicted}L"


def is_derived_layout(values: Values) -> bool:
    """Whether the layout of stages is one that a round derives, not a person's."""
    text, layers = str(values.get(LAYOUT) or ""), values.get("num_layers")
    if not text or layers is None:
        return False
    stages, predicted = text.count("|") + 1, int(values.get("mtp_num_layers") or 0)
    pp = int(values.get("pipeline_model_parallel_size") or 1)
    is_cut = stages % pp == 0 and stages <= int(layers)
    return is_cut and text == layout_of(int(layers), pp, stages // pp, predicted)


def may_have_uneven_stages(values: Values) -> bool:
    """Whether a round may derive a layout of stages."""
    is_t5 = values.get("encoder_num_layers") and values.get("decoder_num_layers")
    return bool(values.get("num_layers") and not is_t5 and not any(map(values.get, _EVEN_STAGES)))


def values_of(given: Given) -> dict[str, Any]:
    """Return the arguments set by flags: True for a flag alone, else the words behind it."""
    values: dict[str, Any] = {}
    names = {f"--{flag}": name for name, flag in _OTHER_NAMES.items()}
    for flag, words in given.items():
        name = names.get(flag, flag[2:].replace("-", "_"))
        values[name] = words[0] if len(words) == 1 else words or True
    if "--no-data-sharding" in given:
        values["data_sharding"] = False
    return values


def allows_untested(environment: Mapping[str, str]) -> bool:
    """Whether a person goes on with built, but untested features."""
    return environment.get(ALLOW_UNTESTED) == "1"


def faults_of(values: Values, *, allow_untested: bool) -> Iterator[str]:
    """Yield every reason against an elastic job: the flag, why, and the way out.

    Args:
        allow_untested: Accept built, but untested features.
    """
    yield from configured_faults(values, allow_untested=allow_untested)
    yield from _data_faults(values)
    yield from _optimizer_faults(values)
    yield from _weight_shard_faults(values)
    if values.get("non_persistent_ckpt_type") == "local":
        yield (
            "--non-persistent-ckpt-type local: such a checkpoint fits one layout only, and would "
            "be loaded in another; use global"
        )


def configured_faults(values: Values, *, allow_untested: bool) -> Iterator[str]:
    """Yield the part of ``faults_of`` decided by the configuration of a model, of its data
    parallelism or of an optimizer: their fields have the names of arguments."""
    for name, reason in _REFUSED.items():
        if values.get(name):
            yield f"{_flag(name)}: {reason}"
    if not allow_untested:
        yield from _untested(values)
    yield from _scaled_dtypes(values)


def _untested(values: Values) -> Iterator[str]:
    """Yield built features without a test."""
    way_out = f"set {ALLOW_UNTESTED}=1 to go on, or leave it out"
    if values.get("fp8"):
        yield (
            "--fp8-format: the masters are carried and FP8's own state (scales, histories of "
            "maxima) begins anew at a change, but no test has had Transformer Engine and a GPU; "
            + way_out
        )
    if values.get("use_precision_aware_optimizer") and not values.get("optimizer_cpu_offload"):
        yield (
            "--use-precision-aware-optimizer: masters and moments are carried in the dtypes that "
            "they have, but no test has had Transformer Engine's FusedAdam (with "
            "--optimizer-cpu-offload it is torch's Adam, which was tested); " + way_out
        )


def fixed_axes(values: Values, release: Release | None = None) -> Iterator[tuple[str, str]]:
    """Yield the axes with a fixed degree, and why.

    Args:
        release: Release of Megatron-core; None: unknown.
    """
    yield "cp", "another split of sequences is not supported"
    for name in () if may_have_uneven_stages(values) else UNEVEN_STAGES:
        pattern = values.get(name)
        if pattern and (name != "hybrid_layer_pattern" or "|" in str(pattern)):
            yield "pp", f"{_flag(name)} fits this number of stages only"
            yield "vpp", f"{_flag(name)} fits this number of chunks only"
    if values.get("overlap_param_gather_with_optimizer_step"):
        yield "vpp", "--overlap-param-gather-with-optimizer-step needs virtual stages"
    if values.get("encoder_num_layers") and values.get("decoder_num_layers"):
        yield "pp", "Megatron-LM runs T5 without pipeline parallelism"
    if values.get("mtp_num_layers") and not values.get("untie_embeddings_and_output_weights"):
        # GPTModel has a head of its own on the last stage, and its sharded_state_dict asserts none.
        yield "pp", "--mtp-num-layers with tied embeddings is not saved in another pipeline"
    yield from summed_axes(values, release)


def interleaved_axes(values: Values) -> Iterator[tuple[str, str]]:
    """Yield the axes fixed by interleaved rows, in a checkpoint too; ``etp`` is one of them."""
    for name, axis in INTERLEAVED.items():
        if values.get(name):
            yield axis, f"{_flag(name)} alternates rows of gate and up, and halves of them are cut"


def summed_axes(values: Values, release: Release | None = None) -> Iterator[tuple[str, str]]:
    """Yield the part of ``fixed_axes`` decided by a model's sums and interleaved rows; a
    configuration's fields say it too."""
    yield from (("tp", why) for _, why in interleaved_axes(values))
    for each in sums_of(values, release):
        yield from ((axis, each.reason) for axis in AXES if axis in each.stays)


def fixed_passes(values: Values, release: Release | None = None) -> Iterator[tuple[Part, str]]:
    """Yield the fixed parts of the passes, and why.

    Another micro-batch changes the order of additions alone, and more recomputation changes
    nothing. Source: transformer_config.py (0.16) for features without recomputation;
    optimizer_config.py and optimizer/__init__.py (0.14 to 0.20) for optimizers in host memory.
    """
    for each in sums_of(values, release):
        yield from ((part, each.reason) for part in PARTS if part in each.stays)
    if values.get("dataloader_type") == "external":
        yield "micro-batch", "the order of --dataloader-type external may depend on it"
    for name, why in _NO_OTHER_RECOMPUTE.items():
        if values.get(name) not in (None, False, "none", "0"):
            yield "recompute", f"{_flag(name)} {why}"
    if values.get("optimizer_cpu_offload"):
        yield "offload", "the script's own --optimizer-cpu-offload stays as given"
    elif not values.get("use_distributed_optimizer"):
        yield "offload", "it needs --use-distributed-optimizer"
    elif str(values.get("optimizer", "adam")) != "adam":
        yield "offload", "it needs --optimizer adam"
    elif not values.get("bf16") and not values.get("fp16"):
        yield "offload", "it needs --bf16 or --fp16: Megatron-LM keeps no masters of fp32 weights"
    else:
        for name, why in _NO_OFFLOAD.items():
            if values.get(name):
                yield "offload", f"{_flag(name)} {why}"


def optimizer_axes(values: Values) -> Iterator[tuple[str, str]]:
    """Yield the part of ``fixed_axes`` decided by the optimizer: it holds for a checkpoint too."""
    if MUON.is_on(values):
        yield from ((axis, MUON.reason) for axis in MUON.stays)


def _flag(name: str) -> str:
    return "--" + _OTHER_NAMES.get(name, name.replace("_", "-"))


def _data_faults(values: Values) -> Iterator[str]:
    if values.get("vision_pretraining_type") == "dino":
        yield (
            "--vision-pretraining-type dino: its center is a mean over all ranks' samples of a "
            "pass; pretrain it elsewhere"
        )
    if not values.get("global_batch_size") and not values.get("step_batch_size_schedule"):
        yield (
            "--global-batch-size is not given: it would follow the data-parallel size and change "
            "with it; state it"
        )


def _optimizer_faults(values: Values) -> Iterator[str]:
    name = str(values.get("optimizer", "adam"))
    if name not in (*_ELEMENTWISE, *MUONS):
        yield (
            f"--optimizer {name}: its state is not one value for each of a parameter's; use adam, "
            "sgd, lion or muon"
        )
        return
    is_layer_wise = name.startswith("dist_") or bool(
        values.get("use_layer_wise_distributed_optimizer")
        or (name not in ("adam", "sgd") and values.get("use_distributed_optimizer"))
    )
    if is_layer_wise:
        yield (
            f"--optimizer {name}, distributed: whole parameters belong to data-parallel ranks "
            f"(LayerWiseDistributedOptimizer); use --optimizer {name.removeprefix('dist_')} "
            "without --use-distributed-optimizer"
        )


def _scaled_dtypes(values: Values) -> Iterator[str]:
    for kind in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype"):
        dtype = str(values.get(kind, "fp32")).removeprefix("torch.")
        if values.get("use_precision_aware_optimizer") and dtype in _SCALED_DTYPES:
            yield (
                f"{_flag(kind)} {dtype}: it is scaled by a factor of each rank's own part; use "
                "fp32 or bf16"
            )


def _weight_shard_faults(values: Values) -> Iterator[str]:
    for prefix in ("", "expert_"):
        name = f"{prefix}gtp_weight_remat_size"
        stated = f"{prefix}tensor_parallel_num_weight_shards"
        if (values.get(name) or 1) > 1 or (name not in values and values.get(stated)):
            yield f"{_flag(stated)}: weights split beyond TP are not supported; leave it out"


_STATED = Path("megatron", "core", "package_info.py")
_PARENTS = 2
"""Folders above a script's own to search for ``megatron``."""
QUERY_GROUPS_SHARED = (0, 16)
"""From here on several TP ranks may hold copies of one query group."""


def stated_release(file: Path) -> tuple[int, int, int] | None:
    """Return the release in Megatron-core's ``package_info.py``; None: unreadable."""
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return None
    numbers = {
        line.targets[0].id: line.value.value
        for line in body
        if isinstance(line, ast.Assign)
        and isinstance(line.targets[0], ast.Name)
        and isinstance(line.value, ast.Constant)
    }
    parts = [numbers.get(part) for part in ("MAJOR", "MINOR", "PATCH")]
    found = [part for part in parts if isinstance(part, int)]
    return (found[0], found[1], found[2]) if len(found) == len(parts) else None


def release_beside(script: str | None) -> tuple[int, int, int] | None:
    """Return the release of the checkout around a script; None: there is none."""
    if script is None:
        return None
    folder = Path(script).absolute().parent
    folders = [folder, *list(folder.parents)[:_PARENTS]]
    return next((found for one in folders if (found := stated_release(one / _STATED))), None)
