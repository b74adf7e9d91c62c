"""Seconds of one training step, by part."""

from dataclasses import dataclass, fields

import numpy as np

from scalai.core.planner.coefficients import DEFAULT, Coefficients
from scalai.core.planner.columns import WEIGHTS, Columns, Floats
from scalai.core.planner.communication import (
    context_time,
    expert_replica_rate,
    expert_time,
    gather,
    message_time,
    replica_rate,
    tensor_time,
)
from scalai.core.planner.layer_time import core_attention_time, head_time, layer_time
from scalai.core.planner.stage import most_parameters

UPDATE_BYTES = 34
"""Read and written of a parameter that a rank updates: gradient, master and two moments in fp32,
then masters, moments and the weight, and once more the gradient to clip it."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step by part, [cases]; what other work hides is left out."""

    compute: Floats
    """Forward and backward passes of the layers."""
    recompute: Floats
    head: Floats
    tensor: Floats
    context: Floats
    expert: Floats
    bubble: Floats
    """What stages wait for each other."""
    pipeline: Floats
    """Messages between stages."""
    data: Floats
    """Gradients, and weights that are sharded."""
    optimizer: Floats
    overhead: Floats

    @property
    def total(self) -> Floats:
        total: Floats = sum((getattr(self, f.name) for f in fields(self)), np.asarray(0.0))
        return total


def step_time(x: Columns, k: Coefficients = DEFAULT) -> StepTime:
    """Return the seconds of a step by part.

    The schedule is 1F1B, interleaved where ``vpp`` is above 1: the last stage, which has the head,
    works through all micro-batches, and the others' first and last passes are added. Where stages
    have different numbers of layers the largest counts.

    Source:
        Narayanan et al., arXiv 2104.04473, sections 2.2 and 3; Korthikanti et al., arXiv 2205.05198
        (recomputation); differs in the head, which the last stage has alone.
    """
    layer, m = layer_time(x, k), x.micro_batches
    layers = np.ceil(x.layers / x.pp)
    passes = 2.0 + (x.recompute == 2)
    forward, backward = layer.forward, layer.backward(x.is_attention_fused)
    again = np.select(
        [x.recompute == 2, x.recompute == 1], [forward, core_attention_time(layer)], 0
    )
    parts = {
        "compute": layers * (forward + backward),
        "recompute": layers * again,
        "tensor": layers * passes * tensor_time(x, k),
        # Keys and values travel while attention computes; what is longer is seen.
        "context": layers * passes * np.maximum(context_time(x, k) - layer.attention, 0),
        "expert": layers * passes * expert_time(x, k),
    }
    stage = sum(parts.values(), np.asarray(0.0))
    message = 2 * x.vpp * message_time(x, k)
    weights, gradients, exposed_to = _data(x, k, layers, backward, stage)
    return StepTime(
        **{name: m * value for name, value in parts.items()},
        head=m * head_time(x, k),
        bubble=(x.pp - 1) / x.vpp * (stage + message),
        pipeline=m * message,
        data=m * weights + gradients - k.overlap * np.minimum(gradients, exposed_to),
        optimizer=_update(x, k),
        overhead=np.broadcast_to(np.asarray(k.step_s), np.shape(stage)),
    )


def _data(
    x: Columns, k: Coefficients, layers: Floats, backward: Floats, stage: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return what sharded weights add to a micro-batch, what gradients take a step, and the seconds
    that may hide the latter: the backward pass of the last micro-batch."""
    rate, (own, routed) = replica_rate(x, k), most_parameters(x)

    def crossing_of(bytes_each: Floats) -> Floats:
        experts = gather(bytes_each * routed, x.expert_replicas, expert_replica_rate(x, k))
        return gather(bytes_each * own, x.replicas, rate) + np.where(routed > 0, experts, 0.0)

    weights, gradients = crossing_of(x.weight_bytes), crossing_of(x.gradient_bytes)
    # Weights are gathered for both passes, gradients scattered, each micro-batch.
    crossing = 3 * (weights + (x.gathers_per_layer * layers - 1) * rate[1])
    hidden = k.overlap_weights * np.minimum(crossing, stage)
    is_sharded = x.sharding == WEIGHTS
    # A gradient is scattered and gathered; an optimizer's shards gather weights instead.
    once = gradients + np.where(x.sharding == 0, gradients, weights)
    return (
        np.where(is_sharded, crossing - hidden, 0.0),
        np.where(is_sharded, 0.0, once),
        layers * backward,
    )


def _update(x: Columns, k: Coefficients) -> Floats:
    own, routed = most_parameters(x)
    shared = own / x.replicas + routed / x.expert_replicas
    parameters = np.where(x.sharding > 0, shared, own + routed)
    return UPDATE_BYTES * parameters / (x.memory_bandwidth * k.memory)
