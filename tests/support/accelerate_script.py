"""A training loop on Accelerate with DeepSpeed, as people write them: it knows nothing of Scalai.
Each rank notes the losses and samples of its micro-batches, one JSON line each."""

import argparse
import json
import os
import time
from hashlib import blake2b
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DataLoaderConfiguration, DeepSpeedPlugin, set_seed

LENGTH, VOCABULARY, HIDDEN = 16, 128, 16
ROUND = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + 1


class Text(torch.utils.data.Dataset[torch.Tensor]):
    """Windows of Python's own documentation, as ASCII."""

    def __init__(self, samples: int) -> None:
        self.text = "\n".join(topics.topics.values()).encode("ascii", "replace")
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(list(self.text[index * LENGTH : (index + 1) * LENGTH]))


class Model(torch.nn.Module):
    """Says the next byte from the last ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.mixing = torch.nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.mixing(self.embedding(tokens[:, :-1]))[0])
        loss: torch.Tensor = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten()
        )
        return loss


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--notes", type=Path, required=True, help="a file, .RANK is added")
    parser.add_argument("--deepspeed", type=Path, required=True, help="DeepSpeed's configuration")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--save-at", type=int, default=0, help="after so many steps")
    parser.add_argument("--save-epochs", action="store_true", help="go on at the newest, too")
    parser.add_argument("--step-s", type=float, default=0.0, help="a step takes longer by so much")
    return parser.parse_args()


def names_of(tokens: torch.Tensor) -> list[str]:
    """Return a name of each sample of a batch, made of its tokens."""
    return [blake2b(bytes(row), digest_size=6).hexdigest() for row in tokens.tolist()]


def main() -> None:
    options = parse()
    # Accelerate knows of ranks without a GPU only if it is told before it hears of DeepSpeed.
    PartialState(cpu=True)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(str(options.deepspeed)),
        gradient_accumulation_steps=options.accumulate,
        # Else the order of an epoch is drawn from RNG states that whatever else uses.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    set_seed(7)
    model: Any = Model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: Any = torch.utils.data.DataLoader(
        Text(options.samples), batch_size=options.micro_batch, shuffle=True
    )
    # As Accelerate steps it: once a rank, over the batches of one.
    steps = options.epochs * len(loader) // options.accumulate
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 1 - at / steps)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    skipped = 0
    if options.resume:
        accelerator.load_state(str(options.resume))
        skipped = model.global_steps * options.accumulate
    saved = sorted(options.output.glob("epoch_*")) if options.save_epochs else []
    if saved:
        accelerator.load_state(str(saved[-1]))
        skipped = len(saved) * len(loader)
    options.notes.parent.mkdir(parents=True, exist_ok=True)
    notes = open(f"{options.notes}.{accelerator.process_index}", "a")
    for epoch in range(skipped // len(loader), options.epochs):
        if not options.save_epochs:  # Accelerate counts
            loader.set_epoch(epoch)
        left = skipped % len(loader)
        batches = accelerator.skip_first_batches(loader, left) if left else loader
        skipped = 0
        for tokens in batches:
            step = model.global_steps
            with accelerator.accumulate(model):
                loss = model(tokens)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            note = {
                "step": step,
                "rank": accelerator.process_index,
                "world": accelerator.num_processes,
                "round": ROUND,
                "loss": float(loss.detach()) / accelerator.gradient_accumulation_steps,
                "samples": names_of(tokens),
                "rate": scheduler.get_last_lr()[0],
            }
            print(json.dumps(note), file=notes, flush=True)
            if accelerator.sync_gradients and model.global_steps == options.save_at:
                accelerator.save_state(str(options.output))
            if accelerator.sync_gradients:
                time.sleep(options.step_s)
        if options.save_epochs:
            accelerator.save_state(str(options.output / f"epoch_{epoch}"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
