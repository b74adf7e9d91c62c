"""A tiny language model over bytes, on samples that it reads from ordinary files of a mount.

    scalai mount view /mnt/view --source corpus=corpus.jsonl --shuffle corpus=7 \\
      --global-batch-size 12
    scalai-run --nproc-per-node 3 --job view --elastic configs/elastic_view.toml \\
      examples/train_view.py --view /mnt/view/dataset/corpus --steps 1000
    scalai scale --job view --nproc 1

Its reader opens files and reads lines, and knows nothing of Scalai: a rank's file holds the
samples of that rank, in its order, at any number of ranks. Where in it a round begins follows from
the number of samples that were consumed. A sample is a line of JSON with a ``text``.
"""

import argparse
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import chain, count, islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import scalai

BYTES, CONTEXT, WIDTH = 64, 8, 64
"""Bytes of a sample that are trained on; those that a byte is predicted from; the model's width."""


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--view", type=Path, required=True, help="the data set's folder in a mount")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--global-batch-size", type=int, default=12, help="that of the mount")
    parser.add_argument("--shuffle", type=int, default=7, help="the seed of the mount")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--metrics", type=Path, help="folder for JSON lines of losses and records")
    parser.add_argument("--pause-s", type=float, default=0.0, help="before each step, to watch")
    return parser.parse_args()


def read_records(folder: Path, done: int) -> Iterator[bytes]:
    """Yield a replica's samples, pass after pass, from the one behind the first ``done`` on."""
    passes = ((folder / f"pass-{number}.jsonl").open("rb") for number in count())
    return islice(chain.from_iterable(passes), done, None)


def order_of(view: Path, seed: int) -> scalai.Shuffled:
    """Return the order of the mount, for the job's ledger."""
    source = (view / "source" / "corpus.jsonl").read_bytes()
    content = hashlib.sha256(source).hexdigest()
    return scalai.Shuffled(source.count(b"\n"), seed, "corpus", content=content)


def build_model() -> nn.Module:
    """Return a model that maps contexts [..., CONTEXT] to scores of the next byte, [..., 256]."""
    torch.manual_seed(1234)  # the first weights, the same on every rank
    return nn.Sequential(
        nn.Embedding(256, 16), nn.Flatten(-2), nn.Linear(16 * CONTEXT, WIDTH), nn.ReLU(),
        nn.Linear(WIDTH, 256),
    )  # fmt: skip


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, records: Sequence[bytes], of: int
) -> float:
    """Make one step on all ranks; ``of`` samples are in the whole batch. Returns its loss."""
    texts = [json.loads(record)["text"].encode()[:BYTES].ljust(BYTES, b"\n") for record in records]
    tokens = torch.tensor([list(text) for text in texts])
    contexts, following = tokens.unfold(-1, CONTEXT, 1)[:, :-1], tokens[:, CONTEXT:]
    optimizer.zero_grad()
    scores = model(contexts).flatten(0, 1)
    loss = functional.cross_entropy(scores, following.flatten(), reduction="sum")
    loss = loss / (of * (BYTES - CONTEXT))
    torch.autograd.backward(loss)
    summed = loss.detach()
    for values in (summed, *(parameter.grad for parameter in model.parameters())):
        dist.all_reduce(values)
    optimizer.step()
    return float(summed)


def write(folder: Path | None, name: str, line: dict[str, object]) -> None:
    """Append a line to the metrics, whole or not at all."""
    if folder is not None:
        with open(folder / f"{name}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    options = read_arguments()
    size = options.global_batch_size
    with scalai.elastic() as job:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        model = build_model()
        optimizer = torch.optim.Adam(model.parameters(), options.lr)
        job.draw_from(order_of(options.view, options.shuffle))
        job.attach(scalai.ReplicatedState(model, optimizer))
        low, high = (size * rank // job.dp for rank in (job.rank, job.rank + 1))
        done = job.consumed_samples // size * (high - low)
        mine = read_records(options.view / f"dp-{job.rank}-of-{job.dp}", done)
        while job.step < options.steps:
            time.sleep(options.pause_s)
            step = job.step + 1
            records = list(islice(mine, high - low))
            hashes = [hashlib.sha256(record).hexdigest() for record in records]
            first = job.consumed_samples + low
            write(
                options.metrics, f"records-{job.rank}",
                {"step": step, "first": first, "hashes": hashes},
            )  # fmt: skip
            loss = train_step(model, optimizer, records, size)
            if job.rank == 0:
                line = {"step": step, "loss": loss, "lr": options.lr, "at": time.time()}
                write(options.metrics, "loss", line)
            if job.boundary(samples=size):
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
