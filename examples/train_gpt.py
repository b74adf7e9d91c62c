"""A GPT on megatron-core alone, byte by byte, that may change its TP, PP and DP while it trains.

    scalai-run --nproc-per-node 4 --elastic configs/elastic_gpt_tiny.toml \\
      examples/train_gpt.py --steps 60

Everything about elasticity is in ``main``: the context that hands out the degrees, ``attach`` and
``boundary``. Without CUDA call ``cpu_emulation.install()`` before megatron is imported, as here;
with CUDA it does nothing.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

import scalai
from scalai.core.degrees.batches import Batches, combine_hashes, sample_hashes
from scalai.patches.megatron import cpu_emulation

cpu_emulation.install()

from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.num_microbatches_calculator import (  # noqa: E402
    init_num_microbatches_calculator,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

VOCABULARY = 256

Text = npt.NDArray[np.uint8]
Tokens = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="text (default: Python's own documentation)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr-decay-steps", type=int, help="default: as many as --steps")
    parser.add_argument("--global-batch-size", type=int, default=12)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--no-distributed-optimizer", action="store_true")
    parser.add_argument("--metrics", type=Path, help="folder for one JSON line a step")
    return parser.parse_args()


def read_text(path: Path | None) -> Text:
    """Return the bytes of the text, [bytes]."""
    if path is not None:
        return np.frombuffer(path.read_bytes(), dtype=np.uint8)
    from pydoc_data import topics

    return np.frombuffer("\n".join(topics.topics.values()).encode(), dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained, and with what, at the degrees of one round."""

    model: DistributedDataParallel
    optimizer: Any
    scheduler: OptimizerParamScheduler


def build(options: argparse.Namespace, job: scalai.Session) -> Training:
    """Build this rank's part of the model, its optimizer and its learning-rate schedule."""
    config = TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        num_attention_heads=options.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=job.tp,
        pipeline_model_parallel_size=job.pp,
        pipeline_dtype=torch.float32,
        # What needs kernels that a CPU does not have.
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    is_distributed = not options.no_distributed_optimizer
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=is_distributed
        ),
        GPTModel(
            config,
            get_gpt_layer_local_spec(),
            VOCABULARY,
            options.seq_length,
            pre_process=mpu.is_pipeline_first_stage(),
            post_process=mpu.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=True,
        ).cuda(),
    )
    rates = {"lr": options.lr, "min_lr": options.lr / 10}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", clip_grad=1.0, params_dtype=torch.float32,
            use_distributed_optimizer=is_distributed, **rates,
        ),
        [model],
    )  # fmt: skip
    # Counted in samples, which do not depend on the degrees.
    samples = (options.lr_decay_steps or options.steps) * options.global_batch_size
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=options.lr, min_lr=options.lr / 10,
        lr_warmup_steps=samples // 20, lr_decay_steps=samples, lr_decay_style="cosine",
        start_wd=0.01, end_wd=0.01, wd_incr_steps=samples, wd_incr_style="constant",
    )  # fmt: skip
    return Training(model, optimizer, scheduler)


def sample(text: Text, index: int, length: int, seed: int) -> Tokens:
    """Return sample ``index`` of the one global order, [length + 1]."""
    start = np.random.default_rng((seed, index)).integers(0, len(text) - length - 1)
    return text[start : start + length + 1].astype(np.int64)


def micro_batches(
    text: Text, options: argparse.Namespace, rows: Tokens, consumed: list[Hashes]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield tokens and labels, both [micro-batch, sequence]; ``consumed`` gets their hashes."""
    for indices in rows:
        tokens = np.stack([sample(text, i, options.seq_length, options.seed) for i in indices])
        consumed.append(sample_hashes(tokens))
        batch = torch.from_numpy(tokens)
        yield batch[:, :-1].contiguous().cuda(), batch[:, 1:].contiguous().cuda()


def train_step(
    training: Training,
    batches: Iterator[tuple[torch.Tensor, torch.Tensor]],
    num_micro_batches: int,
    options: argparse.Namespace,
) -> torch.Tensor | None:
    """Run one optimizer step; return the replica's mean loss on the last stage, else None."""
    length = options.seq_length
    mask = torch.triu(torch.ones(length, length), 1).bool()[None, None].cuda()
    positions = torch.arange(length)[None].cuda()

    def forward(iterator: Any, module: Any) -> Any:
        tokens, labels = next(iterator)
        output = module(tokens, positions.expand(len(tokens), -1), mask, labels=labels)

        def loss(values: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            mean = values.float().mean()
            return mean, {"loss": mean.detach().double()}

        return output, loss

    training.model.zero_grad_buffer()
    training.optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward, data_iterator=batches, model=training.model,
        num_microbatches=num_micro_batches, seq_length=length,
        micro_batch_size=options.micro_batch_size, decoder_seq_length=length, forward_only=False,
    )  # fmt: skip
    training.optimizer.step()
    training.scheduler.step(options.global_batch_size)
    return torch.stack([entry["loss"] for entry in losses]).mean() if losses else None


def report(
    folder: Path | None, step: int, lr: float, loss: torch.Tensor | None, consumed: list[Hashes]
) -> None:
    """Add up the loss and the hashes of the samples over the replicas, and write them down."""
    group, dp = mpu.get_data_parallel_group(), mpu.get_data_parallel_world_size()
    is_first = mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_data_parallel_rank() == 0
    if loss is not None:
        dist.all_reduce(loss, group=group)
        if is_first:
            print(f"step={step} loss={loss.item() / dp:.6f} lr={lr:.6f}", flush=True)
            write(folder, "loss", step=step, loss=loss.item() / dp, lr=lr, at=time.time())
    if mpu.is_pipeline_first_stage():
        # Modulo 2**64 as two's complement: sums wrap the same way.
        combined = torch.tensor([combine_hashes(*consumed)], dtype=torch.uint64)
        hashes = combined.view(torch.int64).cuda()
        dist.all_reduce(hashes, group=group)
        if is_first:
            write(folder, "samples", step=step, samples=hashes.item() % 2**64)


def write(folder: Path | None, name: str, **values: float) -> None:
    """Append a line to the metrics, whole or not at all."""
    if folder is not None:
        with open(folder / f"{name}.jsonl", "a") as file:
            file.write(json.dumps(values) + "\n")


def main() -> None:
    options = read_arguments()
    text = read_text(options.data)
    with scalai.elastic() as job:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        mpu.initialize_model_parallel(job.tp, job.pp)
        torch.manual_seed(options.seed)
        model_parallel_cuda_manual_seed(options.seed)
        sizes = options.global_batch_size, options.micro_batch_size, job.dp
        batches = Batches(*sizes)
        init_num_microbatches_calculator(dist.get_rank(), None, *sizes)
        job.begin_build()
        training = build(options, job)
        job.attach(
            scalai.MegatronState(
                training.model, training.optimizer, training.scheduler, seed=options.seed
            )
        )
        while job.step < options.steps:
            rows = batches.samples(job.consumed_samples, mpu.get_data_parallel_rank())
            consumed: list[Hashes] = []
            data = micro_batches(text, options, rows, consumed)
            lr = training.optimizer.param_groups[0]["lr"]
            loss = train_step(training, data, batches.num_micro_batches, options)
            report(options.metrics, job.step + 1, lr, loss, consumed)
            if job.boundary(samples=options.global_batch_size):
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
