"""Seconds of one transformer layer, forward, for one micro-batch on one device."""

from dataclasses import dataclass

import numpy as np

from scalai.core.planner.coefficients import Coefficients
from scalai.core.planner.columns import Columns, Floats

LAYER_NORM_BYTES = 22
"""Read and written a token and hidden unit by two norms, two dropouts and two residual sums: of
fused kernels in 16 bit, two masks. Whole on each tensor-parallel rank without sequence
parallelism."""
SCORE_BYTES = 13
"""Read and written a score by scale, mask, softmax, its dropout and both products, in 16 bit."""
BYTES = 2.0
"""Of an activation."""


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of the forward pass by kind, [cases]."""

    matrix: Floats
    attention: Floats
    elementwise: Floats
    launch: Floats

    @property
    def forward(self) -> Floats:
        return self.matrix + self.attention + self.elementwise + self.launch

    def backward(self, is_fused: Floats) -> Floats:
        """Two products for each of the forward pass; fused attention computes its scores again."""
        attention = self.attention * np.where(is_fused > 0, 2.5, 2.0)
        return 2 * self.matrix + attention + 2 * self.elementwise + self.launch


def layer_time(x: Columns, k: Coefficients) -> LayerTime:
    """Return the seconds of an average layer: dense ones and those with experts by their shares."""
    moe = x.moe_layers / x.layers
    width = x.heads * x.head_dim
    keys = np.maximum(x.kv_groups / x.tp, 1) * x.head_dim
    attention_linear = product(x, k, x.tokens, width / x.tp + 2 * keys, x.hidden)
    attention_linear += product(x, k, x.tokens, x.hidden, width / x.tp)
    dense = _feed_forward(x, k, x.tokens, x.ffn / x.tp)
    routed = moe * _experts(x, k)
    scores, score_traffic = _scores(x, k)
    return LayerTime(
        matrix=attention_linear + (1 - moe) * dense + routed,
        attention=scores,
        elementwise=score_traffic + _traffic(x, moe) / (x.memory_bandwidth * k.memory),
        launch=k.launch_s * (1 + 0.5 * moe),
    )


def product(
    x: Columns,
    k: Coefficients,
    rows: Floats,
    columns: Floats,
    inner: Floats,
    peak: Floats | None = None,
) -> Floats:
    """Return the seconds of ``[rows, inner] @ [inner, columns]``: its operations, and its operands
    once through memory, which a roofline would take the larger of and real kernels hardly overlap
    at their ends. ``peak`` None: that of the layers' precision."""
    rate = (x.peak if peak is None else peak) * x.matrix_efficiency * k.matrix
    operations = 2 * rows * columns * inner / rate
    size = BYTES * (rows * inner + inner * columns + rows * columns)
    return operations + size / (x.memory_bandwidth * k.memory)


def head_time(x: Columns, k: Coefficients) -> Floats:
    """Return the seconds of logits and loss, forward and backward, for one micro-batch: three
    products, and fp32 logits that are read or written five times."""
    logits = 3 * product(x, k, x.tokens, x.vocab / x.tp, x.hidden, x.half_peak)
    return logits + 20 * x.tokens * x.vocab / x.tp / (x.memory_bandwidth * k.memory)


def core_attention_time(layer: LayerTime) -> Floats:
    """Return what selective recomputation computes again in a layer."""
    return layer.attention


def _feed_forward(x: Columns, k: Coefficients, rows: Floats, width: Floats) -> Floats:
    up = product(x, k, rows, width * (1 + x.is_gated), x.hidden)
    return up + product(x, k, rows, x.hidden, width)


def _experts(x: Columns, k: Coefficients) -> Floats:
    """Return the seconds of routed and shared experts, balanced over ``ep`` ranks."""
    local = np.maximum(x.experts / x.ep, 1)
    rows = x.tokens * x.top_k * x.expert_capacity * x.etp / x.tp / local
    routed = local * _feed_forward(x, k, rows, x.expert_ffn / x.etp)
    shared = np.where(x.shared_ffn > 0, _feed_forward(x, k, x.tokens, x.shared_ffn / x.tp), 0.0)
    return routed + shared


def _scores(x: Columns, k: Coefficients) -> tuple[Floats, Floats]:
    """Return seconds of attention's own products, and of what scores take through memory.

    Fused attention skips what the causal mask hides; products of their own do not.
    """
    operations = 4 * x.tokens * x.seq * x.heads * x.head_dim / x.tp
    best = x.half_peak * x.matrix_efficiency
    fused = operations / 2 / (best * k.attention)
    traffic = SCORE_BYTES * x.tokens * x.seq * x.heads / x.tp / (x.memory_bandwidth * k.memory)
    is_fused = x.is_attention_fused > 0
    return (
        np.where(is_fused, fused, operations / (best * k.matrix)),
        np.where(is_fused, 0.0, traffic),
    )


def _traffic(x: Columns, moe: Floats) -> Floats:
    """Return the bytes that norms, dropouts, residuals and activations read and write."""
    repeated = LAYER_NORM_BYTES * x.tokens * x.hidden
    repeated = repeated / np.where(x.is_sequence_parallel > 0, x.tp, 1)
    width = (1 - moe) * x.ffn + moe * (x.top_k * x.expert_ffn + x.shared_ffn)
    activation = 2 * BYTES * x.tokens * width * (1 + 0.5 * x.is_gated) / x.tp
    return repeated + activation
