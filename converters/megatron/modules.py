"""Megatron's modules: names of parameters in keys, in the whole model and on a rank; their order;
each rank's part of them.

A key without layer numbers (``decoder.layers.mlp.linear_fc1.weight``) stands for all layers: the
layer, and the expert, are leading axes. A tensor's name has them inside
(``decoder.layers.3.mlp.linear_fc1.weight``), so that it is the same in every pipeline split. A rank
counts layers and experts from its own first one. It calls norms by their place in the layer;
``torch_dist`` and live state name them after the linear layer behind them in Transformer Engine.

Buffers and optimizers are filled in the order of ``named_parameters``: a module's own parameters,
then those of its children in the order of their creation.

Source: ``sharded_state_dict`` of megatron-core 0.16.1 (transformer_block.py, moe/experts.py,
tensor_parallel/layers.py); megatron/core/models/gpt/gpt_layer_specs.py,
transformer/transformer_layer.py, transformer/moe/experts.py and get_num_layers_to_build of
transformer/transformer_block.py (0.16.1). Order: the models in megatron/core/models (gpt, T5,
bert), transformer/transformer_layer.py, attention.py, multi_latent_attention.py,
multi_token_prediction.py and transformer/moe/moe_layer.py, of core_v0.14.0 to core_v0.19.0 and of
main in August 2026, which agree.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from scalai.converters.megatron.arguments import stages_of
from scalai.converters.megatron.rules import LAYOUT
from scalai.core.errors import RefusedError
from scalai.core.tensors.region import Box, Index, whole

_CONTAINERS = ("layers", "experts.experts")
"""Modules with an index for a leading axis, the outermost first."""

PREDICTED = "mtp."
"""Begin of the names of layers for further tokens (MTP)."""

_AXES = (
    (re.compile(r"(word_embeddings|output_layer|linear_qkv|linear_fc1)\.weight$"), 0),
    (re.compile(r"self_attention\.linear_(q|q_up|kv_up)_proj\.weight$"), 0),
    (re.compile(r"(output_layer|linear_qkv|linear_fc1)\.bias$"), 0),
    (re.compile(r"(linear_proj|linear_fc2)\.weight$"), 1),
)


def leading_axes(key: str) -> int:
    """Return the number of leading axes of a key's tensor, layers or experts."""
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
    """Take the numbers of leading axes out of a name: ``name_at`` backwards.

    Experts always are leading axes; layers if they are alike, else they stay in the key.
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
    """Return the decoder layer of a parameter; None for layers that predict."""
    found = None if name.startswith(PREDICTED) else re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return int(found[1]) if found else None


def stack_of(name: str) -> str | None:
    """Return the beginning of the name of a module of layers: ``decoder.``."""
    found = re.match(r"(.*?)(?:^|(?<=\.))layers\.", name)
    return found[1] if found else None


def numbered_layer(name: str) -> int | None:
    """Return a parameter's layer in its stack."""
    found = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return int(found[1]) if found else None


def expert_of(name: str) -> int | None:
    found = re.search(r"\.experts\.experts\.(\d+)\.", name)
    return int(found[1]) if found else None


def tensor_parallel_axis(name: str) -> int | None:
    """Return the axis of a parameter cut by tensor parallelism; None: replicated."""
    return next((axis for pattern, axis in _AXES if pattern.search(name)), None)


def _pattern(container: str) -> re.Pattern[str]:
    return re.compile(rf"(?:^|\.){re.escape(container)}\.(?!\d)")


EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

_LAYER = r"\.layers\.\d+\.(?:transformer_layer\.|mtp_model_layer\.)?"
"""A layer of the decoder, or the one inside of a layer for further tokens (MTP)."""
_NORMS = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)
"""Norms of a layer of Megatron's own modules, and their global names; with latent attention (MLA)
these are the same."""
_LATENT = ".self_attention.linear_kv_down_proj."

_REPLICATED = re.compile(
    r"(layernorm|layer_norm|norm)[._](weight|bias)$|position_embeddings\.weight$|router\.\w+$"
    r"|(linear_proj|linear_fc2)\.bias$|shared_experts\.gate_weight$"
)
_BUFFERS = re.compile(r"\.(expert_bias|local_tokens_per_expert|qb_beta|inv_freq)$")


@dataclass(frozen=True, slots=True)
class Naming:
    """How the modules of a model are called on a rank.

    Attributes:
        is_local: The layers are made of Megatron's own modules, not of Transformer Engine's.
        is_grouped: The experts of a layer are one module of Transformer Engine's.
        is_latent: The layers have latent attention (MLA).
    """

    is_local: bool
    is_grouped: bool = False
    is_latent: bool = False

    @classmethod
    def of_rank(cls, names: Collection[str]) -> "Naming":
        """Return the naming of a rank with these names."""
        is_latent = has_latent(names)
        norm = ".kv_layernorm.weight" if is_latent else ".input_layernorm.weight"
        return cls(
            is_local=any(norm in name for name in names),
            is_grouped=any(re.search(r"\.experts\.linear_fc1\.weight\d", name) for name in names),
            is_latent=is_latent,
        )

    def to_global(self, name: str, first_layer: int, first_expert: int) -> str:
        name = re.sub(r"\.local_experts\.(\d+)\.", r".experts.\1.", name)
        name = re.sub(r"\.experts\.(linear_fc\d)\.(\D+)(\d+)$", r".experts.experts.\3.\1.\2", name)
        name = _shift(name, r"\.experts\.experts\.(\d+)\.", first_expert)
        name = _shift(name, r"\.layers\.(\d+)\.", first_layer)
        for mine, theirs in _NORMS if self.is_local and not self.is_latent else ():
            name = re.sub(rf"({_LAYER}){re.escape(mine)}", rf"\g<1>{theirs}", name)
        return name

    def to_rank(self, name: str, first_layer: int, first_expert: int) -> str:
        """Undo ``to_global``."""
        name = _shift(name, r"\.experts\.experts\.(\d+)\.", -first_expert)
        name = _shift(name, r"\.layers\.(\d+)\.", -first_layer)
        pattern, repl = r"\.experts\.experts\.(\d+)\.", r".experts.local_experts.\1."
        if self.is_grouped:
            pattern, repl = r"\.experts\.experts\.(\d+)\.(linear_fc\d)\.(\w+)$", r".experts.\2.\3\1"
        name = re.sub(pattern, repl, name)
        for mine, theirs in _NORMS if self.is_local and not self.is_latent else ():
            name = re.sub(rf"({_LAYER}){re.escape(theirs)}", rf"\g<1>{mine}", name)
        return name


def has_latent(names: Iterable[str]) -> bool:
    """Tell whether these are names of a model with latent attention (MLA)."""
    return any(_LATENT in name for name in names)


def _shift(name: str, pattern: str, by: int) -> str:
    found = re.search(pattern, name)
    if not found:
        return name
    return f"{name[: found.start(1)]}{int(found[1]) + by}{name[found.end(1) :]}"


def is_trained(name: str) -> bool:
    """Whether a tensor is a parameter, not a module's buffer."""
    return _BUFFERS.search(name) is None


def has_extra_state(name: str) -> bool:
    """Whether the module of this weight keeps extra state, if only None."""
    return re.search(r"(linear_\w+|output_layer)\.weight$", name) is not None


@dataclass(frozen=True, slots=True)
class RankBox:
    """A box of a whole tensor, and its begin in the rank's own tensor."""

    box: Box
    local: Index


def gated(shapes: Mapping[str, Index]) -> frozenset[str]:
    """Return the parameters with a gate and an up projection, one above the other.

    Args:
        shapes: Shapes of all parameters by name: whole, or of one rank.
    """
    found = set()
    for name, shape in shapes.items():
        if "linear_fc1." not in name or "layer_norm" in name:
            continue
        module = name[: name.index("linear_fc1.")]
        down = shapes.get(f"{module}linear_fc2.weight")
        if down is not None and shape[0] == 2 * down[1]:
            found.add(name)
    return frozenset(found)


def whole_shape(name: str, shape: Index, tp: int) -> Index:
    """Return the whole shape of a parameter, by a rank's.

    Raises:
        RefusedError: It is unknown how tensor parallelism cuts it.
    """
    axis = _axis(name, shape, tp)
    if axis is None:
        return shape
    return (*shape[:axis], shape[axis] * tp, *shape[axis + 1 :])


def parts(name: str, shape: Index, tp: int, tp_rank: int, *, is_gated: bool) -> list[RankBox]:
    """Return a rank's boxes of a parameter of shape ``shape``."""
    axis = _axis(name, shape, tp)
    if axis is None:
        return [RankBox(whole(shape), (0,) * len(shape))]
    halves = 2 if is_gated else 1
    if shape[axis] % (tp * halves):
        raise RefusedError(f"tp={tp} does not divide {shape[axis]} rows of {name}. Use another tp.")
    size = shape[axis] // (tp * halves)
    return [
        RankBox(
            Box(
                _with(shape, axis, (half * tp + tp_rank) * size, fill=0),
                _with(shape, axis, size),
            ),
            _with(shape, axis, half * size, fill=0),
        )
        for half in range(halves)
    ]


def _axis(name: str, shape: Index, tp: int) -> int | None:
    axis = tensor_parallel_axis(name) if "layer_norm" not in name else None
    if axis is None and tp > 1 and not _REPLICATED.search(name) and is_trained(name):
        raise RefusedError(
            f"{name} {list(shape)} is a parameter of which it is not known how tensor parallelism "
            "cuts it. Save it in Megatron with --ckpt-format torch_dist, or at tp=1."
        )
    return axis


def _with(shape: Index, axis: int, value: int, fill: int | None = None) -> Index:
    return tuple(
        value if at == axis else size if fill is None else fill for at, size in enumerate(shape)
    )


def stage_layers(
    layers: int, pp: int, vpp: int, arguments: Mapping[str, Any]
) -> Sequence[Sequence[range]]:
    """Return the layers of each pipeline rank, chunk by chunk: [pp][vpp].

    Raises:
        RefusedError: They cannot be cut so.
    """
    if (layout := arguments.get(LAYOUT)) and pp > 1:
        return _stages_in(str(layout), layers, pp, vpp)
    first = arguments.get("decoder_first_pipeline_num_layers") if pp > 1 else None
    last = arguments.get("decoder_last_pipeline_num_layers") if pp > 1 else None
    extra = [
        int(bool(arguments.get(f"account_for_{part}_in_pipeline_split")))
        for part in ("embedding", "loss")
    ]
    left = layers + sum(extra) - (first or 0) - (last or 0)
    stages = pp - (first is not None) - (last is not None)
    counts = [left // stages if stages else 0] * pp
    counts[0] = counts[0] if first is None else int(first)
    counts[-1] = counts[-1] if last is None else int(last)
    if sum(counts) != layers + sum(extra) or any(count % vpp for count in counts):
        raise RefusedError(
            f"{layers} layers cannot be cut into pp={pp} stages of vpp={vpp} chunks as the job's "
            "arguments want them. Use another --pp or --vpp."
        )
    sizes = [[count // vpp] * vpp for count in counts]
    sizes[0][0] -= extra[0]
    sizes[-1][-1] -= extra[1]
    found: list[list[range]] = [[] for _ in range(pp)]
    layer = 0
    for chunk in range(vpp):
        for rank in range(pp):
            found[rank].append(range(layer, layer + sizes[rank][chunk]))
            layer += sizes[rank][chunk]
    return found


def _stages_in(layout: str, layers: int, pp: int, vpp: int) -> Sequence[Sequence[range]]:
    counts = [stage.count("t") for stage in stages_of(layout)]
    if len(counts) != pp * vpp or sum(counts) != layers:
        raise RefusedError(
            f"the job's --pipeline-model-parallel-layout {layout} has {len(counts)} stages of "
            f"{sum(counts)} layers, not {pp * vpp} of {layers}. Write torch_dist instead: it does "
            "not depend on the pipeline's stages."
        )
    ends = list(accumulate(counts, initial=0))
    chunks = [range(begin, end) for begin, end in pairwise(ends)]
    return [chunks[rank::pp] for rank in range(pp)]


def experts_of_rank(names: Sequence[str], ep: int, ep_rank: int) -> range:
    """Return the experts of a rank.

    Raises:
        RefusedError: They cannot be shared out evenly.
    """
    count = 1 + max((expert_of(name) or 0 for name in names), default=0)
    if count % ep and any(expert_of(name) is not None for name in names):
        raise RefusedError(f"ep={ep} does not divide {count} experts. Use another --ep.")
    return range(ep_rank * count // ep, (ep_rank + 1) * count // ep)


def group_of(name: str, dims: int, groups: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of a parameter's group.

    Biases and vectors do not decay; the embedding and the output layer may have a rate of their
    own.

    Raises:
        RefusedError: None of the groups fits, or several do.
    """
    decays = dims > 1 and not name.endswith(".bias")
    has_decoupled = any(group.get("is_decoupled_lr") for group in groups)
    is_decoupled = has_decoupled and name in (EMBEDDING, OUTPUT)
    found = [
        number
        for number, group in enumerate(groups)
        if bool(group.get("wd_mult", group.get("pre_wd_mult", 1.0))) == decays
        and bool(group.get("is_decoupled_lr")) == is_decoupled
    ]
    if len(found) != 1:
        raise RefusedError(
            f"{len(found)} of {len(groups)} parameter groups could be that of {name}: the job "
            "groups its parameters by a rule of its own. Write torch_dist instead."
        )
    return found[0]


_ORDER = (
    "embedding.word_embeddings", "embedding.position_embeddings", "embedding.tokentype_embeddings",
    "encoder_relative_pos_emb", "decoder_relative_pos_emb", "encoder.layers",
    "encoder.final_layernorm", "decoder.layers", "decoder.final_layernorm", "mtp.layers",
    "lm_head", "output_layer", "binary_head", "pooler",
    "enorm", "hnorm", "eh_proj", "transformer_layer", "mtp_model_layer", "final_layernorm",
    "input_layernorm", "self_attention.core_attention", "self_attention.linear_proj",
    "self_attention.linear_qkv", "self_attention.linear_q_proj",
    "self_attention.linear_qkv_down_proj", "self_attention.linear_q_down_proj",
    "self_attention.linear_q_up_proj", "self_attention.linear_kv_down_proj",
    "self_attention.linear_kv_up_proj", "self_attention.q_layernorm",
    "self_attention.k_layernorm", "self_attention.kv_layernorm",
    "pre_cross_attn_layernorm", "cross_attention.core_attention", "cross_attention.linear_proj",
    "cross_attention.linear_q", "cross_attention.linear_kv", "cross_attention.q_layernorm",
    "cross_attention.k_layernorm", "pre_mlp_layernorm", "mlp.router", "mlp.fc1_latent_proj",
    "mlp.fc2_latent_proj", "mlp.experts", "mlp.shared_experts", "mlp.linear_fc1", "mlp.linear_fc2",
    "gate_weight", "softmax_offset", "relative_attention_bias", "dense", "layer_norm",
    "linear_fc1", "linear_fc2", "layer_norm_weight", "layer_norm_bias", "weight", "bias",
)  # fmt: skip
"""Modules and parameters in the order of their creation; those of one parent together."""

Order = tuple[tuple[int, int], ...]


def in_order(name: str) -> Order:
    """Return a key by which a rank's names sort in the order of its modules.

    Raises:
        RefusedError: It is unknown where the modules of this name stand.
    """
    key: list[tuple[int, int]] = []
    rest = name
    while rest:
        number = re.match(r"(?:experts\.|local_experts\.)?(\d+)(?:\.|$)", rest)
        if number:
            key.append((-1, int(number[1])))
            rest = rest[number.end() :]
            continue
        known = next((one for one in _ORDER if _begins(rest, one)), None)
        if known is None:
            raise RefusedError(
                f"{name} is a parameter of modules whose order in Megatron is not known here, so "
                "its optimizer state cannot be written by order. Write torch_dist instead."
            )
        key.append((_ORDER.index(known), 0))
        rest = rest[len(known) :].removeprefix(".")
    return tuple(key)


def _begins(name: str, known: str) -> bool:
    """Whether a name begins with this one, or with one of a group of it: ``weight3``."""
    return name.startswith(known) and re.match(r"(\.|\d+$|$)", name[len(known) :]) is not None
