"""The job that ``resize_deepspeed.py`` measures: linear layers under ZeRO, in fp32.

Under scalai-run nothing but the configuration makes it elastic. Under torchrun it does what a
DeepSpeed job does without Scalai: it saves by ``save_checkpoint`` and exits; the checkpoint is made
universal, and the job started anew on other ranks, where it loads that. Every rank notes in
``--marks`` when what ended, as ``resize_job`` does.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

STARTED = time.monotonic(), time.process_time()

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from resize_marks import Marks, is_last  # noqa: E402

deepspeed.ops.__compatible_ops__.clear()  # nothing is compiled
IMPORTED = time.monotonic(), time.process_time()
SEED = 1234


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--marks", type=Path, required=True)
    parser.add_argument("--round", help="under torchrun; else the restart count")
    parser.add_argument("--steps", type=int, help="steps of this round, under torchrun")
    parser.add_argument("--load", type=Path, help="a universal checkpoint")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--pairs", type=int, help="compare steps with and without the boundary")
    deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def build(options: argparse.Namespace, marks: Marks) -> Any:
    """Return the engine."""
    torch.manual_seed(SEED)
    blocks = [torch.nn.Linear(options.hidden, options.hidden) for _ in range(options.layers)]
    model = torch.nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    marks.note("model", bytes=sum(each.nbytes for each in model.parameters()))
    engine, *_ = deepspeed.initialize(args=options, model=model, optimizer=optimizer)
    return engine


def make_step(engine: Any, hidden: int) -> float:
    """Make one optimizer step on random vectors that its number gives; return the mean loss."""
    total = torch.zeros(())
    number, batch_size = engine.global_steps, engine.train_batch_size()
    for sample in range(dist.get_rank(), batch_size, dist.get_world_size()):
        random = torch.Generator().manual_seed(number * 1000 + sample)
        loss = engine(torch.randn(1, hidden, generator=random)).square().mean()
        engine.backward(loss)
        engine.step()
        total += loss.detach()
    dist.all_reduce(total)
    return float(total) / int(batch_size)


def train(options: argparse.Namespace, engine: Any, marks: Marks) -> None:
    """Make steps until the options end it."""
    first = step = engine.global_steps
    while not is_last(options, first, step):
        began = time.monotonic()
        loss = make_step(engine, options.hidden)
        step = engine.global_steps
        marks.note("step", step=step, took_s=time.monotonic() - began, loss=loss)


def compare_pairs(options: argparse.Namespace, engine: Any, marks: Marks) -> None:
    """Make pairs of steps, one with the hooks and one without, in alternating order."""
    methods = vars(engine)
    hooks = {name: methods[name] for name in ("forward", "backward", "step")}
    for number in range(options.pairs):
        seconds = {}
        for is_on in (True, False) if number % 2 else (False, True):
            for name, hook in hooks.items():
                methods.pop(name, None)
                if is_on:
                    methods[name] = hook
            began = time.perf_counter()
            make_step(engine, options.hidden)
            seconds["on" if is_on else "off"] = time.perf_counter() - began
        marks.note("pair", None, **seconds)


def main() -> None:
    options = arguments()
    entered = time.monotonic(), time.process_time()
    deepspeed.init_distributed("gloo", verbose=False)
    marks = Marks(options.marks, options.round or os.environ["TORCHELASTIC_RESTART_COUNT"])
    for event, at in (("script", STARTED), ("imported", IMPORTED), ("entered", entered)):
        marks.note(event, at)
    marks.note("connected")
    engine = build(options, marks)
    marks.note("built", layout=f"dp{dist.get_world_size()}")
    if options.load is not None:
        engine.load_checkpoint(str(options.load))
    marks.note("restored", step=engine.global_steps)
    try:
        if options.pairs:
            compare_pairs(options, engine, marks)
        else:
            train(options, engine, marks)
    except SystemExit:
        marks.note("written")
        raise
    if options.save is not None:
        engine.save_checkpoint(str(options.save))
        marks.note("saved")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
