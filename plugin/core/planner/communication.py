"""Seconds that collectives and messages take, by who takes part and where they are.

Ranks stand as Megatron-LM numbers them, tp-cp-ep-dp-pp, hosts filled in order: tensor-parallel
groups lie next to each other, and pipeline neighbours are ``tp * cp * dp`` apart.
"""

import numpy as np

from scalai.core.planner.coefficients import Coefficients
from scalai.core.planner.columns import Columns, Floats
from scalai.core.planner.layer_time import BYTES

LINK_LATENCY_S, NETWORK_LATENCY_S = 3.4e-6, 14e-6
"""From one rank of a ring to the next, inside a host and between hosts (NCCL, src/graph/tuning.cc:
hardware latencies of rings under its simple protocol)."""
START_S = 1e-5
"""Of any collective or message: its kernel (NCCL, src/graph/tuning.cc: 8.4e-6)."""


def bandwidth(x: Columns, k: Coefficients, stride: Floats, size: Floats) -> tuple[Floats, Floats]:
    """Return bytes/s and latency of a ring, once round, of ``size`` ranks, ``stride`` apart.

    Between hosts the rings that pass through a host at the same time share its network; a ring with
    several ranks in a host has that of all of them.
    """
    is_inside = stride * size <= x.per_host
    link, network = x.link * k.link, x.network * k.network
    rings = np.minimum(stride, x.per_host)
    between = np.minimum(link, network * x.per_host / rings)
    hosts = np.where(is_inside, 1, stride * size / x.per_host)
    latency = START_S + NETWORK_LATENCY_S * (hosts - 1) + LINK_LATENCY_S * (size - hosts)
    return np.where(is_inside, link, between), latency


def gather(size_bytes: Floats, ranks: Floats, rate: tuple[Floats, Floats]) -> Floats:
    """Return the seconds of an all-gather, or reduce-scatter, of ``size_bytes`` in total."""
    crossing = (ranks - 1) / ranks * size_bytes / rate[0]
    return np.where(ranks > 1, crossing + rate[1], 0.0)


def tensor_time(x: Columns, k: Coefficients) -> Floats:
    """Return the seconds that a layer's tensor parallelism takes in a forward pass: two all-reduces
    of the activations, or the same as gathers and scatters."""
    rate = bandwidth(x, k, np.asarray(1.0), x.tp)
    return 4 * gather(BYTES * x.tokens * x.hidden, x.tp, rate)


def context_time(x: Columns, k: Coefficients) -> Floats:
    """Return the seconds in which keys and values go round the context-parallel ring in a layer's
    forward pass."""
    rate = bandwidth(x, k, x.tp, x.cp)
    keys = 2 * BYTES * x.seq * x.micro_batch * np.maximum(x.kv_groups / x.tp, 1) * x.head_dim
    return gather(keys, x.cp, rate)


def expert_time(x: Columns, k: Coefficients) -> Floats:
    """Return the seconds of a layer's two all-to-alls in a forward pass."""
    rate = bandwidth(x, k, x.tp, x.ep)
    copies = x.tokens * x.top_k * x.expert_capacity
    size = BYTES * copies * x.hidden / np.where(x.is_sequence_parallel > 0, x.tp, 1)
    return 2 * gather(size, x.ep, rate) * x.moe_layers / x.layers


def message_time(x: Columns, k: Coefficients) -> Floats:
    """Return the seconds of one message between pipeline stages: each tensor-parallel rank sends
    its part, and gathers the others' inside the host."""
    size = BYTES * x.tokens * x.hidden
    is_inside = x.world_size <= x.per_host
    link = x.link * k.link
    rate = np.where(is_inside, link, np.minimum(link, x.network * k.network))
    gathered = np.where(
        (x.tp > 1) & (x.is_sequence_parallel == 0), (x.tp - 1) / x.tp * size / link, 0.0
    )
    latency = START_S + np.where(is_inside, LINK_LATENCY_S, NETWORK_LATENCY_S)
    return np.where(x.pp > 1, size / x.tp / rate + gathered + latency, 0.0)


def replica_rate(x: Columns, k: Coefficients) -> tuple[Floats, Floats]:
    """Return bytes/s and latency between data-parallel replicas."""
    return bandwidth(x, k, x.tp, x.cp * x.dp)


def expert_replica_rate(x: Columns, k: Coefficients) -> tuple[Floats, Floats]:
    """Return bytes/s and latency between the ranks that have the same experts."""
    return bandwidth(x, k, np.where(x.ep > 1, x.etp * x.ep, x.tp), x.expert_replicas)
