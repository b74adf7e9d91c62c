"""A loop of one's own: plain torch under DDP, whose replicas need not divide the batch."""

import argparse
import json
import os
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import scalai

SAMPLES, WIDTH = 40, 6
ORDER = scalai.Shuffled(SAMPLES, seed=3)
WAYS = ("weighs", "ignores", "says-nothing")
"""The loop multiplies by its weights; it says so and does not; it does not say so."""


class Rows(Dataset[tuple[torch.Tensor, int]]):
    """Random rows with their numbers."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        self.rows = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.rows[index], index


def build(*, has_norm: bool = False) -> torch.nn.Sequential:
    torch.manual_seed(11)
    norm = [torch.nn.BatchNorm1d(8)] if has_norm else []
    layers = torch.nn.Linear(WIDTH, 8), *norm, torch.nn.Tanh(), torch.nn.Linear(8, WIDTH)
    return torch.nn.Sequential(*layers).double()


def optimizer_of(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), 0.02)


def loss_of(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return a mean over the rows."""
    return (model(rows) - rows.flip(1)).square().mean()


def gathered(value: object) -> list[object]:
    """Return the values of all ranks."""
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--way", choices=WAYS, default=WAYS[0])
    parser.add_argument("--norm", action="store_true", help="the model has batch norm")
    parser.add_argument("--workers", type=int, default=0, help="of the loader, which read ahead")
    parser.add_argument("--pause-s", type=float, default=0.0)
    parser.add_argument("--may-differ", action="store_true", help="reduces in the last pass alone")
    parser.add_argument("--pass-s", type=float, default=0.0)
    parser.add_argument("--slow", type=Path, help="three times that, on the host this file names")
    parser.add_argument("--metrics", type=Path, required=True)
    options = parser.parse_args()
    with scalai.elastic() as job:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        model = build(has_norm=options.norm)
        optimizer = optimizer_of(model)
        batches = scalai.OrderedBatches(
            job, ORDER, options.batch, micro_batch_size=options.micro_batch,
            is_weighted=options.way != "says-nothing", may_differ=options.may_differ,
        )  # fmt: skip
        job.attach(scalai.ReplicatedState(model, optimizer))
        replica = DistributedDataParallel(model)
        drawn = iter(DataLoader(Rows(), batch_sampler=batches, num_workers=options.workers))
        host = Path(os.environ.get("SCALAI_AGENT", "/")).parent.name
        while job.step < options.steps:
            time.sleep(options.pause_s)
            is_slow = options.slow is not None and options.slow.read_text() == host
            optimizer.zero_grad()
            samples, mean = [], torch.zeros((), dtype=torch.float64)
            for number in job.passes:
                rows, numbers = next(drawn)
                weight = job.weight if options.way == "weighs" else 1.0
                # DDP reduces gradients in each backward pass: all replicas make equally many.
                is_alone = options.may_differ and number < job.passes - 1
                with replica.no_sync() if is_alone else nullcontext():
                    loss = loss_of(replica, rows) * weight / job.passes
                    loss.backward()
                time.sleep(options.pass_s * (3 if is_slow else 1))
                mean += loss.detach()
                if not (options.way == "weighs" and job.is_filler):
                    samples += numbers.tolist()
            dist.all_reduce(mean)
            optimizer.step()
            drawn_by_all, hosts = gathered(samples), gathered(host)
            if dist.get_rank() == 0:
                line = {
                    "step": job.step + 1, "loss": float(mean) / job.dp, "world": job.world_size,
                    "drawn": drawn_by_all, "passes": int(job.passes), "pid": os.getpid(),
                    "hosts": hosts,
                }  # fmt: skip
                with options.metrics.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            if job.boundary(samples=options.batch):
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
