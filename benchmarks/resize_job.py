"""The job that ``resize.py`` measures: a GPT on megatron-core, under scalai-run or under torchrun.

Under scalai-run it goes on through the session. Under torchrun it does what a Megatron job does
without Scalai: it saves by Megatron's own torch_dist format and exits, is started anew with other
degrees, and loads. Model, data and steps are the same. Every rank notes in ``--marks`` when what
ended, by the system's monotonic clock and by its own processor time: one JSON line an event.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

STARTED = time.monotonic(), time.process_time()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import scalai  # noqa: E402
from scalai import Session  # noqa: E402
from scalai.patches.megatron import cpu_emulation  # noqa: E402

cpu_emulation.install()

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core import parallel_state as mpu  # noqa: E402
from megatron.core.dist_checkpointing.serialization import (  # noqa: E402
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (  # noqa: E402
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.num_microbatches_calculator import (  # noqa: E402
    get_num_microbatches,
    init_num_microbatches_calculator,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from resize_marks import Marks, is_last  # noqa: E402

from scalai import MegatronState  # noqa: E402

IMPORTED = time.monotonic(), time.process_time()
DEVICE, BACKEND = ("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
SEED = 1234
WHOLE_MODEL = 10**10
"""Parameters in a bucket: with several, Megatron's fully_reshardable form is silently wrong."""


class Job:
    """Model and optimizer at the degrees of this round, and how to make one step.

    Args:
        micro_batch: Samples of a pass.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        session: Session,
        is_restoring: bool,
        micro_batch: int = 1,
    ) -> None:
        self._options, self._micro_batch = options, micro_batch
        config = self._config(session)
        if is_restoring:
            # Weights that a restore overwrites need no random values; both ways to restart do
            # without. Without any initialization they would not be marked as cut by TP.
            for name in ("init_method", "output_layer_init_method", "embedding_init_method"):
                setattr(config, name, lambda weight: weight)
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            options.vocabulary,
            options.seq_length,
            pre_process=mpu.is_pipeline_first_stage(),
            post_process=mpu.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=True,
        )
        self.model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=True, bucket_size=WHOLE_MODEL
            ),
            model,
        )
        config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=1e-4, clip_grad=1.0, params_dtype=torch.float32,
                use_distributed_optimizer=True,
            ),
            [self.model],
        )  # fmt: skip
        length = options.seq_length
        self._mask = torch.triu(torch.ones(length, length), 1).bool()[None, None].to(DEVICE)
        self._positions = torch.arange(length, device=DEVICE)[None]

    def _config(self, session: Session) -> TransformerConfig:
        return TransformerConfig(
            num_layers=self._options.layers,
            hidden_size=self._options.hidden,
            num_attention_heads=self._options.hidden // 64,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=session.tp,
            pipeline_model_parallel_size=session.pp,
            pipeline_dtype=torch.float32,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            apply_rope_fusion=False,
        )

    def step(self, number: int) -> float:
        """Make optimizer step ``number``; return this rank's loss, 0 where it has none."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=self._forward, data_iterator=self._batches(number), model=self.model,
            num_microbatches=get_num_microbatches(), seq_length=self._options.seq_length,
            micro_batch_size=self._micro_batch, decoder_seq_length=self._options.seq_length,
            forward_only=False,
        )  # fmt: skip
        self.optimizer.step()
        loss = torch.tensor([sum(float(entry["loss"]) for entry in losses)], device=DEVICE)
        dist.all_reduce(loss, group=mpu.get_data_parallel_group())
        return float(loss) * self._micro_batch / int(self._options.global_batch_size)

    def _forward(self, batches: Any, module: Any) -> Any:
        tokens, labels = next(batches)
        output = module(tokens, self._positions, self._mask, labels=labels)

        def loss(values: torch.Tensor) -> Any:
            mean = values.float().mean()
            return mean, {"loss": mean.detach().clone()}  # the schedule divides it in place

        return output, loss

    def _batches(self, number: int) -> Any:
        """Yield this rank's micro-batches of a step: random tokens."""
        dp, dp_rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
        samples = range(dp_rank, self._options.global_batch_size, dp)
        for first in range(0, len(samples), self._micro_batch):
            rows = torch.stack(
                [self._row(number, each) for each in samples[first : first + self._micro_batch]]
            )
            yield rows[:, :-1].to(DEVICE), rows[:, 1:].to(DEVICE)

    def _row(self, number: int, sample: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(number * 1000 + sample)
        shape = (self._options.seq_length + 1,)
        return torch.randint(self._options.vocabulary, shape, generator=random)


def checkpoint_state(job: Job, step: int, *, is_loading: bool) -> dict[str, Any]:
    """Return Megatron's sharded state, as megatron.training's checkpoints have it."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }
    model = job.model.module.sharded_state_dict(metadata=metadata)
    optimizer = job.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer, "iteration": step}


def save(job: Job, step: int, folder: Path) -> None:
    """Save as Megatron does by default: torch_dist, fully parallel."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    strategy = FullyParallelSaveStrategyWrapper(
        get_default_save_sharded_strategy("torch_dist"),
        mpu.get_data_parallel_group(with_context_parallel=True),
    )
    dist_checkpointing.save(checkpoint_state(job, step, is_loading=False), str(folder), strategy)


def load(job: Job, folder: Path) -> int:
    """Load what ``save`` wrote; return the step."""
    loaded = dist_checkpointing.load(checkpoint_state(job, 0, is_loading=True), str(folder))
    job.model.module.load_state_dict(loaded["model"])
    job.optimizer.load_state_dict(loaded["optimizer"])
    return int(loaded["iteration"])


def parser() -> argparse.ArgumentParser:
    """Return the flags of model and batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--seq-length", type=int, default=32)
    parser.add_argument("--global-batch-size", type=int, default=2)
    parser.add_argument("--marks", type=Path, required=True)
    parser.add_argument("--tp", type=int, default=1, help="under torchrun; else the session's")
    return parser


def arguments() -> argparse.Namespace:
    options = parser()
    options.add_argument("--round", help="under torchrun; else the restart count")
    options.add_argument("--steps", type=int, help="steps of this round, under torchrun")
    options.add_argument("--load", type=Path)
    options.add_argument("--save", type=Path)
    options.add_argument("--pairs", type=int, help="compare steps with and without the boundary")
    return options.parse_args()


def train(options: argparse.Namespace, session: Session, job: Job, marks: Marks, step: int) -> int:
    """Make steps until the session or the options end it; return the last one's number."""
    first = step
    while not is_last(options, first, step):
        began = time.monotonic()
        loss = job.step(step)
        step += 1
        marks.note("step", step=step, took_s=time.monotonic() - began, loss=loss)
        if session.boundary(step=step, samples=options.global_batch_size):
            marks.note("written")
            break
        if session.is_stopped:  # the next step ends at the door of its update, and this process
            marks.note("written")
    return step


def compare_pairs(options: argparse.Namespace, session: Session, job: Job, marks: Marks) -> None:
    """Make pairs of steps, one with the boundary and one without, in alternating order."""
    for number in range(options.pairs):
        seconds: dict[str, Any] = {}
        for is_on in (True, False) if number % 2 else (False, True):
            began = time.perf_counter()
            job.step(number)
            if is_on:
                session.boundary(step=number + 1, samples=options.global_batch_size)
            seconds["on" if is_on else "off"] = time.perf_counter() - began
        marks.note("pair", **seconds)


def main() -> None:
    options = arguments()
    with scalai.elastic(tp=options.tp) as session:
        entered = time.monotonic(), time.process_time()
        if DEVICE == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(BACKEND)
        mpu.initialize_model_parallel(session.tp, session.pp)
        torch.manual_seed(SEED)
        model_parallel_cuda_manual_seed(SEED)
        marks = Marks(options.marks, options.round or os.environ["TORCHELASTIC_RESTART_COUNT"])
        for event, at in (("script", STARTED), ("imported", IMPORTED), ("entered", entered)):
            marks.note(event, at)
        marks.note("connected")
        dp = mpu.get_data_parallel_world_size()
        init_num_microbatches_calculator(dist.get_rank(), None, options.global_batch_size, 1, dp)
        is_restoring = options.load is not None or session.restorable_step is not None
        session.begin_build()
        job = Job(options, session, is_restoring)
        marks.note("built", layout=f"tp{session.tp}-dp{dp}")
        session.attach(MegatronState(job.model, job.optimizer, seed=SEED))
        step = session.step if options.load is None else load(job, options.load)
        marks.note("restored", step=step)
        if options.pairs:
            compare_pairs(options, session, job, marks)
        else:
            step = train(options, session, job, marks, step)
        if options.save is not None:
            save(job, step, options.save)
            marks.note("saved")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
