"""What one pipeline stage has of a model: layers, and the parameters of one of its ranks."""

import numpy as np

from scalai.core.planner.columns import Cases, Floats


def first(x: Cases) -> Floats:
    """Return the number of the first stage."""
    return np.zeros_like(x.layout.pp)


def second(x: Cases) -> Floats:
    """Return the number of the second stage, or of the only one."""
    return np.minimum(x.layout.pp - 1, 1)


def last(x: Cases) -> Floats:
    """Return the number of the last stage."""
    return x.layout.pp - 1


def layers_of(x: Cases, stage: Floats) -> tuple[Floats, Floats]:
    """Return how many layers of a stage have no experts, and how many do: these are spread evenly,
    those without them first, and stages are cut as if none were virtual."""
    layers = np.ceil(x.model.layers / x.layout.pp)
    before = np.minimum(stage * layers, x.model.layers - layers)
    end = np.floor((before + layers) * x.model.moe_layers / x.model.layers)
    moe = end - np.floor(before * x.model.moe_layers / x.model.layers)
    return layers - moe, moe


def parameters_of(x: Cases, stage: Floats) -> tuple[Floats, Floats]:
    """Return the parameters of one rank of a stage: all but the routed experts', and these."""
    dense, moe = layers_of(x, stage)
    own = dense * dense_layer(x) + moe * expert_layer(x) + _ends(x, stage)
    return own, moe * experts(x)


def most_parameters(x: Cases) -> tuple[Floats, Floats]:
    """Return the same of the stage that has most of either: the first or, of layers with experts,
    the second."""
    own, routed = parameters_of(x, first(x))
    others = parameters_of(x, second(x))
    return np.maximum(own, others[0]), np.maximum(routed, others[1])


def dense_layer(x: Cases) -> Floats:
    """Return what one rank has of a layer without experts."""
    return x.parts.dense_cut / x.layout.tp + x.parts.dense_whole


def expert_layer(x: Cases) -> Floats:
    """Return what one rank has of a layer with experts, but for the routed ones."""
    return x.parts.moe_cut / x.layout.tp + x.parts.moe_whole


def experts(x: Cases) -> Floats:
    """Return what one rank has of the routed experts of a layer."""
    return x.model.experts / x.layout.ep * (x.parts.expert_cut / x.etp + x.parts.expert_whole)


def _ends(x: Cases, stage: Floats) -> Floats:
    """Embedding and positions of the first stage, head and last norm of the last one; a tied head
    is a second embedding unless one stage has both."""
    embedding = x.model.vocab * x.model.hidden / x.layout.tp
    head = np.where((x.layout.pp == 1) & (x.model.is_tied > 0), 0.0, embedding) + x.parts.final_norm
    start = embedding + x.model.positions * x.model.hidden
    return np.where(stage == 0, start, 0.0) + np.where(stage == x.layout.pp - 1, head, 0.0)
