"""Megatron's names: keys of its checkpoints and names of tensors, and along which axis TP cuts.

A key without layer numbers (``decoder.layers.mlp.linear_fc1.weight``) stands for all layers: the
layer, and the expert, are leading axes. A tensor's name has them inside
(``decoder.layers.3.mlp.linear_fc1.weight``), so that it is the same in every pipeline split.

Source: ``sharded_state_dict`` of megatron-core 0.16.1 (transformer_block.py, moe/experts.py,
tensor_parallel/layers.py).
"""

import re
from collections.abc import Iterable

_CONTAINERS = ("layers", "experts.experts")
"""Modules whose index may be a leading axis, the outermost first."""

PREDICTED = "mtp."
"""What the parameters of layers begin with that predict further tokens (MTP)."""

_AXES = (
    (re.compile(r"(word_embeddings|output_layer|linear_qkv|linear_fc1)\.weight$"), 0),
    (re.compile(r"(output_layer|linear_qkv|linear_fc1)\.bias$"), 0),
    (re.compile(r"(linear_proj|linear_fc2)\.weight$"), 1),
)


def leading_axes(key: str) -> int:
    """Return how many leading axes of a key's tensor are layers or experts."""
    return sum(_pattern(container).search(key) is not None for container in _CONTAINERS)


def name_at(key: str, index: Iterable[int]) -> str:
    """Write the index on the leading axes into the key: the tensor's name."""
    for position in index:
        for container in _CONTAINERS:
            key, count = _pattern(container).subn(rf"\g<0>{position}.", key, count=1)
            if count:
                break
    return key


def fold(name: str, is_homogeneous: bool) -> tuple[str, tuple[int, ...]]:
    """Take the numbers out of a name that are leading axes of its key: ``name_at`` backwards.

    Experts are always one; layers where they are alike, else they stay in the key.
    """
    index = []
    has_axis = is_homogeneous and not name.startswith(PREDICTED)
    for container in _CONTAINERS if has_axis else _CONTAINERS[1:]:
        found = re.search(rf"(?:^|\.){re.escape(container)}\.(\d+)\.", name)
        if found:
            index.append(int(found[1]))
            name = name[: found.start(1)] + name[found.end(1) + 1 :]
    return name, tuple(index)


def layer_of(name: str) -> int | None:
    """Return the decoder layer that a parameter is of; those that predict are none of these."""
    found = None if name.startswith(PREDICTED) else re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return int(found[1]) if found else None


def stack_of(name: str) -> str | None:
    """Return what the name of a module begins with that consists of layers: ``decoder.``."""
    found = re.match(r"(.*?)(?:^|(?<=\.))layers\.", name)
    return found[1] if found else None


def numbered_layer(name: str) -> int | None:
    """Return the layer of its stack that a parameter is of."""
    found = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return int(found[1]) if found else None


def expert_of(name: str) -> int | None:
    """Return the expert that a parameter is of."""
    found = re.search(r"\.experts\.experts\.(\d+)\.", name)
    return int(found[1]) if found else None


def tensor_parallel_axis(name: str) -> int | None:
    """Return the axis of a parameter that tensor parallelism cuts; None: replicated."""
    return next((axis for pattern, axis in _AXES if pattern.search(name)), None)


def _pattern(container: str) -> re.Pattern[str]:
    return re.compile(rf"(?:^|\.){re.escape(container)}\.(?!\d)")
