"""What is written for Hugging Face is loaded by its own classes, and computes what it did."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scalai.converters.between.adapting import TargetRequest, adapted
from scalai.converters.between.mapping import find_mapping, read_mapping
from support.checkpoints import carry, state
from support.needed import need
from support.training.hugging_models import Gpt2, Llama, samples
from support.training.jobs import Job

need("transformers", "pip install transformers")
ARGUMENTS = {"num_attention_heads": 4}
QWEN = Job(is_rotary=True, is_gated=True, query_groups=2, has_qkv_bias=True)
LLAMA = replace(QWEN, has_qkv_bias=False, is_tied=False)


def shapes_of(job: Job) -> dict[str, tuple[int, ...]]:
    """Return the shapes of Megatron's parameters."""
    hidden, rows = job.hidden, job.hidden + 2 * (job.query_groups or job.heads) * 8
    layer = {
        "self_attention.linear_qkv.weight": (rows, hidden),
        "self_attention.linear_proj.weight": (hidden, hidden),
        "mlp.linear_fc1.weight": (4 * hidden * (1 + job.is_gated), hidden),
        "mlp.linear_fc2.weight": (hidden, 4 * hidden),
        "self_attention.linear_qkv.layer_norm_weight": (hidden,),
        "mlp.linear_fc1.layer_norm_weight": (hidden,),
    }
    if job.has_qkv_bias or not job.is_rotary:
        layer["self_attention.linear_qkv.bias"] = (rows,)
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (job.padded_vocabulary, hidden)
    }
    norms = ["weight"]
    if not job.is_rotary:
        norms.append("bias")
        layer["self_attention.linear_proj.bias"] = layer["mlp.linear_fc2.bias"] = (hidden,)
        layer["mlp.linear_fc1.bias"] = (4 * hidden,)
        layer["self_attention.linear_qkv.layer_norm_bias"] = (hidden,)
        layer["mlp.linear_fc1.layer_norm_bias"] = (hidden,)
        shapes["embedding.position_embeddings.weight"] = (job.sequence, hidden)
    for number in range(job.layers):
        shapes |= {f"decoder.layers.{number}.{name}": shape for name, shape in layer.items()}
    shapes |= {f"decoder.final_layernorm.{name}": (hidden,) for name in norms}
    return shapes if job.is_tied else {**shapes, "output_layer.weight": shapes[next(iter(shapes))]}


def config_of(job: Job) -> Any:
    import transformers

    common = {
        "vocab_size": job.padded_vocabulary,
        "tie_word_embeddings": job.is_tied,
        "attn_implementation": "eager",
    }
    if not job.is_rotary:
        return transformers.GPT2Config(
            n_embd=job.hidden, n_head=job.heads, n_layer=job.layers, n_positions=job.sequence,
            activation_function="gelu", **common,
        )  # fmt: skip
    kind = transformers.Qwen2Config if job.has_qkv_bias else transformers.LlamaConfig
    return kind(
        hidden_size=job.hidden, intermediate_size=4 * job.hidden, num_hidden_layers=job.layers,
        num_attention_heads=job.heads, num_key_value_heads=job.query_groups, rms_norm_eps=1e-5,
        max_position_embeddings=job.sequence, **common,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("names", "job"), [("gpt", Job()), ("llama", LLAMA), ("llama", QWEN)],
    ids=["gpt2", "llama", "qwen2"],
)  # fmt: skip
def test_its_own_class_loads_and_computes_the_same(tmp_path: Path, names: str, job: Job) -> None:
    import torch
    import transformers
    from safetensors.torch import load_file

    source = state(shapes=shapes_of(job))
    arguments = {
        "num_attention_heads": job.heads,
        "num_query_groups": job.query_groups,
        "group_query_attention": job.query_groups is not None,
    }
    source = replace(source, values=replace(source.values, arguments=arguments))
    mapping = read_mapping(find_mapping(names))
    weights, _ = adapted(source, TargetRequest("safetensors", mapping))
    carry(weights, tmp_path / "weights", "safetensors")
    config = config_of(job)
    config.save_pretrained(tmp_path / "weights")
    kind = {
        "gpt2": transformers.GPT2LMHeadModel,
        "llama": transformers.LlamaForCausalLM,
        "qwen2": transformers.Qwen2ForCausalLM,
    }[config.model_type]
    theirs, info = kind.from_pretrained(tmp_path / "weights", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    ours = (Llama if job.is_rotary else Gpt2)(job)
    tensors = load_file(tmp_path / "weights" / "model.safetensors")
    missing, unexpected = ours.load_state_dict(tensors, strict=False)
    parameters = [name for name in missing if "inv_freq" not in name]
    assert parameters == (["lm_head.weight"] if job.is_tied else []) and not unexpected
    tokens, labels = samples(job, 0)
    with torch.no_grad():
        expected, found = float(ours(tokens, labels)), theirs(tokens).logits
    loss = torch.nn.functional.cross_entropy(found.flatten(0, 1), labels.flatten())
    np.testing.assert_allclose(float(loss), expected, rtol=1e-5)


def test_megatron_and_the_class_compute_the_same_with_experts(tmp_path: Path) -> None:
    """Qwen2 MoE has a shared expert with a gate too, and biases of queries, keys and values."""
    _check_logits(tmp_path, "qwen2_moe")


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_megatron_and_all_classes_compute_the_same(tmp_path: Path) -> None:
    """With other norms' epsilons, bases, scaled and partial rotary positions, GELU by tanh, wide
    heads, norms of queries and keys, tied heads, experts in some layers, scaled embeddings, latent
    attention on one and two ranks, and torchtitan's names."""
    assert len(_check_logits(tmp_path)) == 16


def _check_logits(folder: Path, *names: str) -> dict[str, list[float]]:
    """Convert models of Hugging Face's to files of TP2·PP2, of EP too, and Megatron's back."""
    # Not by -m: processes that Megatron's save starts would import it all again.
    code = f"from support.configured_logits import main; main({str(folder)!r}, {list(names)})"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True,
        cwd=Path(__file__).parents[1], timeout=550,
    )  # fmt: skip
    assert not run.returncode, run.stderr
    apart: dict[str, list[float]] = json.loads(run.stdout.splitlines()[-1])
    assert max(max(both) for both in apart.values()) < 1e-5, apart
    return apart
