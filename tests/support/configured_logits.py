"""Computes with megatron-core what a converted model of Hugging Face's computes there,
and back. ``main`` prints by name how far the logits are apart in both directions.

There: ``FOLDER/<name>/hf`` goes through the files of several ranks to ``torch_dist``, and
megatron-core's model is built by the arguments in it. Back: megatron-core saves other weights, and
the class that the written ``config.json`` names loads them.
"""

import argparse
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

from scalai.patches.megatron import cpu_emulation

cpu_emulation.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch.nn import functional  # noqa: E402

from scalai.launch import cli  # noqa: E402

T: Any = transformers
ALIKE = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 16, "attn_implementation": "eager", "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = {**ALIKE, "intermediate_size": 72, "num_key_value_heads": 2, "rms_norm_eps": 1e-3}
NEOX = {**ALIKE, "intermediate_size": 128, "use_parallel_residual": False, "layer_norm_eps": 1e-3}
TIED = {**LLAMA, "tie_word_embeddings": True}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _rope(base: float, kind: str = "default", **more: Any) -> Any:
    return {"rope_parameters": {"rope_theta": base, "rope_type": kind, **more}}


MODELS: dict[str, tuple[str, Any]] = {
    "llama": ("llama", T.LlamaConfig(**LLAMA, **_rope(500.0))),
    "linear": ("llama", T.LlamaConfig(**LLAMA, **_rope(1e4, "linear", factor=2.0))),
    "biases": ("llama", T.LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True)),
    "mistral": ("mistral", T.MistralConfig(**LLAMA, head_dim=16, sliding_window=None)),
    "qwen2": ("qwen2", T.Qwen2Config(**TIED)),
    "qwen3": ("qwen3", T.Qwen3Config(**TIED, head_dim=16)),
    "mixtral": ("mixtral", T.MixtralConfig(**LLAMA, num_experts_per_tok=2, num_local_experts=4)),
    "qwen2_moe": ("qwen_moe", T.Qwen2MoeConfig(
        **LLAMA, **EXPERTS, num_experts=4, shared_expert_intermediate_size=40)),
    "qwen3_moe": ("qwen3_moe", T.Qwen3MoeConfig(
        **TIED, **EXPERTS, head_dim=16, num_experts=4, norm_topk_prob=True, mlp_only_layers=[1])),
    "gemma": ("gemma", T.GemmaConfig(**TIED, head_dim=16)),
    "partial": ("gpt_neox", T.GPTNeoXConfig(**NEOX, rotary_pct=0.25, rotary_emb_base=100)),
    "tanh": ("gpt", T.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16,
        attn_implementation="eager")),
}  # fmt: skip
SIZES = {"mixtral": ["--ep", "2"], "qwen2_moe": ["--ep", "2"], "qwen3_moe": ["--ep", "4"]}


def reshard(source: Path, target: Path, *flags: str) -> None:
    command("reshard", source, target, "--workers", "1", *flags)


def command(name: str, source: Path, target: Path, *flags: str) -> None:
    try:
        cli.main([name, str(source), str(target), *flags])
    except SystemExit as ended:
        assert not ended.code, ended.code


def randomized(model: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * 0.15
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    return model.eval()


def built(a: argparse.Namespace) -> Any:
    """Return Megatron's model, as `pretrain_gpt.py` makes it of these arguments (0.16.1)."""
    is_tanh = getattr(a, "bias_gelu_fusion", True)
    is_gemma = getattr(a, "apply_layernorm_1p", False)
    experts = {} if not a.num_experts else {
        "num_moe_experts": a.num_experts, "moe_ffn_hidden_size": a.moe_ffn_hidden_size,
        "moe_router_topk": a.moe_router_topk, "moe_router_pre_softmax": a.moe_router_pre_softmax,
        "moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "alltoall",
        "moe_shared_expert_intermediate_size": a.moe_shared_expert_intermediate_size,
        "moe_shared_expert_gate": a.moe_shared_expert_gate, "moe_layer_freq": a.moe_layer_freq,
    }  # fmt: skip
    config = TransformerConfig(
        num_layers=a.num_layers, hidden_size=a.hidden_size, kv_channels=a.kv_channels,
        num_attention_heads=a.num_attention_heads, ffn_hidden_size=a.ffn_hidden_size,
        num_query_groups=a.num_query_groups, gated_linear_unit=a.swiglu or is_gemma,
        activation_func=functional.silu if a.swiglu else
        lambda x: functional.gelu(x, approximate="tanh" if is_tanh or is_gemma else "none"),
        add_bias_linear=a.add_bias_linear, add_qkv_bias=a.add_qkv_bias,
        qk_layernorm=a.qk_layernorm, normalization=a.normalization,
        layernorm_epsilon=getattr(a, "norm_epsilon", 1e-5), hidden_dropout=0.0,
        attention_dropout=0.0, masked_softmax_fusion=False, bias_dropout_fusion=False,
        bias_activation_fusion=False, gradient_accumulation_fusion=False, apply_rope_fusion=False,
        rotary_interleaved=getattr(a, "rotary_interleaved", False), **experts,
    )  # fmt: skip
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=a.normalization
    )
    model: Any = GPTModel(
        config, spec, a.padded_vocab_size, 16,
        position_embedding_type=a.position_embedding_type,
        rotary_percent=getattr(a, "rotary_percent", 1.0),
        rotary_base=getattr(a, "rotary_base", 10000),
        seq_len_interpolation_factor=getattr(a, "rotary_seq_len_interpolation_factor", None),
        share_embeddings_and_output_weights=not a.untie_embeddings_and_output_weights,
    )  # fmt: skip
    if is_gemma:
        _make_gemma(model)
    return model.eval()


def _make_gemma(model: Any) -> None:
    """Give a model what only a script can: scaled embeddings; and norms by one plus the weight,
    which Transformer Engine computes for `--apply-layernorm-1p`."""
    scale = math.sqrt(model.config.hidden_size)
    model.embedding.register_forward_hook(lambda module, given, output: output * scale)
    for module in model.modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.register_forward_pre_hook(partial(_add, 1))
            module.register_forward_hook(partial(_add, -1))


def _add(number: int, norm: Any, *given: Any) -> None:
    norm.weight.data.add_(number)


TOKENS = torch.arange(36).reshape(3, 12) * 7 % 64


def loaded(directory: Path) -> tuple[Any, argparse.Namespace]:
    """Return Megatron's model of a checkpoint, and the arguments there."""
    iteration = next(directory.glob("iter_*"))
    arguments = torch.load(iteration / "common.pt", weights_only=False)["args"]
    model = built(arguments)
    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(iteration))
    model.load_state_dict(state["model"])
    return model, arguments


def apart(ours: Any, theirs: Any) -> float:
    positions = torch.arange(12)[None].expand(3, -1)
    later = torch.triu(torch.ones(12, 12), 1).bool()[None, None]
    with torch.no_grad():
        found = ours(TOKENS, positions, later) - theirs.eval()(TOKENS).logits
    return float(found.abs().max())


def there_and_back(folder: Path, mapping: str, config: Any, *flags: str) -> tuple[float, float]:
    """Return how far the logits are apart in the two directions."""
    theirs = randomized(T.AutoModelForCausalLM.from_config(config), 11)
    theirs.save_pretrained(folder / "hf", max_shard_size="20KB")
    (folder / "job.toml").write_text('[megatron]\ntransformer_impl = "local"\n')
    reshard(folder / "hf", folder / "ranks", "--to", "torch", "--mapping", mapping, "--args-from",
            str(folder / "job.toml"), "--tp", "2", "--pp", "2", *flags)  # fmt: skip
    reshard(folder / "ranks", folder / "mg", "--to", "torch_dist", "--tp", "1", "--pp", "1",
            "--ep", "1", "--etp", "1")  # fmt: skip
    command("verify", folder / "hf", folder / "mg", "--mapping", mapping)
    ours, arguments = loaded(folder / "mg")
    there = apart(ours, theirs)
    randomized(ours, 12)
    saved = folder / "saved" / "iter_0000005"
    saved.mkdir(parents=True)
    common = {"args": arguments, "iteration": 5, "checkpoint_version": 3.0}
    dist_checkpointing.save({"model": ours.sharded_state_dict(), **common}, str(saved))
    reshard(saved, folder / "back", "--to", "safetensors", "--mapping", mapping)
    found, info = T.AutoModelForCausalLM.from_pretrained(
        folder / "back", output_loading_info=True, attn_implementation="eager"
    )
    # Where CUDA is emulated, its loader leaves buffers that no file has without values.
    again = T.AutoModelForCausalLM.from_config(found.config, attn_implementation="eager")
    again.load_state_dict(found.state_dict())
    assert again.config.model_type == config.model_type, again.config.model_type
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    return there, apart(ours, again)


RENAMED = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output",
    "model.": "", "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
"""torchtitan's names of Llama's modules."""


def torchtitan(folder: Path) -> tuple[float, float]:
    """Return how far Llama's logits are apart by torchtitan's names of its weights, and how far
    these are when they come back."""
    theirs = randomized(T.AutoModelForCausalLM.from_config(MODELS["llama"][1]), 11)
    weights = {}
    for name, weight in theirs.state_dict().items():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        if name.endswith(("wq.weight", "wk.weight")):
            # Neighbours turn there, halves of a head here.
            weight = weight.reshape(-1, 2, 4, 32).transpose(1, 2).reshape(weight.shape)
        weights[name] = weight.contiguous()
    (folder / "titan").mkdir(parents=True)
    save_file(weights, folder / "titan" / "model.safetensors")
    (folder / "job.toml").write_text(
        "[megatron]\nnum_attention_heads = 4\nnorm_epsilon = 1e-3\nrotary_base = 500\n"
    )
    flags = "--mapping", "torchtitan", "--args-from", str(folder / "job.toml")
    reshard(folder / "titan", folder / "mg", "--to", "torch_dist", *flags)
    reshard(folder / "mg", folder / "back", "--to", "safetensors", "--mapping", "torchtitan")
    back = load_file(folder / "back" / "model.safetensors")
    far = max(float((back[name] - weights[name]).abs().max()) for name in weights)
    return apart(loaded(folder / "mg")[0], theirs), far


def main(directory: str, names: list[str]) -> None:
    folder = Path(directory)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(1)
    print(json.dumps({
        name: torchtitan(folder / name) if name == "torchtitan"
        else there_and_back(folder / name, *MODELS[name], *SIZES.get(name, ()))
        for name in names or [*MODELS, "torchtitan"]
    }))  # fmt: skip
