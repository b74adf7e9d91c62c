"""Computes with megatron-core what a converted model of Hugging Face's computes there,
and back. ``main`` prints by name how far the logits are apart in both directions.

There: ``FOLDER/<name>/hf`` goes through the files of several ranks to ``torch_dist``, and
megatron-core's model is built by the arguments in it. Back: megatron-core saves other weights, and
the class that the written ``config.json`` names loads them.
"""

import argparse
import json
import math
import subprocess
import sys
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
from megatron.core.tensor_parallel.mappings import (  # noqa: E402
    gather_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import (  # noqa: E402
    MLATransformerConfig,
    TransformerConfig,
)
from safetensors.torch import load_file, save_file  # noqa: E402
from torch.nn import functional  # noqa: E402

from scalai.launch import cli  # noqa: E402
from support.training import latent_core  # noqa: E402

latent_core.install()

T: Any = transformers
ALIKE = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 16, "attn_implementation": "eager", "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = {**ALIKE, "intermediate_size": 72, "num_key_value_heads": 2, "rms_norm_eps": 1e-3}
NEOX = {**ALIKE, "intermediate_size": 128, "use_parallel_residual": False, "layer_norm_eps": 1e-3}
TIED = {**LLAMA, "tie_word_embeddings": True}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    **ALIKE, **EXPERTS, "num_hidden_layers": 4, "intermediate_size": 72, "kv_lora_rank": 12,
    "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14, "first_k_dense_replace": 1,
    "n_routed_experts": 8, "rms_norm_eps": 1e-6, "num_key_value_heads": 4,
}  # fmt: skip
"""DeepSeek's sizes, all different."""


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
    "deepseek_v2": ("deepseek_v2", T.DeepseekV2Config(
        **LATENT, q_lora_rank=None, n_shared_experts=2, topk_method="greedy",
        routed_scaling_factor=1.0, **_rope(500.0))),
    "deepseek_v2_groups": ("deepseek_v2", T.DeepseekV2Config(
        **LATENT, q_lora_rank=20, n_shared_experts=1, topk_method="group_limited_greedy",
        n_group=4, topk_group=2, routed_scaling_factor=1.5,
        **_rope(1e4, "yarn", factor=4.0, original_max_position_embeddings=4096))),
    "deepseek_v3": ("deepseek_v3", T.DeepseekV3Config(
        **LATENT, q_lora_rank=20, n_shared_experts=1, n_group=4, topk_group=1,
        routed_scaling_factor=1.25,
        **_rope(1e4, "yarn", factor=40.0, mscale=0.9, mscale_all_dim=0.8,
                original_max_position_embeddings=4096, beta_fast=32, beta_slow=1))),
    "gemma": ("gemma", T.GemmaConfig(**TIED, head_dim=16)),
    "partial": ("gpt_neox", T.GPTNeoXConfig(**NEOX, rotary_pct=0.25, rotary_emb_base=100)),
    "tanh": ("gpt", T.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16,
        attn_implementation="eager")),
}  # fmt: skip
SIZES = {name: ["--ep", "4" if name == "qwen3_moe" else "2"] for name in MODELS if "deepseek" in
         name or name in ("mixtral", "qwen2_moe", "qwen3_moe")}  # fmt: skip


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
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.randn_like(buffer) * 0.15)
    return model.eval()


def built(a: argparse.Namespace) -> Any:
    """Return Megatron's model, as `pretrain_gpt.py` makes it of these arguments (0.16.1)."""
    is_tanh = getattr(a, "bias_gelu_fusion", True)
    is_gemma = getattr(a, "apply_layernorm_1p", False)
    experts = {} if not a.num_experts else {
        "num_moe_experts": a.num_experts, "moe_ffn_hidden_size": a.moe_ffn_hidden_size,
        "moe_router_topk": a.moe_router_topk,
        "moe_router_pre_softmax": getattr(a, "moe_router_pre_softmax", False),
        "moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "alltoall",
        "moe_shared_expert_intermediate_size": a.moe_shared_expert_intermediate_size,
        "moe_shared_expert_gate": a.moe_shared_expert_gate, "moe_layer_freq": a.moe_layer_freq,
    }  # fmt: skip
    latent = {} if not getattr(a, "multi_latent_attention", False) else {
        name: getattr(a, name) for name in (
            "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
            "rope_type", "rotary_base", "rotary_scaling_factor", "mscale", "mscale_all_dim",
        ) if hasattr(a, name)
    }  # fmt: skip
    if latent:
        experts |= {
            name: getattr(a, name) for name in (
                "moe_router_score_function", "moe_router_enable_expert_bias",
                "moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk",
            )
        }  # fmt: skip
    config = (MLATransformerConfig if latent else TransformerConfig)(
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
        rotary_interleaved=getattr(a, "rotary_interleaved", False), **experts, **latent,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
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


def logits_of(ours: Any) -> torch.Tensor:
    positions = torch.arange(12)[None].expand(3, -1)
    later = torch.triu(torch.ones(12, 12), 1).bool()[None, None]
    with torch.no_grad():
        found: torch.Tensor = gather_from_tensor_model_parallel_region(
            ours(TOKENS, positions, later)
        )
    return found


def apart(ours: Any, theirs: Any) -> float:
    with torch.no_grad():
        found = logits_of(ours) - theirs.eval()(TOKENS).logits
    return float(found.abs().max())


def on_two_ranks(folder: Path, mapping: str) -> float:
    """Return how far the logits are apart at TP2; the ranks' own save goes back too."""
    code = "import sys; from support.configured_logits import rank; rank(*sys.argv[1:])"
    ranks = [subprocess.Popen([sys.executable, "-c", code, str(folder), n]) for n in "01"]
    assert [one.wait(timeout=200) for one in ranks] == [0, 0]
    reshard(
        folder / "saved2" / SAVED, folder / "back2", "--to", "safetensors", "--mapping", mapping
    )
    command("verify", folder / "back", folder / "back2")
    return max(float((folder / f"apart{n}").read_text()) for n in "01")


def rank(directory: str, number: str) -> None:
    """Compute one rank's part at TP2."""
    folder = Path(directory)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=int(number), world_size=2)
    parallel_state.initialize_model_parallel(2, 1)
    model_parallel_cuda_manual_seed(1)
    found = logits_of(loaded(folder / "ranks")[0]) - torch.load(folder / "logits.pt")
    (folder / f"apart{number}").write_text(str(float(found.abs().max())))
    save(*loaded(folder / "saved"), folder / "saved2" / SAVED)
    dist.destroy_process_group()


SAVED = "iter_0000005"


def save(model: Any, arguments: argparse.Namespace, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    common = {"args": arguments, "iteration": 5, "checkpoint_version": 3.0}
    dist_checkpointing.save({"model": model.sharded_state_dict(), **common}, str(directory))


def there_and_back(folder: Path, mapping: str, config: Any, *flags: str) -> tuple[float, float]:
    """Return how far the logits are apart in the two directions."""
    theirs = randomized(T.AutoModelForCausalLM.from_config(config), 11)
    theirs.save_pretrained(folder / "hf", max_shard_size="20KB")
    (folder / "job.toml").write_text('[megatron]\ntransformer_impl = "local"\n')
    # Legacy files do not say how the ranks cut latent attention.
    layout = "torch_dist" if mapping.startswith("deepseek") else "torch"
    reshard(folder / "hf", folder / "ranks", "--to", layout, "--mapping", mapping, "--args-from",
            str(folder / "job.toml"), "--tp", "2", "--pp", "2", *flags)  # fmt: skip
    reshard(folder / "ranks", folder / "mg", "--to", "torch_dist", "--tp", "1", "--pp", "1",
            "--ep", "1", "--etp", "1")  # fmt: skip
    command("verify", folder / "hf", folder / "mg", "--mapping", mapping)
    ours, arguments = loaded(folder / "mg")
    there = apart(ours, theirs)
    torch.save(theirs(TOKENS).logits.detach(), folder / "logits.pt")
    saved = folder / "saved" / SAVED
    save(randomized(ours, 12), arguments, saved)
    reshard(saved, folder / "back", "--to", "safetensors", "--mapping", mapping)
    found, info = T.AutoModelForCausalLM.from_pretrained(
        folder / "back", output_loading_info=True, attn_implementation="eager"
    )
    # Where CUDA is emulated, its loader leaves buffers that no file has without values.
    again = T.AutoModelForCausalLM.from_config(found.config, attn_implementation="eager")
    again.load_state_dict(found.state_dict())
    assert again.config.model_type == config.model_type, again.config.model_type
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    if mapping.startswith("deepseek"):
        there = max(there, on_two_ranks(folder, mapping))
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
