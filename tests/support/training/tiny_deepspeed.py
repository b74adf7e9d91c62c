"""The tiny DeepSpeed jobs of the converters' tests, in processes that outlive a job."""

# What DeepSpeed is to run on is said before it is imported.
# ruff: noqa: E402

import gc
import logging
import os
import warnings
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
warnings.filterwarnings("ignore")  # DeepSpeed's own, about what a CPU machine lacks

import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import set_autotp_mode
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

from scalai.patches.deepspeed.deepspeed_state import DeepSpeedState
from support.training.deepspeed_jobs import Job, import_all, make_engine, train
from support.training.jobs import SEED

LINEAR = torch.nn.functional.linear
"""Stage 3 puts its own in this place, for good: with it gradients come in another order, which
stage 2 must find alike on all ranks, also on those that were not in the last job."""

deepspeed = import_all()
torch.set_num_threads(1)
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
# Nothing is compiled.
deepspeed.ops.__compatible_ops__.update(dict.fromkeys(deepspeed.ops.__compatible_ops__, False))
# Torch computes in fp16 on every CPU; DeepSpeed asks whether there are fast kernels.
type(deepspeed.accelerator.get_accelerator()).is_fp16_supported = lambda _: True


class Training:
    """One rank of a job: builds it, trains it, takes it down."""

    def __init__(self, job: Job, rank: int, store: dist.Store, seed: int) -> None:
        self.job = job
        self.skipped: list[int] = []
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.world))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world)
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        torch.manual_seed(seed)
        self.engine = make_engine(job)

    def state(self) -> DeepSpeedState:
        return DeepSpeedState(self.engine, seed=SEED)

    def train(self, steps: range) -> list[dict[int, float]]:
        """Train; return each step's loss, the mean over all samples, on rank 0."""
        return [self._train_step(step) for step in steps]

    def learning_rate(self) -> float:
        return float(self.engine.get_lr()[0])

    def close(self) -> None:
        """Take the job down, so that another one can be built in this process."""
        self.engine.destroy()
        del self.engine
        gc.collect()
        _forget_groups()

    def _train_step(self, step: int) -> dict[int, float]:
        skipped = self.engine.skipped_steps
        loss = train(self.engine, self.job, step)
        if self.engine.skipped_steps > skipped:
            self.skipped.append(step)
        return {0: loss} if dist.get_rank() == 0 else {}


def _forget_groups() -> None:
    """Destroy all process groups, and DeepSpeed's memory of them and of earlier parameters."""
    dist.barrier()
    dist.destroy_process_group()
    # Stage 3 counts parameters and modules; the ranks compare it, and not all were in the last job.
    deepspeed.zero.Init.param_id = 0
    (count,) = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    count[0] = 0
    torch.nn.functional.linear = LINEAR
    deepspeed.comm.comm.cdb = None
    set_autotp_mode(training=False)
    groups: Any = vars(deepspeed.utils.groups)
    groups["mpu"] = None
    for name, value in groups.items():
        if name.startswith("_") and name.isupper() and not name.startswith("__"):
            groups[name] = {} if isinstance(value, dict) else None
