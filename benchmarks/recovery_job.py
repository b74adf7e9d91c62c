"""The job that ``recovery.py`` measures: the GPT of ``resize_job.py`` on several hosts, which train
until somebody ends them.

Under scalai-run it goes on through the session. Under torchrun it does what a Megatron job does
without Scalai: it saves by Megatron's torch_dist format every so many steps into one folder that
all hosts reach, and when it is started again it loads the newest save that is whole.
"""

import argparse
import os
import shutil
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import scalai
from scalai.patches.megatron import cpu_emulation

cpu_emulation.install()

from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core.num_microbatches_calculator import (  # noqa: E402
    init_num_microbatches_calculator,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from recovery_saves import newest_save, save_path  # noqa: E402
from resize_job import IMPORTED, SEED, STARTED, Job, load, parser, save  # noqa: E402
from resize_marks import Marks  # noqa: E402

from scalai import MegatronState, Session  # noqa: E402


def next_round(marks: Path) -> int:
    """Return the number of this round, the same on all ranks: torchrun's count of restarts differs
    between agents whose workers failed and agents whose workers were still there."""
    found = [len({path.name.split("-")[1] for path in marks.glob("round-*.jsonl")})]
    dist.broadcast_object_list(found)
    return found[0]


def save_whole(job: Job, step: int, saves: Path) -> None:
    """Save, so that it is seen when it is whole; one of them is kept."""
    partial = saves / f".partial-{step}"
    save(job, step, partial)
    dist.barrier()
    if dist.get_rank() == 0:
        before = newest_save(saves)
        partial.rename(save_path(saves, step))
        if before is not None:
            shutil.rmtree(before)


def train(options: argparse.Namespace, session: Session, job: Job, marks: Marks, step: int) -> None:
    """Make steps until the session ends it, or somebody the process."""
    while True:
        began = time.monotonic()
        loss = job.step(step)
        step += 1
        ended = time.monotonic()
        if options.saves is not None and step % options.save_every == 0:
            save_whole(job, step, options.saves)
        must_stop = session.boundary(step=step, samples=options.global_batch_size)
        behind_s = time.monotonic() - ended
        moment = ended, time.process_time()
        marks.note("step", moment, step=step, took_s=ended - began, behind_s=behind_s, loss=loss)
        if must_stop:
            return


def main() -> None:
    options_of = parser()
    options_of.add_argument("--saves", type=Path, help="under torchrun: where saves lie")
    options_of.add_argument("--save-every", type=int, default=10)
    options_of.add_argument("--timeout-s", type=float, required=True, help="of collectives")
    options_of.add_argument(
        "--stages",
        type=int,
        nargs="+",
        help="under torchrun: of 1, 2, ... ranks",
    )
    options = options_of.parse_args()
    pp = options.stages[int(os.environ["WORLD_SIZE"]) - 1] if options.stages else 1
    with scalai.elastic(tp=options.tp, pp=pp) as session:
        entered = time.monotonic(), time.process_time()
        dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout_s))
        # Groups of its own have half an hour by default, whatever the first group has.
        minutes = options.timeout_s / 60
        mpu.initialize_model_parallel(session.tp, session.pp, distributed_timeout_minutes=minutes)
        torch.manual_seed(SEED)
        model_parallel_cuda_manual_seed(SEED)
        marks = Marks(options.marks, str(next_round(options.marks)))
        for event, at in (("script", STARTED), ("imported", IMPORTED), ("entered", entered)):
            marks.note(event, at)
        marks.note("connected")
        dp = mpu.get_data_parallel_world_size()
        # One pass a step: the state is to be large, and not the arithmetic.
        micro_batch = options.global_batch_size // dp
        init_num_microbatches_calculator(
            dist.get_rank(), None, options.global_batch_size, micro_batch, dp
        )
        saved = None if options.saves is None else newest_save(options.saves)
        is_restoring = saved is not None or session.restorable_step is not None
        job = Job(options, session, is_restoring, micro_batch)
        marks.note("built", layout=f"pp{session.pp}-dp{dp}")
        session.attach(MegatronState(job.model, job.optimizer, seed=SEED))
        step = session.step if saved is None else load(job, saved)
        marks.note("restored", step=step)
        train(options, session, job, marks, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
