"""What megatron-core itself says of layouts: ``python -m support.training.judged_layouts`` reads a
JSON list of layouts from standard input and prints, for each, null where a job of it is set up,
else what was raised.

A fake process group stands for the other ranks: no collective is run.
"""

# CPU emulation has to start before megatron is imported.
# ruff: noqa: E402

import json
import logging
import sys
import warnings

from scalai.patches.megatron import cpu_emulation

warnings.filterwarnings("ignore")  # megatron's own, about what a CPU machine lacks
logging.getLogger("megatron").setLevel(logging.ERROR)
cpu_emulation.install()

import torch.distributed as dist
from megatron.core import num_microbatches_calculator as microbatches
from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

Layout = dict[str, int]


def judge(layout: Layout) -> str | None:
    """Return what stops a job of this layout; None: nothing does.

    The steps of Megatron-LM's start: ranks are grouped, micro-batches counted, the model is
    configured and its layers dealt out. What is checked in layers, in the parser of Megatron-LM and
    in the schedule, none of which runs here, is stated by its file.
    """
    tp, pp, dp, vpp, ep = (layout[name] for name in ("tp", "pp", "dp", "vpp", "ep"))
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
            add_bias_linear=not experts, pipeline_dtype=None if pp == 1 else _dtype(),
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
    return None


def _dtype() -> object:
    import torch

    return torch.bfloat16


def main() -> None:
    layouts: list[Layout] = json.load(sys.stdin)
    said: list[str | None] = [None] * len(layouts)
    for world in sorted({layout["world"] for layout in layouts}):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        for number, layout in enumerate(layouts):
            if layout["world"] == world:
                said[number] = judge(layout)
        dist.destroy_process_group()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
