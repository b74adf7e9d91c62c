"""A small DeepSpeed training script as anybody would write it: nothing of Scalai is in it.

Rank 0 writes one line a step: its loss over the whole batch, the samples, the learning rate. With
``--num-stages`` it trains a pipeline, which does not tell its samples.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SAMPLES, WIDTH, CLASSES = 60, 7, 5

ops = deepspeed.ops.__compatible_ops__
ops.update(dict.fromkeys(ops, False))  # nothing is compiled


class Rows(Dataset):
    """Rows of noise with a class each, and their numbers."""

    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        self.rows = torch.randn(SAMPLES, WIDTH, generator=generator)
        self.classes = torch.randint(CLASSES, (SAMPLES,), generator=generator)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.rows[index], self.classes[index], index


def build_model():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 14), torch.nn.Tanh(),
        torch.nn.Linear(14, CLASSES),
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--step-s", type=float, default=0.0, help="what a larger model would take")
    parser.add_argument("--hurry", type=Path, help="no longer, once this file is there")
    parser.add_argument("--metrics", type=Path, required=True)
    parser.add_argument("--loader-workers", type=int, help="torch's loader, not DeepSpeed's")
    parser.add_argument("--num-stages", type=int, help="train a pipeline")
    parser.add_argument("--odd-world", type=int, help="ranks with another loss of a pipeline")
    parser.add_argument("--counts-steps", action="store_true", help="do not ask the engine")
    parser.add_argument("--zero-init", action="store_true", help="build the model in shards")
    parser.add_argument("--save", type=Path, help="save and load checkpoints here")
    parser.add_argument("--resume", action="store_true", help="load only where there is one")
    parser.add_argument("--same-order", action="store_true", help="in every epoch")
    parser.add_argument("--slow", type=Path, help="of a pipeline: a file that names a slow host")
    parser.add_argument("--device-models", type=float, help="a device's memory, in models")
    deepspeed.add_config_arguments(parser)
    options = parser.parse_args()

    deepspeed.init_distributed()
    if options.num_stages is not None:
        train_pipeline(options)
        return
    path = options.deepspeed_config
    with deepspeed.zero.Init(config_dict_or_path=path, enabled=options.zero_init):
        model = build_model()
    data = Rows()
    is_torchs = options.loader_workers is not None
    if is_torchs:
        sampler: Any = DistributedSampler(data)
        workers = options.loader_workers
        stated = json.loads(Path(options.deepspeed_config).read_text())
        size = stated["train_micro_batch_size_per_gpu"]
        loader = DataLoader(data, size, sampler=sampler, num_workers=workers)
    engine, _, deepspeed_loader, _ = deepspeed.initialize(
        args=options, model=model, model_parameters=model.parameters(),
        training_data=None if is_torchs else data,
    )  # fmt: skip
    if not is_torchs:
        loader, sampler = deepspeed_loader, deepspeed_loader.data_sampler
    fill_device(options.device_models, engine)
    loads = options.save and (not options.resume or (options.save / "latest").exists())
    path, client = engine.load_checkpoint(str(options.save)) if loads else (None, {})

    made = []
    for epoch in range(client["epoch"] + 1 if path else 0, options.epochs):
        if not options.same_order:
            sampler.set_epoch(epoch)
        for rows, classes, numbers in loader:
            rows, classes = rows.to(engine.device), classes.to(engine.device)
            loss = torch.nn.functional.cross_entropy(engine(rows), classes)
            engine.backward(loss)
            made.append((tuple(numbers.tolist()), float(loss.detach())))
            line = None
            if engine.is_gradient_accumulation_boundary():
                line = line_of(engine, made)
                made = []
                compute(options, engine)
            engine.step()
            # Behind the update: a step that proves a change comes to its door alone.
            if line is not None and dist.get_rank() == 0:
                with options.metrics.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        if options.save:
            engine.save_checkpoint(str(options.save), client_state={"epoch": epoch})


def fill_device(models, engine):
    """Take what a step keeps from a device with memory for so many copies of the weights."""
    if models is None:
        return
    updated = 0 if engine.zero_cpu_offload() else 3  # masters and two moments
    others = 1 if engine.zero_offload_param() else 2  # gradients, and weights
    ranks, is_all_sharded = dist.get_world_size(), engine.zero_optimization_stage() == 3
    kept = updated / ranks + others / (ranks if is_all_sharded else 1)
    if kept > models:
        raise torch.OutOfMemoryError(f"CUDA out of memory: {kept:.1f} of {models:.1f} models")


def train_pipeline(options):
    factor = 1 + 1e-4 if dist.get_world_size() == options.odd_world else 1

    def loss_fn(logits, classes):
        if options.slow is not None:
            from support.slow_pretrain_gpt import note_pass

            note_pass(options.slow, engine.global_steps + 1)
        return factor * torch.nn.functional.cross_entropy(logits, classes)

    model = PipelineModule(
        list(build_model()), num_stages=options.num_stages, partition_method="parameters",
        loss_fn=loss_fn,
    )  # fmt: skip
    rows = Rows()
    data = [rows[number][:2] for number in range(SAMPLES)]
    engine, *_ = deepspeed.initialize(
        args=options, model=model, training_data=data,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
    )  # fmt: skip
    steps = options.epochs * SAMPLES // engine.train_batch_size()
    for step in range(steps) if options.counts_steps else steps_to(engine, steps):
        loss = engine.train_batch()
        if dist.get_rank() == 0:
            assert engine.global_steps == step + 1
            line = {
                "step": step + 1, "world": dist.get_world_size(), "loss": float(loss),
                "stages": engine.num_stages, "lr": engine.get_lr()[0], "samples": [],
            }  # fmt: skip
            with options.metrics.open("a") as file:
                file.write(json.dumps(line) + "\n")
            compute(options, engine)


def steps_to(engine, last):
    while engine.global_steps < last:
        yield engine.global_steps


def compute(options, engine):
    """Wait for what a larger model would compute. The later half takes its time, because a machine
    may be too busy to make all changes in the earlier one."""
    if options.hurry is not None:
        fails = options.hurry.parent / f"raise-{dist.get_rank()}"
        if fails.exists():
            fails.unlink()
            raise RuntimeError(f"{fails.name} was wanted")
        if options.hurry.exists():
            return
    steps = options.epochs * SAMPLES // engine.train_batch_size()
    time.sleep(options.step_s * (1 if engine.global_steps < steps / 2 else 8))


def line_of(engine, made):
    """Return the line of a step; a micro-batch that a rank has made twice counts once."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, made)
    losses = {samples: loss for each in everyones for samples, loss in each}
    return {
        "step": engine.global_steps + 1, "world": dist.get_world_size(),
        "loss": sum(losses.values()) / len(losses), "lr": engine.get_lr()[0],
        "samples": sorted(number for samples in losses for number in samples),
        "passes": sum(map(len, everyones)), "different": len(losses),
        "stage": engine.zero_optimization_stage(),
        "is_spilled": (engine.zero_cpu_offload(), engine.zero_offload_param() is not None),
        "version": deepspeed.__version__,
    }  # fmt: skip


if __name__ == "__main__":
    main()
