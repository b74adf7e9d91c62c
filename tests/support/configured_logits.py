"""Computes with megatron-core what a converted model of Hugging Face's computes there, by the
arguments that its checkpoint keeps: ``python -m support.configured_logits FOLDER`` makes
``FOLDER/<name>/hf``, converts it, and prints by name how far the logits are apart."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from scalai.patches.megatron import cpu_emulation

cpu_emulation.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from torch.nn import functional  # noqa: E402

from scalai.launch import cli  # noqa: E402

T: Any = transformers
ALIKE = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 16, "attn_implementation": "eager", "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = {**ALIKE, "intermediate_size": 72, "num_key_value_heads": 2, "rms_norm_eps": 1e-3}
NEOX = {**ALIKE, "intermediate_size": 128, "use_parallel_residual": False, "layer_norm_eps": 1e-3}
MODELS: dict[str, tuple[str, Any]] = {
    "base": ("llama", lambda: T.LlamaForCausalLM(T.LlamaConfig(
        **LLAMA, rope_parameters={"rope_theta": 500.0, "rope_type": "default"}))),
    "linear": ("llama", lambda: T.LlamaForCausalLM(T.LlamaConfig(
        **LLAMA, rope_parameters={"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}))),
    "partial": ("gpt_neox", lambda: T.GPTNeoXForCausalLM(T.GPTNeoXConfig(
        **NEOX, rotary_pct=0.25, rotary_emb_base=100))),
    "tanh": ("gpt", lambda: T.GPT2LMHeadModel(T.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16,
        attn_implementation="eager"))),
}  # fmt: skip


def make(folder: Path, mapping: str, model: Any) -> Path:
    """Save and convert a model; return the iteration's folder."""
    model.save_pretrained(folder / "hf")
    (folder / "job.toml").write_text("[megatron]\nnum_attention_heads = 4\nvocab_size = 64\n")
    try:
        cli.main(["reshard", str(folder / "hf"), str(folder / "mg"), "--to", "torch_dist",
                  "--mapping", mapping, "--args-from", str(folder / "job.toml")])  # fmt: skip
    except SystemExit as ended:
        assert not ended.code, ended.code
    return next((folder / "mg").glob("iter_*"))


def built(a: argparse.Namespace) -> Any:
    """Return Megatron's model, as `pretrain_gpt.py` makes it of these arguments (0.16.1)."""
    is_tanh = getattr(a, "bias_gelu_fusion", True)
    config = TransformerConfig(
        num_layers=a.num_layers, hidden_size=a.hidden_size, kv_channels=a.kv_channels,
        num_attention_heads=a.num_attention_heads, ffn_hidden_size=a.ffn_hidden_size,
        num_query_groups=a.num_query_groups, gated_linear_unit=a.swiglu,
        activation_func=functional.silu if a.swiglu else
        lambda x: functional.gelu(x, approximate="tanh" if is_tanh else "none"),
        add_bias_linear=a.add_bias_linear, normalization=a.normalization,
        layernorm_epsilon=getattr(a, "norm_epsilon", 1e-5), hidden_dropout=0.0,
        attention_dropout=0.0, masked_softmax_fusion=False, bias_dropout_fusion=False,
        bias_activation_fusion=False, gradient_accumulation_fusion=False, apply_rope_fusion=False,
    )  # fmt: skip
    return GPTModel(
        config, get_gpt_layer_local_spec(normalization=a.normalization), a.padded_vocab_size, 16,
        position_embedding_type=a.position_embedding_type,
        rotary_percent=getattr(a, "rotary_percent", 1.0),
        rotary_base=getattr(a, "rotary_base", 10000),
        seq_len_interpolation_factor=getattr(a, "rotary_seq_len_interpolation_factor", None),
        share_embeddings_and_output_weights=not a.untie_embeddings_and_output_weights,
    ).eval()  # fmt: skip


def main(folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(1)
    tokens = torch.arange(36).reshape(3, 12) * 7 % 64
    later = torch.triu(torch.ones(12, 12), 1).bool()[None, None]
    found = {}
    for name, (mapping, of) in MODELS.items():
        torch.manual_seed(11)
        theirs = of().eval()
        with torch.no_grad():
            for parameter in theirs.parameters():
                noise = torch.randn_like(parameter) * 0.15
                parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
        iteration = make(folder / name, mapping, theirs)
        ours = built(torch.load(iteration / "common.pt", weights_only=False)["args"])
        state = dist_checkpointing.load({"model": ours.sharded_state_dict()}, str(iteration))
        ours.load_state_dict(state["model"])
        with torch.no_grad():
            logits = ours(tokens, torch.arange(12)[None].expand(3, -1), later)
            found[name] = float((logits - theirs(tokens).logits).abs().max())
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
