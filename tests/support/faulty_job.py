"""The tiny job with a script's faults: it raises at some world, or is slow or leaves after its
loop.

``--raise-at-world N`` raises before the first step on N ranks; ``--after-s S`` evaluates for S
seconds behind the loop; ``--exit`` then leaves by ``sys.exit`` without a word to the job, as
Megatron's exit-interval does.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import scalai
from support.tiny_job import TinyState, advance


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--raise-at-world", type=int, default=0)
    parser.add_argument("--after-s", type=float, default=0.0)
    parser.add_argument("--exit", action="store_true")
    parser.add_argument("--enough", type=Path, default=Path("/nowhere"), help="ends the loop")
    parser.add_argument("--metrics", type=Path, required=True)
    options = parser.parse_args()
    job = scalai.elastic()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = TinyState(rank % job.tp, job.tp, rank // job.tp)
    job.attach(state)
    if job.world_size == options.raise_at_world:
        raise RuntimeError(f"{job.world_size} ranks are not supported")
    is_enough = 0
    while job.step < options.steps and not is_enough:
        time.sleep(0.02)
        advance(state.matrix, state.vector, job.step + 1)
        state.steps += 1
        is_last = rank == 0 and options.enough.exists()
        sums = torch.stack((state.matrix.sum(), torch.tensor(int(is_last))))
        dist.all_reduce(sums)
        total, is_enough = sums.tolist()
        if rank == 0:
            with options.metrics.open("a") as file:
                file.write(
                    f'{{"step": {job.step + 1}, "sum": {total // job.dp}, '
                    f'"world": {job.world_size}, "tp": {job.tp}}}\n'
                )
        if job.boundary(samples=3):
            return
    if rank == 0:
        (options.metrics.parent / "behind-the-loop").touch()
    time.sleep(options.after_s)
    if options.exit:
        dist.destroy_process_group()
        sys.exit(0)
    job.finish()


if __name__ == "__main__":
    main()
