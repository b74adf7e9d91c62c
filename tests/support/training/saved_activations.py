"""How many bytes autograd keeps of each layer of a small GPT on megatron-core, one rank.

``python -m support.training.saved_activations`` prints a JSON object: bytes by case. What one layer
keeps is the difference between models of four layers and of two.
"""

# CPU emulation has to start before megatron is imported.
# ruff: noqa: E402

import json
import logging
import tempfile
import warnings
import weakref
from pathlib import Path
from typing import Any

from scalai.patches.megatron import cpu_emulation

warnings.filterwarnings("ignore")  # megatron's own, about what a CPU machine lacks
logging.getLogger("megatron").setLevel(logging.ERROR)
cpu_emulation.install()

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

torch.set_num_threads(1)
HIDDEN, HEADS, SEQ, MICRO_BATCH, VOCABULARY = 128, 4, 64, 2, 256
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "selective": {"recompute_granularity": "selective"},
    "full": {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
    },
    "gated": {
        "num_query_groups": 2, "gated_linear_unit": True, "add_bias_linear": False,
        "ffn_hidden_size": 320, "activation_func": torch.nn.functional.silu,
    },
}  # fmt: skip


class Saved:
    """A tensor for as long as autograd keeps it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def kept_bytes(layers: int, more: dict[str, Any]) -> int:
    """Return the bytes of all storages that a forward pass keeps, but for parameters."""
    config = TransformerConfig(
        num_layers=layers, hidden_size=HIDDEN, num_attention_heads=HEADS,
        **{
            "ffn_hidden_size": 4 * HIDDEN, "bf16": True, "params_dtype": torch.bfloat16,
            "hidden_dropout": 0.0, "attention_dropout": 0.0, "attention_softmax_in_fp32": False,
            "masked_softmax_fusion": False, "bias_dropout_fusion": False,
            "bias_activation_fusion": True, "use_cpu_initialization": True, **more,
        },
    )  # fmt: skip
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, SEQ).to(torch.bfloat16)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: weakref.WeakSet[Saved] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> Saved:
        saved = Saved(tensor)
        kept.add(saved)
        return saved

    tokens = torch.randint(VOCABULARY, (MICRO_BATCH, SEQ))
    mask = torch.triu(torch.ones(SEQ, SEQ), 1).bool()[None, None]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        loss = model(tokens, torch.arange(SEQ)[None], mask, labels=tokens)
    # What a checkpointed layer has saved inside is gone by now.
    storages = [saved.tensor.untyped_storage() for saved in kept]
    sizes = {one.data_ptr(): one.nbytes() for one in storages if one.data_ptr() not in own}
    loss.sum().backward()
    return sum(sizes.values())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel(1, 1)
        model_parallel_cuda_manual_seed(1)
        said = {
            name: (kept_bytes(4, more) - kept_bytes(2, more)) / 2 for name, more in CASES.items()
        }
        dist.destroy_process_group()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
