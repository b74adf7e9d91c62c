"""A GPT on megatron-core alone, byte by byte, that may change its TP, PP and DP while it trains.

    scalai-run --nproc-per-node 4 --elastic configs/elastic_gpt_tiny.toml examples/train_gpt.py --steps 60

Everything about elasticity is in ``main``: the context, ``attach`` and ``boundary``. Without CUDA call
``rehearsal.install()`` before megatron is imported, as here; with CUDA it does nothing.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import scalai
from scalai.core.batches import Batches, combine_hashes, sample_hashes
from scalai.patches.megatron import rehearsal

rehearsal.install()

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

from scalai.patches.megatron.state import MegatronState  # noqa: E402

VOCABULARY = 256


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, help="text to train on (default: Python's own documentation)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--global-batch-size", type=int, default=12)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--no-distributed-optimizer", action="store_true")
    parser.add_argument("--metrics", type=Path, help="folder for one JSON line a step")
    return parser.parse_args()


def read_text(path: Path | None) -> np.ndarray:
    """Return the bytes of the text, [bytes] uint8."""
    if path is not None:
        return np.frombuffer(path.read_bytes(), dtype=np.uint8)
    from pydoc_data import topics

    return np.frombuffer("\n".join(topics.topics.values()).encode(), dtype=np.uint8)


def build(options: argparse.Namespace, job: "scalai.runtime.session.Session"):
    """Build model, optimizer and schedule for the degrees of this round."""
    config = TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        num_attention_heads=options.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=job.tp,
        pipeline_model_parallel_size=job.pp,
        pipeline_dtype=torch.float32,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        options.seq_length,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    )
    is_distributed = not options.no_distributed_optimizer
    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=is_distributed
        ),
        model.cuda(),
    )
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=options.lr, min_lr=options.lr / 10, clip_grad=1.0, params_dtype=torch.float32,
            use_distributed_optimizer=is_distributed,
        ),
        [wrapped],
    )  # fmt: skip
    samples = options.steps * options.global_batch_size
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=options.lr, min_lr=options.lr / 10,
        lr_warmup_steps=samples // 20, lr_decay_steps=samples, lr_decay_style="cosine",
        start_wd=0.01, end_wd=0.01, wd_incr_steps=samples, wd_incr_style="constant",
    )  # fmt: skip
    return wrapped, optimizer, scheduler


def sample(text: np.ndarray, index: int, length: int, seed: int) -> np.ndarray:
    """Return sample ``index`` of the one global order, [length + 1] tokens."""
    start = np.random.default_rng((seed, index)).integers(0, len(text) - length - 1)
    return text[start : start + length + 1].astype(np.int64)


def micro_batches(
    text: np.ndarray, options: argparse.Namespace, rows: np.ndarray, consumed: list[np.ndarray]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield tokens and labels, both [micro-batch, sequence]; note what was taken in ``consumed``."""
    for indices in rows:
        tokens = np.stack([sample(text, i, options.seq_length, options.seed) for i in indices])
        consumed.append(sample_hashes(tokens))
        batch = torch.from_numpy(tokens)
        yield batch[:, :-1].contiguous().cuda(), batch[:, 1:].contiguous().cuda()


def train_step(model, optimizer, scheduler, batches, num_micro_batches, options):
    """Run one optimizer step; return the mean loss where this is the last stage, else None."""
    ones = torch.ones(options.seq_length, options.seq_length)
    mask = torch.triu(ones, 1).bool()[None, None].cuda()
    positions = torch.arange(options.seq_length)[None].cuda()

    def forward(iterator, module):
        tokens, labels = next(iterator)
        output = module(tokens, positions.expand(len(tokens), -1), mask, labels=labels)

        def loss(values):
            mean = values.float().mean()
            return mean, {"loss": mean.detach().double()}

        return output, loss

    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward, data_iterator=batches, model=model,
        num_microbatches=num_micro_batches, seq_length=options.seq_length,
        micro_batch_size=1, decoder_seq_length=options.seq_length, forward_only=False,
    )  # fmt: skip
    optimizer.step()
    scheduler.step(options.global_batch_size)
    return sum(entry["loss"] for entry in losses) / len(losses) if losses else None


def write_metrics(folder, name, step, value, lr):
    """Append one line of the metrics that only one rank of the job has."""
    with open(folder / f"{name}.jsonl", "a") as file:
        file.write(json.dumps({"step": step, name: value, "lr": lr}) + "\n")


def report(options, step, loss, consumed, optimizer):
    """Add loss and sample hashes up over the replicas, and write them down."""
    group, dp = mpu.get_data_parallel_group(), mpu.get_data_parallel_world_size()
    is_first = mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_data_parallel_rank() == 0
    lr = optimizer.param_groups[0]["lr"]
    if loss is not None:
        dist.all_reduce(loss, group=group)
        if is_first:
            if options.metrics:
                write_metrics(options.metrics, "loss", step, float(loss) / dp, lr)
            print(f"step={step} loss={float(loss) / dp:.6f} lr={lr:.6f}", flush=True)
    if mpu.is_pipeline_first_stage() and options.metrics:
        # Modulo 2**64 as two's complement: sums wrap the same way.
        ledger = torch.tensor([combine_hashes(*consumed)], dtype=torch.uint64).view(torch.int64)
        dist.all_reduce(ledger, group=group)
        if is_first:
            write_metrics(options.metrics, "samples", step, int(ledger) % 2**64, lr)


def main() -> None:
    options = arguments()
    text = read_text(options.data)
    with scalai.elastic() as job:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        mpu.initialize_model_parallel(job.tp, job.pp)
        torch.manual_seed(options.seed)
        model_parallel_cuda_manual_seed(options.seed)
        batches = Batches(options.global_batch_size, 1, job.dp)
        init_num_microbatches_calculator(dist.get_rank(), None, options.global_batch_size, 1, job.dp)
        model, optimizer, scheduler = build(options, job)
        job.attach(MegatronState(model, optimizer, scheduler, seed=options.seed))
        while job.step < options.steps:
            rows = batches.samples(job.consumed_samples, mpu.get_data_parallel_rank())
            consumed: list[np.ndarray] = []
            data = micro_batches(text, options, rows, consumed)
            loss = train_step(
                model, optimizer, scheduler, data, batches.num_micro_batches, options
            )
            report(options, job.step + 1, loss, consumed, optimizer)
            if job.boundary(samples=options.global_batch_size):
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
