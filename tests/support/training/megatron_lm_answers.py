"""What a Megatron-LM checkout itself says: ``python -m support.training.megatron_lm_answers
CHECKOUT`` reads a JSON list from standard input and prints, for each:

* of [ranks, flags, rows of the embedding] null where a job of it begins its steps with all layers
  and these rows, else what stops it;
* of [sampler, samples of an epoch, consumed samples, global batch, micro-batch, DP] the first
  global batches that its own samplers make, sorted.

The steps of Megatron-LM's own start run on a fake process group, which stands for the other ranks:
flags are parsed and validated, ranks grouped, micro-batches counted, the model built on the meta
device, and its schedule called up to the first forward pass. No collective is run.
"""

# CPU emulation has to start before megatron is imported.
# ruff: noqa: E402

import argparse
import contextlib
import copy
import importlib.util
import inspect
import io
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any
from unittest import mock

CHECKOUT = sys.argv[1]
sys.path.insert(0, CHECKOUT)

from scalai.patches.megatron import cpu_emulation, shares

warnings.filterwarnings("ignore")  # megatron's own, about what a CPU machine lacks
logging.disable(logging.ERROR)
cpu_emulation.install_training()
shares.install()
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}

import torch
import torch.distributed as dist
import wrapt
from megatron.core import num_microbatches_calculator as microbatches
from megatron.core import parallel_state
from megatron.core.models.common.language_module import language_module
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.training import arguments

from support.training.fake_group import stand_as

try:
    from megatron.training.argument_utils import core_transformer_config_from_args
except ImportError:
    from megatron.training.arguments import core_transformer_config_from_args

PARSER = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
"""It takes longer to build than all that a case needs."""
arguments.add_megatron_arguments = lambda parser: PARSER

wrapt.wrap_function_wrapper(arguments, "validate_args", shares.check_args)

VOCABULARY = 128
"""Rows before padding."""
RAMP_SAMPLES = 240
"""Batches have their final size from here on."""
BATCHES = 5
"""Global batches that samplers are asked for."""


class FirstPassError(Exception):
    """The schedule has called the first forward pass."""


def judge(flags: list[str], world: int, rows: int) -> str | None:
    """Return what stops a job with these flags on ``world`` ranks; None: nothing does."""
    sys.argv = ["pretrain_gpt.py", *flags]
    os.environ["WORLD_SIZE"] = str(world)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            args = copy.deepcopy(arguments.parse_args())  # defaults are changed in place
            arguments.validate_args(args)
            _group(args)
            _count(args)
            chunks = _build(args, rows)
            _split_sequences(args)
            _steps(args, chunks)
        return None
    except SystemExit:
        return f"SystemExit: {said.getvalue().strip().splitlines()[-1]}"
    except Exception as error:  # whatever a start may raise is the answer
        assert error.__traceback__ is not None
        where = inspect.getinnerframes(error.__traceback__)[-1]
        first = (str(error).splitlines() or [""])[0]
        return (
            f"{type(error).__name__} ({os.path.basename(where.filename)}:{where.lineno}): {first}"
        )
    finally:
        parallel_state.destroy_model_parallel()
        microbatches.destroy_num_microbatches_calculator()


def _split_sequences(args: Any) -> None:
    """Split the sequences of a rank as the embedding does."""
    length = args.seq_length // args.context_parallel_size
    if args.sequence_parallel:
        with torch.no_grad():
            scatter_to_sequence_parallel_region(torch.empty(length, 1, 2, device="meta"))


def _steps(args: Any, chunks: list[torch.nn.Module]) -> None:
    """Begin the steps of the first samples as ``training.py`` does, each global batch once."""
    consumed, seen = 0, set()
    while consumed <= RAMP_SAMPLES:
        microbatches.update_num_microbatches(consumed, consistency_check=True)
        batch = int(microbatches.get_current_global_batch_size())
        if batch not in seen:
            seen.add(batch)
            _first_pass(args, chunks, int(microbatches.get_num_microbatches()))
        consumed += batch
    evaluated = getattr(args, "eval_global_batch_size", None)
    if evaluated:
        once = args.eval_micro_batch_size * args.data_parallel_size
        _first_pass(args, chunks, -(-evaluated // once), forward_only=True)


def _called(function: Any, **values: Any) -> Any:
    """Call a function with those values that this release's has."""
    known = inspect.signature(function).parameters
    return function(**{name: value for name, value in values.items() if name in known})


def _group(args: Any) -> None:
    """As ``initialize.py`` does."""
    _called(
        parallel_state.initialize_model_parallel,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1)


def _count(args: Any) -> None:
    """As ``global_vars.py`` does."""
    _called(
        microbatches.init_num_microbatches_calculator,
        rank=0, rampup_batch_size=args.rampup_batch_size,
        global_batch_size=args.global_batch_size, micro_batch_size=args.micro_batch_size,
        data_parallel_size=args.data_parallel_size,
        decrease_batch_size_if_needed=args.decrease_batch_size_if_needed,
        step_batch_size_schedule=getattr(args, "step_batch_size_schedule", None),
        seq_length=args.seq_length,
    )  # fmt: skip


def _build(args: Any, expected_rows: int) -> list[torch.nn.Module]:
    """Build the first rank's chunks of the model as pretrain_gpt.py does, without memory."""
    rows = getattr(args, "padded_vocab_size", None)
    if rows is None:
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        rows = -(-VOCABULARY // multiple) * multiple
    if rows != expected_rows:
        raise RuntimeError(f"{rows} rows of the vocabulary, where the job has {expected_rows}")
    if args.num_attention_heads % (args.num_query_groups or 1):
        raise RuntimeError("attention.py: no view of queries, keys and values by group")
    config = core_transformer_config_from_args(args)
    config.use_cpu_initialization, config.perform_initialization = True, False
    # Only Transformer Engine's attention, which needs CUDA, splits sequences.
    config.context_parallel_size = 1
    layers = [
        [_called(get_num_layers_to_build, config=config, vp_stage=stage) for stage in _stages(args)]
        for _ in _pipeline_ranks(args)
    ]
    is_uneven = args.decoder_first_pipeline_num_layers or args.decoder_last_pipeline_num_layers
    least, total = min(map(min, layers)), sum(map(sum, layers))
    if total != args.num_layers or (is_uneven and least < 1):
        raise RuntimeError(f"stages of {layers} layers, where flags say {args.num_layers}")
    # A stage of the embedding alone says nothing of layers.
    has_layers = [any(stage) for stage in layers].index(True)
    for rank in _pipeline_ranks(args):
        if rank == has_layers:
            with torch.device("meta"), _ends_of_pipeline(rank, len(layers)):
                _chunks(args, config, rows)
    with torch.device("meta"):
        return _chunks(args, config, rows)


def _pipeline_ranks(args: Any) -> Iterator[int]:
    """Stand at each pipeline rank, at last at the first again."""
    for rank in range(args.pipeline_model_parallel_size):
        parallel_state.set_pipeline_model_parallel_rank(rank)
        yield rank
    parallel_state.set_pipeline_model_parallel_rank(0)


@contextlib.contextmanager
def _ends_of_pipeline(rank: int, ranks: int) -> Iterator[None]:
    """Have a model ask for its place by the pipeline rank that is stood at: the fake group always
    is at the first."""
    places = {"is_pp_first_stage": rank == 0, "is_pp_last_stage": rank == ranks - 1}
    with contextlib.ExitStack() as stack:
        for name, is_there in places.items():
            if hasattr(language_module, name):
                found = mock.patch.object(language_module, name, lambda _, so=is_there: so)
                stack.enter_context(found)
        yield


def _stages(args: Any) -> Iterator[int | None]:
    """Stand at each virtual stage."""
    count = args.virtual_pipeline_model_parallel_size or 1
    for stage in range(count):
        if count > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
        yield stage if count > 1 else None


def _chunks(args: Any, config: Any, rows: int) -> list[torch.nn.Module]:
    chunks: list[torch.nn.Module] = []
    for stage in _stages(args):
        spec = _called(
            get_gpt_decoder_block_spec, config=config, use_transformer_engine=False,
            normalization=args.normalization, qk_l2_norm=False, vp_stage=stage,
        )  # fmt: skip
        of = {"ignore_virtual": False, "vp_stage": stage}
        model = _called(
            GPTModel, config=config, transformer_layer_spec=spec, vocab_size=rows,
            max_sequence_length=args.max_position_embeddings, vp_stage=stage,
            pre_process=_called(parallel_state.is_pipeline_first_stage, **of),
            post_process=_called(parallel_state.is_pipeline_last_stage, **of),
            position_embedding_type=args.position_embedding_type,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        )  # fmt: skip
        chunks.append(model)
    return chunks


def _first_pass(
    args: Any, chunks: list[torch.nn.Module], count: int, *, forward_only: bool = False
) -> None:
    """Call the schedule of a step up to its first forward pass."""

    def forward(*_: Any, **__: Any) -> None:
        raise FirstPassError

    for chunk in chunks:
        chunk.config.overlap_p2p_comm = args.overlap_p2p_comm  # type: ignore[union-attr]
        chunk.config.batch_p2p_comm = not args.overlap_p2p_comm  # type: ignore[union-attr]
    with contextlib.suppress(FirstPassError):
        get_forward_backward_func()(
            forward_step_func=forward, data_iterator=[iter([])] * len(chunks), model=chunks,
            num_microbatches=count, seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size, decoder_seq_length=args.decoder_seq_length,
            forward_only=forward_only,
        )  # fmt: skip
        raise RuntimeError("the schedule ended without a forward pass")


def batches(
    kind: str, total: int, consumed: int, global_batch: int, micro: int, dp: int
) -> list[list[int]]:
    """Return the samples of the next global batches over all replicas."""
    if importlib.util.find_spec("megatron.training.datasets.data_samplers"):
        from megatron.training.datasets import data_samplers
    else:  # up to 0.14
        from megatron.legacy.data import data_samplers

    count = global_batch // (micro * dp)
    found: list[list[int]] = [[] for _ in range(BATCHES)]
    for rank in range(dp):
        given: dict[str, Any] = {
            "total_samples": total, "consumed_samples": consumed, "micro_batch_size": micro,
            "data_parallel_rank": rank, "data_parallel_size": dp,
        }  # fmt: skip
        if kind == "cyclic":
            sampler = data_samplers.MegatronPretrainingRandomSampler(
                list(range(total)), data_sharding=False, **given
            )
        else:
            sampler = data_samplers.MegatronPretrainingSampler(**given)
        mine = iter(sampler)
        for batch in found:
            for samples in islice(mine, count):
                batch += samples
    return [sorted(batch) for batch in found]


def main() -> None:
    cases: list[Any] = json.load(sys.stdin)
    said: list[Any] = [None] * len(cases)
    for number, case in enumerate(cases):
        if len(case) > 3:
            said[number] = batches(*case)
    for world in sorted({case[0] for case in cases if len(case) == 3}):
        stand_as(0, world)
        for number, case in enumerate(cases):
            if case[0] == world:
                said[number] = judge(case[1], world, case[2])
        dist.destroy_process_group()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
