"""A GPT in plain torch and DeepSpeed, byte by byte. Nothing in this script knows of elasticity.

    scalai-run --nproc-per-node 4 examples/train_deepspeed.py --steps 60 \\
      --deepspeed_config configs/deepspeed_tiny.json

Under torchrun the same script and the same configuration train on a fixed number of ranks. What
makes it elastic is the block ``scalai`` of that configuration.
"""

import argparse
import json
import time
from itertools import count
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

from scalai.core.degrees.batches import combine_hashes, sample_hashes

VOCABULARY = 256

Tokens = npt.NDArray[np.int64]


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="text (default: Python's own documentation)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--metrics", type=Path, help="folder for one JSON line a step")
    parser.add_argument("--local_rank", type=int, default=-1, help="DeepSpeed's own")
    deepspeed.add_config_arguments(parser)
    return parser.parse_args()


class Text(torch.utils.data.Dataset[Tokens]):
    """Consecutive stretches of a text, [seq_length + 1] each."""

    def __init__(self, path: Path | None, length: int) -> None:
        if path is None:
            from pydoc_data import topics

            data = "\n".join(topics.topics.values()).encode()
        else:
            data = path.read_bytes()
        self._bytes = np.frombuffer(data, dtype=np.uint8)
        self._length = length

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self._length

    def __getitem__(self, index: int) -> Tokens:
        start = index * self._length
        return self._bytes[start : start + self._length + 1].astype(np.int64)


class Gpt(nn.Module):
    """A causal transformer with learned positions and a tied output layer."""

    def __init__(self, layers: int, hidden: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, hidden)
        self.positions = nn.Embedding(length, hidden)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                hidden, heads, 4 * hidden, dropout=0.0, activation="gelu",
                batch_first=True, norm_first=True,
            )
            for _ in range(layers)
        )  # fmt: skip
        self.norm = nn.LayerNorm(hidden)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of tokens and labels, both [batch, sequence]."""
        hidden = self.tokens(tokens) + self.positions.weight
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask)
        logits = self.norm(hidden) @ self.tokens.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def report(
    folder: Path | None, engine: Any, lr: float, losses: list[torch.Tensor], hashes: list[int]
) -> None:
    """Add up the loss and the hashes of the samples over the replicas, and write them down."""
    loss = torch.stack(losses).mean()
    dist.all_reduce(loss)
    # Modulo 2**64 as two's complement: sums wrap the same way.
    combined = torch.tensor([combine_hashes(hashes)], dtype=torch.uint64)
    total = combined.view(torch.int64).to(engine.device)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        step, mean = engine.global_steps, loss.item() / dist.get_world_size()
        print(f"step={step} loss={mean:.6f} lr={lr:.6f}", flush=True)
        write(folder, "loss", step=step, loss=mean, lr=lr, at=time.time())
        write(folder, "samples", step=step, samples=total.item() % 2**64)


def write(folder: Path | None, name: str, **values: float) -> None:
    """Append a line to the metrics, whole or not at all."""
    if folder is not None:
        with open(folder / f"{name}.jsonl", "a") as file:
            file.write(json.dumps(values) + "\n")


def main() -> None:
    options = read_arguments()
    torch.manual_seed(options.seed)
    model = Gpt(options.layers, options.hidden, options.heads, options.seq_length)
    engine, _, loader, _ = deepspeed.initialize(
        args=options,
        model=model,
        model_parameters=model.parameters(),
        training_data=Text(options.data, options.seq_length),
    )
    losses: list[torch.Tensor] = []
    hashes: list[int] = []
    for _ in count():
        for batch in loader:
            lr = engine.get_lr()[0]
            tokens = batch.to(engine.device)
            loss = engine(tokens[:, :-1], tokens[:, 1:])
            engine.backward(loss)
            losses.append(loss.detach().double())
            hashes.append(combine_hashes(sample_hashes(batch)))
            is_step = engine.is_gradient_accumulation_boundary()
            engine.step()
            if is_step:
                report(options.metrics, engine, lr, losses, hashes)
                losses, hashes = [], []
                if engine.global_steps >= options.steps:
                    dist.destroy_process_group()
                    return


if __name__ == "__main__":
    main()
