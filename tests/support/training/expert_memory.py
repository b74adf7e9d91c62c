"""How many bytes a GPT with experts takes on megatron-core, in layouts of any number of ranks.

``python -m support.training.expert_memory`` reads a JSON list of cases from standard input and
prints a JSON list of what each takes. A fake process group stands for the other ranks: collectives
give this rank's own numbers, which are those of the others where tokens are spread evenly.
"""

# CPU emulation has to start before megatron is imported.
# ruff: noqa: E402

import json
import logging
import sys
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

from scalai.patches.megatron import cpu_emulation

warnings.filterwarnings("ignore")  # megatron's own, about what a CPU machine lacks
logging.getLogger("megatron").setLevel(logging.ERROR)
cpu_emulation.install()

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

torch.set_num_threads(1)
HIDDEN, HEADS, SEQ, MICRO_BATCH, VOCABULARY = 128, 4, 128, 2, 512
Case = dict[str, Any]
"""Degrees, how many layers have experts, and what ``TransformerConfig`` is given beside."""


def build(case: Case, layers: int) -> GPTModel:
    """Return what this rank has of a model in bf16, its last layers with experts."""
    tp, pp = case.get("tp", 1), case.get("pp", 1)
    pattern = [0] * (layers - case["moe_layers"]) + [1] * case["moe_layers"]
    is_gated = case["config"].get("gated_linear_unit", False)
    config = TransformerConfig(
        num_layers=layers, hidden_size=HIDDEN, num_attention_heads=HEADS,
        **{
            "ffn_hidden_size": 4 * HIDDEN, "bf16": True, "params_dtype": torch.bfloat16,
            "hidden_dropout": 0.0, "attention_dropout": 0.0, "attention_softmax_in_fp32": False,
            "masked_softmax_fusion": False, "bias_dropout_fusion": False,
            "bias_activation_fusion": False, "use_cpu_initialization": True,
            "gradient_accumulation_fusion": False, "moe_token_dispatcher_type": "alltoall",
            "moe_router_force_load_balancing": True, "moe_router_load_balancing_type": "none",
            "add_bias_linear": False, "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp, "pipeline_dtype": torch.bfloat16,
            "sequence_parallel": tp > 1, "expert_model_parallel_size": case.get("ep", 1),
            "expert_tensor_parallel_size": case.get("etp", tp), "moe_layer_freq": pattern,
            "activation_func": getattr(torch.nn.functional, "silu" if is_gated else "gelu"),
            **case["config"],
        },
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_decoder_block_spec(config, use_transformer_engine=False), VOCABULARY, SEQ,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=case.get("is_tied", True),
    )  # fmt: skip
    return model.to(torch.bfloat16)


class Ranks:
    """A fake group in which this process is one rank after another."""

    def __init__(self, case: Case, rank: int) -> None:
        tp, pp = case.get("tp", 1), case.get("pp", 1)
        world = tp * pp * case.get("dp", 1)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        parallel_state.initialize_model_parallel(
            tp, pp, expert_model_parallel_size=case.get("ep", 1),
            expert_tensor_parallel_size=case.get("etp", tp), create_gloo_process_groups=False,
        )  # fmt: skip
        model_parallel_cuda_manual_seed(1)

    def __enter__(self) -> None:
        torch.manual_seed(1)

    def __exit__(self, *_: object) -> None:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def state_bytes(case: Case, rank: int) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer on one rank, behind a step."""
    with Ranks(case, rank):
        model = build(case, case["layers"])
        is_sharded = bool(case["is_sharded"])
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=is_sharded, bucket_size=10**9
        )
        wrapped = DistributedDataParallel(model.config, ddp, model)
        optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=0.01, bf16=True, params_dtype=torch.bfloat16,
                            use_distributed_optimizer=is_sharded),
            [wrapped], use_gloo_process_groups=False,
        )  # fmt: skip
        optimizer.step()
        parameters = list(model.parameters())
        return {
            "weights": sum(one.numel() * one.element_size() for one in parameters),
            "gradients": sum(one.main_grad.nbytes for one in parameters),
            "optimizer": sum(one.nbytes for one in optimizer_tensors(optimizer)),
        }


def optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield masters and moments."""
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in each.optimizer.param_groups:
            for master in group["params"]:
                yield master
                state = each.optimizer.state[master]
                yield from (value for key, value in state.items() if key != "step")


class Saved:
    """A tensor for as long as autograd keeps it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def kept_bytes(case: Case, layers: int) -> int:
    """Return the bytes of all storages that a forward pass keeps, but for parameters."""
    with Ranks(case, 0):
        model = build(case, layers)
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
        storages = {saved.tensor.untyped_storage().data_ptr(): saved.tensor for saved in kept}
        sizes = {
            at: one.untyped_storage().nbytes() for at, one in storages.items() if at not in own
        }
        del loss
        return sum(sizes.values())


def main() -> None:
    said: list[Any] = []
    for case in json.load(sys.stdin):
        if "layers" in case:
            world = case.get("tp", 1) * case.get("pp", 1) * case.get("dp", 1)
            said.append([state_bytes(case, rank) for rank in (0, world - 1)])
        else:
            both = [kept_bytes({**case, "moe_layers": n}, n) for n in (4, 2)]
            said.append((both[0] - both[1]) / 2)
    print(json.dumps(said))


if __name__ == "__main__":
    main()
