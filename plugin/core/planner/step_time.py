"""Seconds of one training step, by part."""

from dataclasses import astuple, dataclass, fields

import numpy as np

from scalai.core.planner.columns import WEIGHTS, Cases, Floats, most_parameters
from scalai.core.planner.devices import HOST_COPY


@dataclass(frozen=True, slots=True)
class Prior:
    """Median, factor of one standard deviation, meaning and source."""

    median: float
    factor: float
    about: str
    source: str


PRIORS: dict[str, Prior] = {
    "matrix": Prior(
        0.90, 1.15, "share of the best matrix product's rate that a layer's products reach",
        "NVIDIA, Matrix Multiplication Background User's Guide: quantization of tiles and waves",
    ),
    "memory": Prior(
        0.80, 1.25, "share of the memory's bandwidth that element-wise operations reach",
        "Calculon (calculon-ai/calculon), systems/a100_80g.json: 0.75 at 10 MB, 0.90 at 100 MB",
    ),
    "attention": Prior(
        0.60, 1.3, "share of the best matrix product's rate that fused attention reaches",
        "FlashAttention-2 (arXiv 2307.08691), abstract: 50 to 73 % of the peak on an A100",
    ),
    "launch_s": Prior(
        3e-4, 3.0, "seconds a layer and pass in which the device waits for the host",
        "judgement: some 30 kernels of 10 us each; hosts, and how they launch, differ widely",
    ),
    "link": Prior(
        0.78, 1.25, "share of the bandwidth inside a host that collectives reach",
        "nccl-tests on an A100 host, stas00/ml-engineering, network: 235 of 300 GB/s",
    ),
    "network": Prior(
        0.80, 1.5, "share of the bandwidth between hosts that collectives reach",
        "Calculon, systems/a100_80g.json: 0.90; shared rails and slower networks are common",
    ),
    "overlap": Prior(
        0.30, 1.8, "share of what gradients and optimizer shards take that the backward pass hides",
        "between none (Megatron-LM without --overlap-grad-reduce) and most of it",
    ),
    "overlap_weights": Prior(
        0.75, 1.25, "share of what sharded weights take that the computation hides",
        "judgement; PyTorch FSDP (arXiv 2304.11277) gathers the next layer meanwhile",
    ),
    "step_s": Prior(
        0.02, 2.0, "seconds a step in which nothing of the above runs: clipping, loader, timers",
        "judgement; a step of a second or more hardly depends on it",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Coefficients:
    """One value for each of ``PRIORS``."""

    matrix: float
    memory: float
    attention: float
    launch_s: float
    link: float
    network: float
    overlap: float
    overlap_weights: float
    step_s: float

    def logs(self) -> Floats:
        """Return the natural logarithms, in the order of the fields."""
        values: Floats = np.array(astuple(self))
        return np.log(values)


NAMES = tuple(field.name for field in fields(Coefficients))
_SHARES = ("overlap", "overlap_weights")


def from_logs(logs: Floats) -> Coefficients:
    """Return the coefficients of these logarithms; hidden shares are at most 1."""
    values = dict(zip(NAMES, np.exp(logs).tolist(), strict=True))
    return Coefficients(**{n: min(v, 1.0) if n in _SHARES else v for n, v in values.items()})


def prior_logs() -> tuple[Floats, Floats]:
    """Return the means and standard deviations of the priors' logarithms."""
    priors = [PRIORS[name] for name in NAMES]
    medians = np.array([prior.median for prior in priors])
    return np.log(medians), np.log(np.array([prior.factor for prior in priors]))


DEFAULT = from_logs(prior_logs()[0])
"""Coefficients without measurements."""


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


def layer_time(x: Cases, k: Coefficients) -> LayerTime:
    """Return the seconds of an average layer: dense ones and those with experts by their shares."""
    moe = x.model.moe_layers / x.model.layers
    width = x.model.heads * x.model.head_dim
    keys = np.maximum(x.model.kv_groups / x.layout.tp, 1) * x.model.head_dim
    attention_linear = product(x, k, x.tokens, width / x.layout.tp + 2 * keys, x.model.hidden)
    attention_linear += product(x, k, x.tokens, x.model.hidden, width / x.layout.tp)
    dense = _feed_forward(x, k, x.tokens, x.model.ffn / x.layout.tp)
    routed = moe * _experts(x, k)
    scores, score_traffic = _scores(x, k)
    return LayerTime(
        matrix=attention_linear + (1 - moe) * dense + routed,
        attention=scores,
        elementwise=score_traffic + _traffic(x, moe) / (x.device.memory_bandwidth * k.memory),
        launch=k.launch_s * (1 + 0.5 * moe),
    )


def product(
    x: Cases,
    k: Coefficients,
    rows: Floats,
    columns: Floats,
    inner: Floats,
    peak: Floats | None = None,
) -> Floats:
    """Return the seconds of ``[rows, inner] @ [inner, columns]``: operations plus one pass of the
    operands through memory.

    A roofline would take the larger of both; real kernels hardly overlap them at their ends.
    ``peak`` None: of the layers' precision.
    """
    rate = (x.device.peak if peak is None else peak) * x.device.matrix_efficiency * k.matrix
    operations = 2 * rows * columns * inner / rate
    size = BYTES * (rows * inner + inner * columns + rows * columns)
    return operations + size / (x.device.memory_bandwidth * k.memory)


def head_time(x: Cases, k: Coefficients) -> Floats:
    """Return the seconds of logits and loss, forward and backward, for one micro-batch: three
    products, and five reads or writes of fp32 logits."""
    logits = 3 * product(
        x, k, x.tokens, x.model.vocab / x.layout.tp, x.model.hidden, x.device.half_peak
    )
    return logits + 20 * x.tokens * x.model.vocab / x.layout.tp / (
        x.device.memory_bandwidth * k.memory
    )


def _feed_forward(x: Cases, k: Coefficients, rows: Floats, width: Floats) -> Floats:
    up = product(x, k, rows, width * (1 + x.model.is_gated), x.model.hidden)
    return up + product(x, k, rows, x.model.hidden, width)


def _experts(x: Cases, k: Coefficients) -> Floats:
    """Return the seconds of routed and shared experts, balanced over ``ep`` ranks."""
    local = np.maximum(x.model.experts / x.layout.ep, 1)
    rows = x.tokens * x.model.top_k * x.work.expert_capacity * x.etp / x.layout.tp / local
    routed = local * _feed_forward(x, k, rows, x.model.expert_ffn / x.etp)
    shared = np.where(
        x.model.shared_ffn > 0, _feed_forward(x, k, x.tokens, x.model.shared_ffn / x.layout.tp), 0.0
    )
    return routed + shared


def _scores(x: Cases, k: Coefficients) -> tuple[Floats, Floats]:
    """Return the seconds of attention's own products, and of the scores' memory traffic.

    Fused attention skips masked scores; separate products do not.
    """
    operations = 4 * x.tokens * x.model.seq * x.model.heads * x.model.head_dim / x.layout.tp
    best = x.device.half_peak * x.device.matrix_efficiency
    fused = operations / 2 / (best * k.attention)
    traffic = (
        SCORE_BYTES
        * x.tokens
        * x.model.seq
        * x.model.heads
        / x.layout.tp
        / (x.device.memory_bandwidth * k.memory)
    )
    is_fused = x.work.is_attention_fused > 0
    return (
        np.where(is_fused, fused, operations / (best * k.matrix)),
        np.where(is_fused, 0.0, traffic),
    )


def _traffic(x: Cases, moe: Floats) -> Floats:
    """Return the bytes read and written by norms, dropouts, residuals and activations."""
    repeated = LAYER_NORM_BYTES * x.tokens * x.model.hidden
    repeated = repeated / np.where(x.layout.is_sequence_parallel > 0, x.layout.tp, 1)
    width = (1 - moe) * x.model.ffn + moe * (
        x.model.top_k * x.model.expert_ffn + x.model.shared_ffn
    )
    activation = 2 * BYTES * x.tokens * width * (1 + 0.5 * x.model.is_gated) / x.layout.tp
    return repeated + activation


LINK_LATENCY_S, NETWORK_LATENCY_S = 3.4e-6, 14e-6
"""From one rank of a ring to the next, inside a host and between hosts (NCCL, src/graph/tuning.cc:
hardware latencies of rings under its simple protocol)."""
START_S = 1e-5
"""Of any collective or message: its kernel (NCCL, src/graph/tuning.cc: 8.4e-6)."""


def bandwidth(x: Cases, k: Coefficients, stride: Floats, size: Floats) -> tuple[Floats, Floats]:
    """Return bytes/s and latency of a ring, once round, of ``size`` ranks, ``stride`` apart.

    Between hosts the rings that pass through a host at the same time share its network; a ring with
    several ranks in a host has that of all of them.
    """
    is_inside = stride * size <= x.device.per_host
    link, network = x.device.link * k.link, x.device.network * k.network
    rings = np.minimum(stride, x.device.per_host)
    between = np.minimum(link, network * x.device.per_host / rings)
    hosts = np.where(is_inside, 1, stride * size / x.device.per_host)
    latency = START_S + NETWORK_LATENCY_S * (hosts - 1) + LINK_LATENCY_S * (size - hosts)
    return np.where(is_inside, link, between), latency


def gather(size_bytes: Floats, ranks: Floats, rate: tuple[Floats, Floats]) -> Floats:
    """Return the seconds of an all-gather, or reduce-scatter, of ``size_bytes`` in total."""
    crossing = (ranks - 1) / ranks * size_bytes / rate[0]
    return np.where(ranks > 1, crossing + rate[1], 0.0)


def tensor_time(x: Cases, k: Coefficients) -> Floats:
    """Return the seconds of a layer's tensor parallelism in a forward pass: two all-reduces of the
    activations, or equal gathers and scatters."""
    rate = bandwidth(x, k, np.asarray(1.0), x.layout.tp)
    return 4 * gather(BYTES * x.tokens * x.model.hidden, x.layout.tp, rate)


def context_time(x: Cases, k: Coefficients) -> Floats:
    """Return the seconds of keys and values round the context-parallel ring in a layer's forward
    pass."""
    rate = bandwidth(x, k, x.layout.tp, x.layout.cp)
    keys = (
        2
        * BYTES
        * x.model.seq
        * x.layout.micro_batch
        * np.maximum(x.model.kv_groups / x.layout.tp, 1)
        * x.model.head_dim
    )
    return gather(keys, x.layout.cp, rate)


def expert_time(x: Cases, k: Coefficients) -> Floats:
    """Return the seconds of a layer's two all-to-alls in a forward pass."""
    rate = bandwidth(x, k, x.layout.tp, x.layout.ep)
    copies = x.tokens * x.model.top_k * x.work.expert_capacity
    size = (
        BYTES
        * copies
        * x.model.hidden
        / np.where(x.layout.is_sequence_parallel > 0, x.layout.tp, 1)
    )
    return 2 * gather(size, x.layout.ep, rate) * x.model.moe_layers / x.model.layers


def message_time(x: Cases, k: Coefficients) -> Floats:
    """Return the seconds of one message between pipeline stages: each tensor-parallel rank sends
    its part, and gathers the others' inside the host."""
    size = BYTES * x.tokens * x.model.hidden
    is_inside = x.world_size <= x.device.per_host
    link = x.device.link * k.link
    rate = np.where(is_inside, link, np.minimum(link, x.device.network * k.network))
    gathered = np.where(
        (x.layout.tp > 1) & (x.layout.is_sequence_parallel == 0),
        (x.layout.tp - 1) / x.layout.tp * size / link,
        0.0,
    )
    latency = START_S + np.where(is_inside, LINK_LATENCY_S, NETWORK_LATENCY_S)
    return np.where(x.layout.pp > 1, size / x.layout.tp / rate + gathered + latency, 0.0)


def replica_rate(x: Cases, k: Coefficients) -> tuple[Floats, Floats]:
    """Return bytes/s and latency between data-parallel replicas."""
    return bandwidth(x, k, x.layout.tp, x.layout.cp * x.layout.dp)


def expert_replica_rate(x: Cases, k: Coefficients) -> tuple[Floats, Floats]:
    """Return bytes/s and latency between ranks with the same experts."""
    return bandwidth(
        x, k, np.where(x.layout.ep > 1, x.etp * x.layout.ep, x.layout.tp), x.expert_replicas
    )


UPDATE_BYTES = 34
"""Read and written of a parameter that a rank updates: gradient, master and two moments in fp32,
then masters, moments and the weight, and once more the gradient to clip it."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step by part, [cases], without hidden seconds."""

    compute: Floats
    """Forward and backward passes of the layers."""
    recompute: Floats
    head: Floats
    tensor: Floats
    context: Floats
    expert: Floats
    bubble: Floats
    """Waits of stages for each other."""
    pipeline: Floats
    """Messages between stages."""
    data: Floats
    """Gradients, and sharded weights."""
    optimizer: Floats
    host: Floats
    """Updates in host memory, and what crosses to and from it."""
    overhead: Floats

    @property
    def total(self) -> Floats:
        total: Floats = sum((getattr(self, f.name) for f in fields(self)), np.asarray(0.0))
        return total


def step_time(x: Cases, k: Coefficients = DEFAULT) -> StepTime:
    """Return the seconds of a step by part.

    The schedule is 1F1B, interleaved where ``vpp`` is above 1: the last stage, which has the head,
    works through all micro-batches, and the others' first and last passes are added. Where stages
    have different numbers of layers the largest counts.

    Source:
        Narayanan et al., arXiv 2104.04473, sections 2.2 and 3; Korthikanti et al., arXiv 2205.05198
        (recomputation); differs in the head, which the last stage has alone.
    """
    layer, m = layer_time(x, k), x.micro_batches
    layers = np.ceil(x.model.layers / x.layout.pp)
    passes = 2.0 + (x.layout.recompute == 2)
    forward, backward = layer.forward, layer.backward(x.work.is_attention_fused)
    kinds = [x.layout.recompute == 2, x.layout.recompute == 1]
    again = np.select(kinds, [forward, layer.attention], 0)
    parts = {
        "compute": layers * (forward + backward),
        "recompute": layers * again,
        "tensor": layers * passes * tensor_time(x, k),
        # Keys and values travel while attention computes; what is longer is seen.
        "context": layers * passes * np.maximum(context_time(x, k) - layer.attention, 0),
        "expert": layers * passes * expert_time(x, k),
    }
    stage = sum(parts.values(), np.asarray(0.0))
    message = 2 * x.layout.vpp * message_time(x, k)
    weights, gradients, exposed_to = _data(x, k, layers, backward, stage)
    return StepTime(
        **{name: m * value for name, value in parts.items()},
        head=m * head_time(x, k),
        bubble=(x.layout.pp - 1) / x.layout.vpp * (stage + message),
        pipeline=m * message,
        data=m * weights + gradients - k.overlap * np.minimum(gradients, exposed_to),
        optimizer=(1 - x.spilled) * _update(x, k),
        host=_on_host(x, passes),
        overhead=np.broadcast_to(np.asarray(k.step_s), np.shape(stage)),
    )


def _data(
    x: Cases, k: Coefficients, layers: Floats, backward: Floats, stage: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return what sharded weights add to a micro-batch, what gradients take a step, and the seconds
    that may hide the latter: the backward pass of the last micro-batch."""
    rate, (own, routed) = replica_rate(x, k), most_parameters(x)

    def crossing_of(bytes_each: Floats) -> Floats:
        experts = gather(bytes_each * routed, x.expert_replicas, expert_replica_rate(x, k))
        return gather(bytes_each * own, x.replicas, rate) + np.where(routed > 0, experts, 0.0)

    weights, gradients = crossing_of(x.work.weight_bytes), crossing_of(x.work.gradient_bytes)
    # Weights are gathered for both passes, gradients scattered, each micro-batch.
    crossing = 3 * (weights + (x.work.gathers_per_layer * layers - 1) * rate[1])
    hidden = k.overlap_weights * np.minimum(crossing, stage)
    is_sharded = x.layout.sharding == WEIGHTS
    # A gradient is scattered and gathered; an optimizer's shards gather weights instead.
    once = gradients + np.where(x.layout.sharding == 0, gradients, weights)
    return (
        np.where(is_sharded, crossing - hidden, 0.0),
        np.where(is_sharded, 0.0, once),
        layers * backward,
    )


def _update(x: Cases, k: Coefficients) -> Floats:
    own, routed = most_parameters(x)
    shared = own / x.replicas + routed / x.expert_replicas
    parameters = np.where(x.layout.sharding > 0, shared, own + routed)
    return UPDATE_BYTES * parameters / (x.device.memory_bandwidth * k.memory)


HOST_UPDATE = 4e9
"""Parameters/s that a host's processors update, all its ranks together, bound by the bandwidth of
memory: ZeRO-Offload (arXiv 2101.06840), table of CPU-Adam's latency: 0.22 s for 1e9, 2.57 s for
1e10."""


def _on_host(x: Cases, passes: Floats) -> Floats:
    """Return the seconds of spilled state: the update by the host's processors, gradients to the
    host and weights back; DeepSpeed also adds each micro-batch's gradients to sums there, and
    fetches spilled weights for each of its ``passes`` over the layers."""
    own, routed = most_parameters(x)
    shared = own / x.replicas + routed / x.expert_replicas
    updated = x.spilled * np.where(x.layout.sharding > 0, shared, own + routed)
    ranks = np.minimum(x.world_size, x.device.per_host)
    crossing = updated * (x.work.gradient_bytes + x.work.weight_bytes)
    is_summed_there = (x.work.has_flat_masters > 0) & (x.micro_batches > 1)
    crossing += np.where(
        is_summed_there, x.micro_batches * 2 * x.work.gradient_bytes * updated, 0.0
    )
    fetched = np.where(x.layout.offload == 3, passes * x.work.weight_bytes * updated, 0.0)
    crossing += x.micro_batches * fetched
    return ranks * updated / HOST_UPDATE + crossing / HOST_COPY
