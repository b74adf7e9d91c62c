"""Shapes of Megatron's models, small and of sizes that differ."""

from collections.abc import Sequence

HEADS, GROUPS, WIDTH, HIDDEN, FFN, VOCABULARY, LENGTH = 4, 2, 3, 12, 10, 16, 7

Shapes = dict[str, tuple[int, ...]]


def gpt(*, is_tied: bool = True, positions: bool = True, layers: int = 2) -> Shapes:
    """Return the parameters of a GPT with LayerNorm and biases."""
    layer = {
        "self_attention.linear_qkv.layer_norm_weight": (HIDDEN,),
        "self_attention.linear_qkv.layer_norm_bias": (HIDDEN,),
        "self_attention.linear_qkv.weight": (3 * HEADS * WIDTH, HIDDEN),
        "self_attention.linear_qkv.bias": (3 * HEADS * WIDTH,),
        "self_attention.linear_proj.weight": (HIDDEN, HEADS * WIDTH),
        "self_attention.linear_proj.bias": (HIDDEN,),
        "mlp.linear_fc1.layer_norm_weight": (HIDDEN,),
        "mlp.linear_fc1.layer_norm_bias": (HIDDEN,),
        "mlp.linear_fc1.weight": (FFN, HIDDEN),
        "mlp.linear_fc1.bias": (FFN,),
        "mlp.linear_fc2.weight": (HIDDEN, FFN),
        "mlp.linear_fc2.bias": (HIDDEN,),
    }
    return _model(layer, layers, is_tied, positions, ("weight", "bias"))


def llama(*, is_tied: bool = False, biases: bool = False, layers: int = 2) -> Shapes:
    """Return the parameters of a Llama with query groups; with ``biases`` those of Qwen2."""
    rows = (HEADS + 2 * GROUPS) * WIDTH
    layer = {
        "self_attention.linear_qkv.layer_norm_weight": (HIDDEN,),
        "self_attention.linear_qkv.weight": (rows, HIDDEN),
        **({"self_attention.linear_qkv.bias": (rows,)} if biases else {}),
        "self_attention.linear_proj.weight": (HIDDEN, HEADS * WIDTH),
        "mlp.linear_fc1.layer_norm_weight": (HIDDEN,),
        "mlp.linear_fc1.weight": (2 * FFN, HIDDEN),
        "mlp.linear_fc2.weight": (HIDDEN, FFN),
    }
    return _model(layer, layers, is_tied, False, ("weight",))


def routed(
    *, experts: int = 3, is_shared: bool = False, dense: Sequence[int] = (), is_local: bool = False,
    layers: int = 2,
) -> Shapes:  # fmt: skip
    """Return the parameters of a Llama with experts in all layers but ``dense``."""
    found = {}
    for name, shape in llama(layers=layers).items():
        if ".mlp." not in name or any(f"layers.{layer}." in name for layer in dense):
            found[name] = shape
            continue
        layer, _, module = name.partition(".mlp.")
        if module == "linear_fc1.layer_norm_weight":
            found[name if is_local else f"{layer}.pre_mlp_layernorm.weight"] = shape
            continue
        found[f"{layer}.mlp.router.weight"] = (experts, HIDDEN)
        for number in range(experts):
            found[f"{layer}.mlp.experts.experts.{number}.{module}"] = shape
        if is_shared:
            found[f"{layer}.mlp.shared_experts.{module}"] = shape
            found[f"{layer}.mlp.shared_experts.gate_weight"] = (1, HIDDEN)
    return found


def latent(
    *, is_third: bool = True, rank: int | None = 8, experts: int = 4, is_local: bool = False
) -> Shapes:
    """Return the parameters of DeepSeek's models, with experts behind the first layer.

    Args:
        rank: Of the queries; None: they are not of low rank.
    """
    norm = "self_attention.{}_layernorm.weight" if is_local else (
        "self_attention.linear_{}_up_proj.layer_norm_weight"
    )  # fmt: skip
    layer: Shapes = {
        "input_layernorm.weight": (HIDDEN,),
        "self_attention.linear_proj.weight": (HIDDEN, HEADS * 7),
        "self_attention.linear_kv_down_proj.weight": (6 + 2, HIDDEN),
        "self_attention.linear_kv_up_proj.weight": (HEADS * (WIDTH + 7), 6),
        norm.format("kv"): (6,),
    }
    queries = HEADS * (WIDTH + 2)
    if rank is None:
        layer["self_attention.linear_q_proj.weight"] = (queries, HIDDEN)
    else:
        layer |= {
            "self_attention.linear_q_down_proj.weight": (rank, HIDDEN),
            "self_attention.linear_q_up_proj.weight": (queries, rank),
            norm.format("q"): (rank,),
        }
    found = _model(layer, 3, False, False, ("weight",))
    for name, shape in routed(experts=experts, is_shared=True, dense=[0], layers=3).items():
        if ".mlp." in name or "pre_mlp" in name:
            name = name.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight" if
                                is_local else "mlp.linear_fc1.layer_norm_weight")  # fmt: skip
            found[name] = shape
    found = {name: shape for name, shape in found.items() if not name.endswith("gate_weight")}
    biases = {f"decoder.layers.{n}.mlp.router.expert_bias": (experts,) for n in (1, 2)}
    return {**found, **(biases if is_third else {})}


def _model(
    layer: Shapes, layers: int, is_tied: bool, positions: bool, norm: tuple[str, ...]
) -> Shapes:
    return {
        "embedding.word_embeddings.weight": (VOCABULARY, HIDDEN),
        **({"embedding.position_embeddings.weight": (LENGTH, HIDDEN)} if positions else {}),
        **{f"decoder.layers.{n}.{name}": s for n in range(layers) for name, s in layer.items()},
        **{f"decoder.final_layernorm.{name}": (HIDDEN,) for name in norm},
        **({} if is_tied else {"output_layer.weight": (VOCABULARY, HIDDEN)}),
    }
