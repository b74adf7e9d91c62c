"""What megatron-core itself says of layouts, and has of a GPT in memory, in layouts of any number
of ranks: ``python -m support.training.megatron_answers`` reads a JSON list of cases from standard
input and prints, for each:

* ``layout``: null where a job of it is set up, else what was raised;
* ``layers``: the bytes of weights, gradients and optimizer on the first rank and on the last;
* else: the bytes that autograd keeps of a layer, the half of the difference between models of four
  layers and of two.

A fake process group stands for the other ranks: collectives give this rank's own numbers, which are
those of the others where tokens are spread evenly.
"""

# CPU emulation has to start before megatron is imported.
# ruff: noqa: E402

import json
import logging
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from scalai.patches.megatron import cpu_emulation

warnings.filterwarnings("ignore")  # megatron's own, about what a CPU machine lacks
logging.getLogger("megatron").setLevel(logging.ERROR)
cpu_emulation.install()

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator as microbatches
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from support.training.fake_group import stand_as

torch.set_num_threads(1)
HIDDEN, HEADS, MICRO_BATCH = 128, 4, 2
Case = dict[str, Any]
"""Degrees, ``seq`` and ``vocabulary``, how many layers have experts, and what
``TransformerConfig`` is given beside."""


def world_of(case: Case) -> int:
    return int(case.get("tp", 1) * case.get("pp", 1) * case.get("dp", 1))


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
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    model = GPTModel(
        config, spec, case["vocabulary"], case["seq"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=case.get("is_tied", True),
    )  # fmt: skip
    return model.to(torch.bfloat16)


@contextmanager
def standing_as(case: Case, rank: int) -> Iterator[None]:
    """Stand as a rank among others that a fake process group stands for."""
    tp, pp = case.get("tp", 1), case.get("pp", 1)
    stand_as(rank, world_of(case))
    parallel_state.initialize_model_parallel(
        tp, pp, expert_model_parallel_size=case.get("ep", 1),
        expert_tensor_parallel_size=case.get("etp", tp), create_gloo_process_groups=False,
    )  # fmt: skip
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def state_bytes(case: Case, rank: int) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer on one rank, behind a step."""
    with standing_as(case, rank):
        model = build(case, case["layers"])
        is_sharded = bool(case["is_sharded"])
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=is_sharded, bucket_size=10**9
        )
        wrapped = DistributedDataParallel(model.config, ddp, model)
        config = OptimizerConfig(
            optimizer="adam", lr=0.01, bf16=True, params_dtype=torch.bfloat16,
            use_distributed_optimizer=is_sharded,
        )  # fmt: skip
        optimizer = get_megatron_optimizer(config, [wrapped], use_gloo_process_groups=False)
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
    with standing_as(case, 0):
        model, seq = build(case, layers), case["seq"]
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        kept: weakref.WeakSet[Saved] = weakref.WeakSet()

        def pack(tensor: torch.Tensor) -> Saved:
            saved = Saved(tensor)
            kept.add(saved)
            return saved

        tokens = torch.randint(case["vocabulary"], (MICRO_BATCH, seq))
        mask = torch.triu(torch.ones(seq, seq), 1).bool()[None, None]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            loss = model(tokens, torch.arange(seq)[None], mask, labels=tokens)
        # What a checkpointed layer has saved inside is gone by now.
        storages = [saved.tensor.untyped_storage() for saved in kept]
        sizes = {one.data_ptr(): one.nbytes() for one in storages if one.data_ptr() not in own}
        del loss
        return sum(sizes.values())


def judge(layout: dict[str, int]) -> str | None:
    """Return what stops a job of this layout; None: nothing does.

    The steps of Megatron-LM's start: ranks are grouped, micro-batches counted, the model is
    configured and its layers dealt out. What is checked in layers, in the parser of Megatron-LM and
    in the schedule, none of which runs here, is stated by its file.
    """
    tp, pp, dp, vpp, ep = (layout[name] for name in ("tp", "pp", "dp", "vpp", "ep"))
    stand_as(0, layout["world"])
    try:
        parallel_state.initialize_model_parallel(
            tp, pp, virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            context_parallel_size=layout["cp"], expert_model_parallel_size=ep,
            create_gloo_process_groups=False,
        )  # fmt: skip
        microbatches.init_num_microbatches_calculator(
            0, None, layout["batch"], layout["micro_batch"], dp
        )
        experts = layout["experts"] or None
        config = TransformerConfig(
            num_layers=layout["layers"], hidden_size=layout["heads"] * 16,
            num_attention_heads=layout["heads"], num_query_groups=layout["groups"],
            num_moe_experts=experts, moe_router_topk=2, tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp, context_parallel_size=layout["cp"],
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            expert_model_parallel_size=ep, sequence_parallel=bool(experts) and tp > 1,
            moe_token_dispatcher_type="alltoall" if experts else "allgather",
            add_bias_linear=not experts, pipeline_dtype=None if pp == 1 else torch.bfloat16,
            bias_activation_fusion=False,
        )  # fmt: skip
        get_num_layers_to_build(config)
        if experts:
            assert experts % ep == 0, "moe_layer.py: experts % ep"
        if layout["cp"] > 1:
            assert layout["seq"] % (2 * layout["cp"]) == 0, "arguments.py: seq % (2 * cp)"
        count = microbatches.get_num_microbatches()
        if vpp > 1:
            # schedules.py, forward_backward_pipelining_with_interleaving
            # With groups of pp micro-batches, the default; a rest of pp or more there is none.
            assert pp <= count, "schedules.py: group above micro-batches"
            assert count % pp == 0, "schedules.py: micro-batches % pp"
    except (AssertionError, RuntimeError, ValueError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        parallel_state.destroy_model_parallel()
        microbatches.destroy_num_microbatches_calculator()
        dist.destroy_process_group()
    return None


def answer(case: Case) -> Any:
    if "layout" in case:
        return judge(case["layout"])
    if "layers" in case:
        return [state_bytes(case, rank) for rank in (0, world_of(case) - 1)]
    moe = case["config"].get("num_moe_experts")
    both = [kept_bytes({**case, "moe_layers": n if moe else 0}, n) for n in (4, 2)]
    return (both[0] - both[1]) / 2


if __name__ == "__main__":
    print(json.dumps([answer(case) for case in json.load(sys.stdin)]))
