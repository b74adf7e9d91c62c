"""Bytes of device memory that a step needs on the fullest pipeline stage, by part."""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from scalai.core.planner.columns import GRADIENTS, OPTIMIZER, WEIGHTS, Columns, Floats
from scalai.core.planner.layer_time import BYTES

RESERVE_BYTES = 2e9
"""Of a device, beside tensors: the context, libraries' workspaces, NCCL's channels (CUDA about
0.5 GB, NCCL about 4 MB a channel and peer; measured jobs: 1.5 to 3 GB)."""
USABLE = 0.92
"""Share of the memory that a plan may fill: the allocator's blocks do not fit without gaps, and the
estimate is of the size that it is (``UNCERTAINTY``)."""
LOGITS_BYTES = 8
"""Of a logit at the loss: 2 as the product gives it, 4 as the loss reads it, 2 of its gradient."""
MASK_BYTES = 1.0
UNCERTAINTY = 0.15
"""Of the total: 14 measured jobs are within 11 %, and 6 % in the mean."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes by part on the stage that has the most, [cases]."""

    weights: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats
    """What forward passes in flight keep for backward passes."""
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


def step_memory(x: Columns) -> StepMemory:
    """Return the bytes of the first stage or of the last, whichever has more.

    The first keeps the most passes in flight and has the embedding, the last has head and logits;
    those between have less than the first.

    Source:
        Korthikanti et al., arXiv 2205.05198, table 2 and equations 5 to 9, by width of each saved
        tensor; Megatron-LM, training/theoretical_memory_usage.py and pipeline_parallel/schedules.py
        (passes in flight); Rajbhandari et al., arXiv 1910.02054 (sharding).
    """
    first, last = _stage(x, is_last=False), _stage(x, is_last=True)
    is_first = first.total >= last.total
    return StepMemory(
        **{
            f.name: np.where(is_first, getattr(first, f.name), getattr(last, f.name))
            for f in fields(StepMemory)
        }
    )


def fits(x: Columns) -> npt.NDArray[np.bool_]:
    """Return whether the step fits its device, [cases]."""
    is_fit: npt.NDArray[np.bool_] = step_memory(x).total <= USABLE * x.memory
    return is_fit


def is_too_large(x: Columns) -> npt.NDArray[np.bool_]:
    """Return whether the step cannot fit its device, even if the estimate is too high, [cases]."""
    is_large: npt.NDArray[np.bool_] = (1 - UNCERTAINTY) * step_memory(x).total > x.memory
    return is_large


def layer_activations(x: Columns) -> Floats:
    """Return what an average layer keeps of one micro-batch without recomputation."""
    return _saved_whole(x) + _saved_parts(x) + _scores(x)


def kept_activations(x: Columns) -> Floats:
    """Return what an average layer keeps of one micro-batch at the case's recomputation."""
    # The input of a layer lies in parts under sequence parallelism, else whole on each rank.
    checkpoint = BYTES * x.tokens * x.hidden / _sequence_parts(x)
    selective = _saved_whole(x) + _saved_parts(x)
    return np.select(
        [x.recompute == 2, x.recompute == 1], [checkpoint, selective], layer_activations(x)
    )


def _sequence_parts(x: Columns) -> Floats:
    return np.where(x.is_sequence_parallel > 0, x.tp, 1.0)


def _saved_whole(x: Columns) -> Floats:
    """Inputs of two norms and of two first matrices, and two dropouts' masks."""
    each = 4 * BYTES + 2 * MASK_BYTES * x.has_dropout
    return each * x.tokens * x.hidden / _sequence_parts(x)


def _saved_parts(x: Columns) -> Floats:
    """What tensor parallelism cuts: queries, keys, values, attention's result; input and result of
    the activation; of experts each token's copies."""
    moe = x.moe_layers / x.layers
    width = x.heads * x.head_dim
    # Attention that is not fused repeats the keys and values of a group for each of its heads.
    keys = np.where(x.is_attention_fused > 0, x.kv_groups, x.heads) * x.head_dim
    ffn = (1 - moe) * x.ffn + moe * (x.top_k * x.expert_ffn + x.shared_ffn)
    per_token = 2 * width + 2 * keys + (2 + x.is_gated) * ffn
    copies = moe * 2 * x.top_k * x.hidden / _sequence_parts(x)
    return BYTES * x.tokens * (per_token / x.tp + copies)


def _scores(x: Columns) -> Floats:
    """Softmax, its dropout's mask and result; fused attention keeps one fp32 number a row."""
    rows = x.tokens * x.heads / x.tp
    each = BYTES + (BYTES + MASK_BYTES) * x.has_dropout
    return np.where(x.is_attention_fused > 0, 4 * rows, each * rows * x.seq)


def _in_flight(x: Columns, *, is_last: bool) -> Floats:
    """Return how many layers' activations a stage keeps, by the warm-up of its schedule."""
    behind = np.zeros_like(x.pp) if is_last else x.pp - 1
    plain = np.minimum(behind + 1, x.micro_batches)
    chunks = np.minimum(2 * behind + (x.vpp - 1) * x.pp + 1, x.vpp * x.micro_batches)
    passes = np.where(x.vpp > 1, chunks / x.vpp, plain)
    return passes * np.ceil(x.layers / x.pp)


def _parameters(x: Columns, *, is_last: bool) -> tuple[Floats, Floats]:
    """Return the stage's parameters on one rank: all but routed experts, and these."""
    layers = np.ceil(x.layers / x.pp)
    embedding = x.vocab * x.hidden / x.tp
    alone = x.pp == 1
    if is_last:
        ends = embedding + np.where(alone, (1 - x.is_tied) * embedding, 0) + x.final_norm
        ends = ends + np.where(alone, x.positions * x.hidden, 0)
    else:
        ends = embedding + x.positions * x.hidden
        ends = ends + np.where(alone, (1 - x.is_tied) * embedding + x.final_norm, 0)
    dense = layers * x.layer_parameters / x.tp + ends
    return dense, layers * x.expert_parameters / (x.tp * x.ep)


def _stage(x: Columns, *, is_last: bool) -> StepMemory:
    dense, experts = _parameters(x, is_last=is_last)
    replicas = x.dp * x.cp
    # An expert's replicas are as many times fewer as its ranks are more.
    spread = np.maximum(replicas / x.ep, 1)

    def held(bytes_each: Floats, sharding: int) -> Floats:
        shared = x.sharding >= sharding
        whole = bytes_each * (dense + experts)
        return np.where(shared, bytes_each * (dense / replicas + experts / spread), whole)

    has_masters = (x.weight_bytes < 4) | ((x.has_flat_masters > 0) & (x.sharding >= OPTIMIZER))
    master = np.where(has_masters, 12.0, 8.0)
    update = held(np.where(has_masters & (x.has_flat_masters > 0), 4.0, 0.0), OPTIMIZER)
    # The first stage of ZeRO leaves 16-bit gradients where they are while their sums are in fp32.
    is_summed_apart = (x.weight_bytes < x.gradient_bytes) & (x.has_flat_masters > 0)
    both = np.where(is_summed_apart & (x.sharding == OPTIMIZER), x.weight_bytes, 0.0)
    buckets = np.where(x.sharding >= OPTIMIZER, x.bucket_bytes, 0.0)
    is_sharded = x.sharding == WEIGHTS
    layer = x.layer_parameters / x.tp + x.expert_parameters / (x.tp * x.ep)
    gathered = np.where(is_sharded, layer * 2 * x.weight_bytes, 0.0)
    messages = np.where(x.pp > 1, 4 * BYTES * x.tokens * x.hidden / x.tp, 0.0)
    sequences = np.where(x.is_sequence_parallel > 0, 2 * BYTES * x.tokens * x.hidden, 0.0)
    has_logits = np.asarray(True) if is_last else x.pp == 1
    shape = np.zeros(np.broadcast(x.pp, x.tp, x.micro_batch).shape)
    return StepMemory(
        weights=held(x.weight_bytes, WEIGHTS) + shape,
        gradients=held(x.gradient_bytes + both, GRADIENTS) + shape,
        optimizer=held(master, OPTIMIZER) + shape,
        activations=kept_activations(x) * _in_flight(x, is_last=is_last) + _embedded(x, is_last),
        working=np.where(x.recompute == 2, layer_activations(x), _scores(x)) + shape,
        logits=np.where(has_logits, LOGITS_BYTES * x.tokens * x.vocab / x.tp, 0.0) + shape,
        buffers=gathered + messages + sequences + update + buckets + shape,
        reserve=RESERVE_BYTES + shape,
    )


def _embedded(x: Columns, is_last: bool) -> Floats:
    """The embedding's dropout mask, of each pass in flight on the first stage."""
    passes = np.where(is_last & (x.pp > 1), 0.0, np.minimum(x.pp, x.micro_batches))
    return MASK_BYTES * x.has_dropout * x.tokens * x.hidden / _sequence_parts(x) * passes
