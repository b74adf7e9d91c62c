"""Bytes of device memory for a step on the fullest pipeline stage, by part."""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from scalai.core.planner.columns import (
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    Cases,
    Floats,
    dense_layer,
    expert_layer,
    experts,
    first,
    fuller,
    has_short_stages,
    last,
    layers_of,
    most_parameters,
    parameters_of,
    second,
)
from scalai.core.planner.step_time import BYTES

RESERVE_BYTES = 2e9
"""Of a device, beside tensors: the context, libraries' workspaces, NCCL's channels (CUDA about
0.5 GB, NCCL about 4 MB a channel and peer; measured jobs: 1.5 to 3 GB)."""
USABLE = 0.92
"""Share of the memory that a plan may fill: the allocator's blocks do not fit without gaps, and the
estimate is of the size that it is (``UNCERTAINTY``)."""
LOGITS_BYTES = 8
"""Of a logit at the loss: 2 as the product gives it, 4 as the loss reads it, 2 of its gradient."""
MASK_BYTES = 1.0
INDEX_BYTES, MAP_BYTES = 20.0, 3.0
"""Of a router, for each copy of a token and for each expert that a token may go to (Megatron-LM,
transformer/moe/moe_utils.py: two indices of 8 and a probability in fp32; a probability in 16 bit
and whether it is chosen)."""
HOST_USABLE = 0.5
"""Share of a host's memory for spilled state: snapshots of the whole state may take as much."""
HOST_BYTES = 16.0
"""In host memory of a parameter with its master there: master, two moments and gradient in fp32
(Megatron-LM, core/optimizer/cpu_offloading/hybrid_optimizer.py; DeepSpeed,
runtime/zero/stage_1_and_2.py and stage3.py)."""
UNCERTAINTY = 0.15
"""Of the total: 14 measured jobs are within 11 %, and 6 % in the mean."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes by part on the fullest stage, [cases]."""

    weights: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats
    """Saved by forward passes in flight for backward passes."""
    working: Floats
    """One layer, while it is computed again or its gradients are."""
    logits: Floats
    buffers: Floats
    """Of collectives and messages."""
    reserve: Floats

    @property
    def total(self) -> Floats:
        total: Floats = sum((getattr(self, f.name) for f in fields(self)), np.asarray(0.0))
        return total


def step_memory(x: Cases) -> StepMemory:
    """Return the bytes of the first stage, the second or the last, whichever has most.

    The first keeps the most passes in flight and has the embedding, the last has head and logits;
    those between have less than the first, unless layers without experts come first: then the
    second has more of them. Where stages are uneven, the first of the longest stages counts too.

    Source:
        Korthikanti et al., arXiv 2205.05198, table 2 and equations 5 to 9, by width of each saved
        tensor; Megatron-LM, training/theoretical_memory_usage.py and pipeline_parallel/schedules.py
        (passes in flight); Rajbhandari et al., arXiv 1910.02054 (sharding).
    """
    numbers = [first(x), second(x), last(x), *([fuller(x)] if has_short_stages(x) else [])]
    stages = [stage_memory(x, stage) for stage in numbers]
    fullest = np.argmax([each.total for each in stages], axis=0)
    return StepMemory(
        **{
            f.name: np.choose(fullest, [getattr(each, f.name) for each in stages])
            for f in fields(StepMemory)
        }
    )


def fits(x: Cases) -> npt.NDArray[np.bool_]:
    """Return whether the step fits its device and, with spilled state, its host, [cases]."""
    return fits_host(x) & (step_memory(x).total <= USABLE * x.device.memory)


def fits_host(x: Cases) -> npt.NDArray[np.bool_]:
    """Return whether a device's state in host memory fits there, [cases]."""
    is_fit: npt.NDArray[np.bool_] = host_memory(x) <= HOST_USABLE * x.device.host_memory
    return is_fit


def host_memory(x: Cases) -> Floats:
    """Return the bytes of a device's state in host memory, on the stage with most, [cases]."""
    own, routed = most_parameters(x)
    updated, weights = shard_of(x, own, routed, OPTIMIZER), shard_of(x, own, routed, WEIGHTS)
    has_weights = x.layout.offload == 3
    return x.spilled * HOST_BYTES * updated + np.where(
        has_weights, x.work.weight_bytes * weights, 0.0
    )


def shard_of(x: Cases, own: Floats, routed: Floats, sharding: int) -> Floats:
    """Return the parameters of a rank's shard, if this kind of state is sharded, [cases]."""
    shared = own / x.replicas + routed / x.expert_replicas
    return np.where(x.layout.sharding >= sharding, shared, own + routed)


def is_too_large(x: Cases) -> npt.NDArray[np.bool_]:
    """Return whether the step cannot fit its device, even if the estimate is too high, [cases]."""
    is_large: npt.NDArray[np.bool_] = (1 - UNCERTAINTY) * step_memory(x).total > x.device.memory
    return is_large


def layer_activations(x: Cases, *, is_moe: bool = False) -> Floats:
    """Return the saved bytes of a layer, with or without experts, for one micro-batch without
    recomputation."""
    return _saved_whole(x) + _saved_parts(x, is_moe) + _scores(x)


def kept_activations(x: Cases, *, is_moe: bool = False) -> Floats:
    """Return the saved bytes of a layer, with or without experts, for one micro-batch at the case's
    recomputation."""
    # The input of a layer lies in parts under sequence parallelism, else whole on each rank.
    checkpoint = BYTES * x.tokens * x.model.hidden / _sequence_parts(x)
    selective = _saved_whole(x) + _saved_parts(x, is_moe)
    return np.select(
        [x.layout.recompute == 2, x.layout.recompute == 1],
        [checkpoint, selective],
        layer_activations(x, is_moe=is_moe),
    )


def stage_memory(x: Cases, stage: Floats) -> StepMemory:
    """Return the bytes of one rank of a pipeline stage, by its number, [cases]."""
    own, routed = parameters_of(x, stage)
    shape = np.zeros(np.broadcast(x.layout.pp, x.layout.tp, x.layout.micro_batch).shape)

    def held(bytes_each: Floats, sharding: int) -> Floats:
        return bytes_each * shard_of(x, own, routed, sharding) + shape

    has_masters = (x.work.weight_bytes < 4) | (
        (x.work.has_flat_masters > 0) & (x.layout.sharding >= OPTIMIZER)
    )
    master = np.where(has_masters, 12.0, 8.0)
    update = held(np.where(has_masters & (x.work.has_flat_masters > 0), 4.0, 0.0), OPTIMIZER)
    stays = 1 - x.spilled
    # Behind offloaded masters ZeRO 2 and 3 keep the sums of gradients in host memory.
    sums_go = (x.spilled >= 1) & (x.work.has_flat_masters > 0) & (x.layout.sharding >= GRADIENTS)
    # The first stage of ZeRO leaves 16-bit gradients where they are while their sums are in fp32.
    is_summed_apart = (x.work.weight_bytes < x.work.gradient_bytes) & (x.work.has_flat_masters > 0)
    both = np.where(is_summed_apart & (x.layout.sharding == OPTIMIZER), x.work.weight_bytes, 0.0)
    buckets = np.where(x.layout.sharding >= OPTIMIZER, x.work.bucket_bytes, 0.0)
    dense, moe = layers_of(x, stage)
    passes, has_logits = _passes(x, stage), stage == x.layout.pp - 1
    kept = dense * kept_activations(x) + moe * kept_activations(x, is_moe=True)
    return StepMemory(
        weights=np.where(x.layout.offload == 3, 0.0, held(x.work.weight_bytes, WEIGHTS)),
        gradients=np.where(sums_go, 0.0, held(x.work.gradient_bytes + both, GRADIENTS)),
        optimizer=stays * held(master, OPTIMIZER),
        activations=passes * kept + _embedded(x, stage),
        working=_working(x, dense, moe) + shape,
        logits=np.where(has_logits, LOGITS_BYTES * x.tokens * x.model.vocab / x.layout.tp, 0.0)
        + shape,
        buffers=_buffers(x, dense, moe) + stays * update + buckets + shape,
        reserve=RESERVE_BYTES + shape,
    )


def _sequence_parts(x: Cases) -> Floats:
    return np.where(x.layout.is_sequence_parallel > 0, x.layout.tp, 1.0)


def _saved_whole(x: Cases) -> Floats:
    """Inputs of two norms and of two first matrices, and two dropouts' masks."""
    each = 4 * BYTES + 2 * MASK_BYTES * x.work.has_dropout
    return each * x.tokens * x.model.hidden / _sequence_parts(x)


def _saved_parts(x: Cases, is_moe: bool) -> Floats:
    """What tensor parallelism cuts: queries, keys, values, attention's result; of the feed-forward
    part input and result of the activation; of experts what they and the router keep."""
    width = x.model.heads * x.model.head_dim
    # Attention that is not fused repeats the keys and values of a group for each of its heads.
    keys = (
        np.where(x.work.is_attention_fused > 0, x.model.kv_groups, x.model.heads) * x.model.head_dim
    )
    ffn = x.model.shared_ffn if is_moe else x.model.ffn
    per_token = 2 * width + 2 * keys + (2 + x.model.is_gated) * ffn
    parts = BYTES * x.tokens * per_token / x.layout.tp
    return parts + _routed(x) + _router(x) if is_moe else parts


def expert_rows(x: Cases) -> Floats:
    """Return how many copies of tokens the experts of a rank compute, where they are spread
    evenly: those of its expert-tensor-parallel ranks together."""
    copies = x.tokens / _sequence_parts(x) * x.model.top_k * x.work.expert_capacity
    return copies * np.where(x.layout.is_sequence_parallel > 0, x.etp, 1.0)


def _routed(x: Cases) -> Floats:
    """The experts' input, and of each its activation's input and result and the latter times its
    probability. With a gate, activation and product are one kernel, which keeps no result."""
    return BYTES * expert_rows(x) * (x.model.hidden + 3 * x.model.expert_ffn / x.etp)


def _router(x: Cases) -> Floats:
    """Probabilities, indices and places of each copy, and of each token scores and the map of the
    experts."""
    per_token = INDEX_BYTES * x.model.top_k + MAP_BYTES * x.model.experts
    return per_token * x.tokens / _sequence_parts(x)


def _scores(x: Cases) -> Floats:
    """Softmax, its dropout's mask and result; fused attention keeps one fp32 number a row."""
    rows = x.tokens * x.model.heads / x.layout.tp
    each = BYTES + (BYTES + MASK_BYTES) * x.work.has_dropout
    return np.where(x.work.is_attention_fused > 0, 4 * rows, each * rows * x.model.seq)


def _passes(x: Cases, stage: Floats) -> Floats:
    """Return how many micro-batches' activations a stage keeps, by the warm-up of its schedule."""
    behind = x.layout.pp - 1 - stage
    plain = np.minimum(behind + 1, x.micro_batches)
    chunks = np.minimum(
        2 * behind + (x.layout.vpp - 1) * x.layout.pp + 1, x.layout.vpp * x.micro_batches
    )
    return np.where(x.layout.vpp > 1, chunks / x.layout.vpp, plain)


def _working(x: Cases, dense: Floats, moe: Floats) -> Floats:
    """The largest layer of a stage while it is computed again, or scores while their gradients
    are."""
    again = np.maximum(
        np.where(dense > 0, layer_activations(x), 0.0),
        np.where(moe > 0, layer_activations(x, is_moe=True), 0.0),
    )
    return np.where(x.layout.recompute == 2, again, _scores(x))


def _buffers(x: Cases, dense: Floats, moe: Floats) -> Floats:
    """Messages between stages, gathered sequences, two layers' weights where they are sharded, and
    copies of tokens as they are sent to experts and as they come from others."""
    layer = np.maximum(
        np.where(dense > 0, dense_layer(x), 0.0),
        np.where(moe > 0, expert_layer(x) + experts(x), 0.0),
    )
    gathered = np.where(x.layout.sharding == WEIGHTS, layer * 2 * x.work.weight_bytes, 0.0)
    messages = np.where(x.layout.pp > 1, 4 * BYTES * x.tokens * x.model.hidden / x.layout.tp, 0.0)
    sequences = np.where(
        x.layout.is_sequence_parallel > 0, 2 * BYTES * x.tokens * x.model.hidden, 0.0
    )
    copies = np.where(moe > 0, 2 * BYTES * expert_rows(x) * x.model.hidden, 0.0)
    return gathered + messages + sequences + copies


def _embedded(x: Cases, stage: Floats) -> Floats:
    """The embedding's dropout mask, of each pass in flight on the first stage."""
    passes = np.where(stage > 0, 0.0, np.minimum(x.layout.pp, x.micro_batches))
    return MASK_BYTES * x.work.has_dropout * x.tokens * x.model.hidden / _sequence_parts(x) * passes
