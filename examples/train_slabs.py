"""A small 3D convolution network over samples too large for one rank: each rank reads and computes
a slab of every sample, and the number of slabs changes while it trains.

    scalai-run --nproc-per-node 3 --job slabs --elastic configs/elastic_slabs.toml \\
      examples/train_slabs.py --data volumes.h5 --key volumes --steps 1000
    scalai scale --job slabs --nproc 2

The number of slabs is the degree ``cp``: like context parallelism it cuts within a sample, so that
neither the batch nor the ledger of samples depends on it, and the ranks of a replica are neighbours
(``Degrees.coordinate``). ``tp`` would cut the model, which is whole here; ``dp`` counts samples.

The data are [samples, 2, d, h, w] float64, what goes in and what should come out: HDF5, .npy or
safetensors. A rank reads its slab along d, of what goes in also the halo of the first layer; the
halos of other layers come from its neighbours.
"""

import argparse
import json
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

import scalai

HALO = (1, 0, 0)
"""What a convolution of width 3 needs beyond a slab along d; h and w are whole."""


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", required=True, help="a file, or a URL of fsspec")
    parser.add_argument("--key", help="name of the data set or tensor; none: a .npy file")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--global-batch-size", type=int, default=4)
    parser.add_argument("--slabs", type=int, default=1, help="outside of scalai-run")
    parser.add_argument("--channels", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--metrics", type=Path, help="a file for one JSON line a step")
    parser.add_argument("--weights", type=Path, help="where the last weights of a round go")
    parser.add_argument("--pause-s", type=float, default=0.0, help="before each step, to watch")
    return parser.parse_args()


class SlabNetwork(torch.nn.Module):
    """Three convolutions of width 3, on the slab of one rank of a replica's group."""

    def __init__(self, channels: int, slabs: scalai.Slabs, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.slabs, self.group = slabs, group
        sizes = [1, channels, channels, 1]
        self.layers = torch.nn.ModuleList(
            torch.nn.Conv3d(low, high, 3, padding=(0, 1, 1), dtype=torch.float64)
            for low, high in pairwise(sizes)
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Map [samples, 1, slab with halo] to [samples, 1, slab]."""
        rank = dist.get_rank(self.group)
        # At the sample's own borders there is no halo but zeros, as a convolution pads.
        low, high = int(rank == 0), int(rank == self.slabs.count - 1)
        for number, layer in enumerate(self.layers):
            if number:
                values = scalai.exchange_halo(values.relu(), self.slabs, HALO, self.group)
            values = layer(functional.pad(values, (0, 0, 0, 0, low, high)))
        return values


def read_batch(
    file: scalai.SlabFile, slabs: scalai.Slabs, rank: int, samples: range
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what goes in, [samples, 1, slab with halo], and what should come out, [samples, 1,
    slab]; samples begin anew where the file ends."""

    def read(channel: int, box: tuple[slice, ...]) -> torch.Tensor:
        places = (sample % file.shape[0] for sample in samples)
        parts = [file.read(np.s_[n : n + 1, channel : channel + 1, *box]) for n in places]
        return torch.from_numpy(np.concatenate(parts))

    return read(0, slabs.index(rank, HALO)), read(1, slabs.index(rank))


def train_step(
    model: SlabNetwork, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, ...], of: int
) -> float:
    """Make one step on all ranks; ``of`` elements are in the whole batch. Returns its loss."""
    given, wanted = batch
    optimizer.zero_grad()
    loss = (model(given) - wanted).square().sum() / of
    loss.backward()
    summed = loss.detach()
    for values in (summed, *(parameter.grad for parameter in model.parameters())):
        dist.all_reduce(values)
    optimizer.step()
    return float(summed)


def main() -> None:
    options = read_arguments()
    with (
        scalai.elastic(cp=options.slabs) as job,
        scalai.SlabFile(options.data, options.key) as file,
    ):
        size = options.global_batch_size
        each, rest = divmod(size, job.dp)
        if rest:
            raise scalai.RefusedError(f"DP{job.dp} does not divide --global-batch-size {size}.")
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        replica, rank = divmod(dist.get_rank(), job.cp)
        groups = [
            dist.new_group(range(first, first + job.cp))
            for first in range(0, job.world_size, job.cp)
        ]
        slabs = scalai.Slabs(file.shape[2:], (job.cp, 1, 1))
        torch.manual_seed(1234)  # the first weights, the same on every rank
        model = SlabNetwork(options.channels, slabs, groups[replica])
        optimizer = torch.optim.Adam(model.parameters(), options.lr)
        job.attach(scalai.ReplicatedState(model, optimizer))
        elements = size * int(np.prod(slabs.shape))
        while job.step < options.steps:
            time.sleep(options.pause_s)
            first = job.step * size + replica * each
            batch = read_batch(file, slabs, rank, range(first, first + each))
            loss = train_step(model, optimizer, batch, elements)
            read = torch.zeros(job.world_size, dtype=torch.int64)
            read[dist.get_rank()] = file.bytes_read
            dist.all_reduce(read)
            if dist.get_rank() == 0 and options.metrics:
                line = {"step": job.step + 1, "loss": loss, "world": job.world_size, "cp": job.cp}
                with options.metrics.open("a") as metrics:
                    metrics.write(json.dumps({**line, "bytes_read": read.tolist()}) + "\n")
            if job.boundary(samples=size):
                break
        if dist.get_rank() == 0 and options.weights:
            torch.save(model.state_dict(), options.weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
