"""Runs tiny DeepSpeed jobs: reads one as JSON a line, answers with what each rank saw.

DeepSpeed is imported once; the ranks of a job are forks, so that each job begins afresh.
"""

import contextlib
import importlib
import json
import multiprocessing
import os
import runpy
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

STEPS = 6
SAVED_AFTER = 3
VOCABULARY, HIDDEN, LAYERS, SAMPLES, LENGTH = 31, 17, 2, 12, 5
MICRO_BATCHES = 2

JOB_S = 180
"""How long the ranks of a job may take."""
AFTER_A_FAILURE_S = 2
IMPORTED_LATE = ("torch._dynamo", "deepspeed.runtime.zero.muon.muon_optimizer")
"""What the first optimizer and the first engine import, in four seconds of each rank: the latter
compiles functions as it is imported, which takes torch._inductor. Not every release has it."""
OF_SCRIPTS = ("transformers.trainer", "accelerate")

FP16 = {"enabled": True, "hysteresis": 1}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16-fp32": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    # Overflows before the checkpoint, and grows after it.
    "fp16": {"fp16": {**FP16, "initial_scale_power": 13, "loss_scale_window": 1}},
    "fp16-static": {"fp16": {**FP16, "loss_scale": 128}},
    "fp16-unscaled": {"fp16": {**FP16, "loss_scale": 1}},
}
INFO: dict[str, Any] = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": [r".*norm\.", r".*down_bias", r".*embed"],
    "parameter_with_row_parallelism_patterns": [r".*\.down$"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*gate_up"],
}
"""What Megatron-DeepSpeed says of the parameters of ``deepspeed_parallel``; what no pattern has is
cut along dimension 0."""


@dataclass(frozen=True)
class Job:
    """A job: its engine, and what it does. Without ``load`` it trains ``STEPS`` steps and, if
    asked, saves in between and, as a tag that is not the latest, at the end; with it, it trains
    those that are left.

    With ``tp`` or ``pp`` it is the model of ``deepspeed_parallel``; with ``pp`` as a pipeline,
    which may have one stage alone. With ``experts`` it is that of ``deepspeed_experts``, each layer
    of which has as many. ``info`` is what such a client says of its parameters, as
    ``universal_checkpoint_info``; ``automatic``: AutoTP cuts a plain model.

    A ``fused`` optimizer is what DeepSpeed takes for its FusedAdam, with torch's arithmetic;
    ``compiled`` names one of its own, which count their steps in whole numbers.
    ``separate_steps`` repairs what a universal load of stage 3 leaves, and ``scheduled_rates``
    what one of an elastic checkpoint leaves, as the converter's notes say. ``weights_only``: the
    optimizer's states are not loaded. ``backwards``: the optimizer has each group's last first.
    """

    world: int = 1
    tp: int = 0
    pp: int = 0
    experts: tuple[int, ...] = ()
    ep: int = 1
    tied: bool = True
    partition: str = "parameters"
    has_buffer: bool = True
    automatic: bool = False
    info: dict[str, Any] | None = None
    stage: int = 1
    precision: str = "fp32"
    frozen: bool = True
    empty: bool = False
    decay: tuple[float, float] = (0.1, 0.0)
    fused: bool = False
    compiled: str = ""
    separate_steps: bool = False
    weights_only: bool = False
    backwards: bool = False
    scheduled_rates: bool = False
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    save: str | None = None
    load: str | None = None
    gpt: dict[str, Any] | None = None
    """A model of ``hugging_models``, trained by ``hugging_jobs`` as Megatron trains its own."""
    script: list[str] | None = None
    """A script and its arguments, which torchrun would start; nothing else of the job counts."""


Runner = Callable[[Job], list[dict[str, Any]]]
"""Runs a job; returns what each rank saw."""
Saver = Callable[[Job], tuple[Path, list[dict[str, Any]]]]
"""Runs a job that saves; returns where, too."""


def serve() -> None:
    """Answer jobs until the input ends."""
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed prints
    deepspeed = import_all()
    deepspeed.ops.__compatible_ops__.clear()  # nothing is compiled
    # Torch computes in fp16 on every CPU; DeepSpeed asks whether there are fast kernels.
    type(deepspeed.accelerator.get_accelerator()).is_fp16_supported = lambda _: True

    context = multiprocessing.get_context("fork")
    for line in sys.stdin:
        job = Job(**json.loads(line))
        if job.script is not None:
            for module in OF_SCRIPTS:
                importlib.import_module(module)
        if job.compiled:
            builder = f"{job.compiled.removeprefix('DeepSpeed')}Builder"
            getattr(deepspeed.ops.op_builder, builder)().load(verbose=False)
        with tempfile.NamedTemporaryFile() as meeting:
            pipes, ranks = [], []
            for rank in range(job.world):
                here, there = context.Pipe(duplex=False)
                process = context.Process(target=answer, args=(job, rank, meeting.name, there))
                process.start()
                there.close()
                pipes.append(here)
                ranks.append(process)
            answers = collect(pipes)
            for process in ranks:
                process.join(AFTER_A_FAILURE_S)
                process.kill()
                process.join(AFTER_A_FAILURE_S)
        print(json.dumps(answers), file=output, flush=True)


def import_all() -> Any:
    """Import DeepSpeed, and what a job of it would import later, before processes are forked."""
    import deepspeed

    for module in IMPORTED_LATE:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    return deepspeed


def collect(pipes: Sequence[Any]) -> list[Any]:
    """Return the ranks' answers. Where one fails the others wait in vain for it."""
    answers: dict[Any, Any] = {}
    deadline = time.monotonic() + JOB_S
    while len(answers) < len(pipes):
        left = [pipe for pipe in pipes if pipe not in answers]
        ready: list[Any] = wait(left, max(deadline - time.monotonic(), 0))
        if not ready:
            break
        for pipe in ready:
            try:
                answers[pipe] = pipe.recv()
            except EOFError:
                answers[pipe] = {"error": "the process died"}
            if "error" in answers[pipe]:
                deadline = min(deadline, time.monotonic() + AFTER_A_FAILURE_S)
    return [answers.get(pipe, {"error": "no answer in time"}) for pipe in pipes]


def answer(job: Job, rank: int, meeting: str, pipe: Any) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.world))
    try:
        if job.script is not None:
            pipe.send(run_script(job, meeting))
        elif job.gpt is not None:
            from support.training.hugging_jobs import run as run_gpt

            pipe.send(run_gpt(job, meeting))
        else:
            pipe.send(run(job, meeting))
    except BaseException:
        pipe.send({"error": traceback.format_exc()})


def run_script(job: Job, meeting: str) -> dict[str, Any]:
    """Run a script as torchrun would."""
    assert job.script is not None
    os.environ.update(
        MASTER_ADDR="localhost", MASTER_PORT=str(20000 + hash(meeting) % 10000),
        LOCAL_WORLD_SIZE=str(job.world),
    )  # fmt: skip
    sys.argv = job.script
    runpy.run_path(job.script[0], run_name="__main__")
    return {}


def join(job: Job, meeting: str) -> None:
    """Meet the other ranks."""
    import deepspeed

    deepspeed.init_distributed(
        dist_backend="gloo",
        init_method=f"file://{meeting}.meet",
        rank=int(os.environ["RANK"]),
        world_size=job.world,
        auto_mpi_discovery=False,
        verbose=False,
    )


def run(job: Job, meeting: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    join(job, meeting)
    torch.manual_seed(1 if job.load is None else 2)
    engine = make_engine(job)
    seen: dict[str, Any] = {"losses": [], "rates": []}
    first = 0
    if job.load is not None:
        path, client_state = engine.load_checkpoint(
            job.load, load_optimizer_states=not job.weights_only
        )
        assert path is not None, f"nothing was loaded from {job.load}"
        if job.separate_steps:
            for state in engine.optimizer.optimizer.state.values():
                state["step"] = state["step"].clone()
        if job.scheduled_rates:
            rates = engine.lr_scheduler.get_last_lr()
            for group, rate in zip(engine.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        seen["client_state"] = client_state["note"]
        first = engine.global_steps
        assert first == SAVED_AFTER
        seen["loaded"] = describe(engine)
    for step in range(first, STEPS):
        seen["losses"].append(train(engine, job, step))
        seen["rates"].append([group["lr"] for group in engine.optimizer.param_groups])
        if step + 1 == SAVED_AFTER and job.save is not None:
            client: dict[str, Any] = {"note": {"text": "kept", "n": 7}}
            if job.info:
                client["universal_checkpoint_info"] = job.info
            engine.save_checkpoint(job.save, client_state=client)
            seen["saved"] = describe(engine)
    if job.save is not None:
        engine.save_checkpoint(job.save, client_state={"note": {}}, save_latest=False)
    dist.barrier()
    dist.destroy_process_group()
    return seen


def train(engine: Any, job: Job, step: int) -> float:
    """Make a step; return the mean loss of all ranks."""
    import torch.distributed as dist

    if job.pp:
        dp = engine.grid.get_data_parallel_world_size()
        own = batch(step, engine.grid.get_data_parallel_rank(), dp)
        parts = zip(*(values.chunk(MICRO_BATCHES) for values in own), strict=True)
        return float(engine.train_batch(iter(list(parts))))
    dp = job.world // max(job.tp, 1)
    loss = engine(*batch(step, dist.get_rank() // max(job.tp, 1), dp))
    engine.backward(loss)
    engine.step()
    total = loss.detach().float().clone()
    dist.all_reduce(total)
    return total.item() / job.world


def describe(engine: Any) -> dict[str, Any]:
    """Return what is not trained and must have travelled."""
    import deepspeed

    frozen = {n: p for n, p in engine.module.named_parameters() if not p.requires_grad}
    with deepspeed.zero.GatheredParameters(list(frozen.values())):
        values = {name: parameter.tolist() for name, parameter in frozen.items()}
    return {
        "frozen": values,
        "buffers": {name: value.tolist() for name, value in engine.module.named_buffers()},
        "decay": [group["weight_decay"] for group in engine.optimizer.param_groups],
        "samples": engine.global_samples,
        "scale": describe_scale(engine.optimizer),
    }


def describe_scale(optimizer: Any) -> dict[str, Any]:
    """Return the state of the loss scale, as far as all stages keep it."""
    kept = getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)
    if kept is None:
        return {"scale": 1.0}
    is_dynamic = getattr(kept, "dynamic", False) or getattr(kept, "dynamic_loss_scale", False)
    names = ["cur_iter", "last_overflow_iter", "scale_window"] if is_dynamic else []
    return {"scale": kept.cur_scale, **{name: getattr(kept, name) for name in names}}


def make_engine(job: Job) -> Any:
    import deepspeed
    import torch

    model, mpu = make_model(job.frozen, job.empty), None
    if (job.tp or job.pp) and not job.automatic:
        from support.training.deepspeed_parallel import make_parallel_model

        model, mpu = make_parallel_model(job)
    elif job.automatic:
        from support.training.deepspeed_parallel import Automatic

        model = Automatic()
    elif job.experts:
        from support.training.deepspeed_experts import Routed

        model = Routed(job)
    micro_batches = MICRO_BATCHES if job.pp else 1
    dp = job.world // max(job.tp, 1) // max(job.pp, 1)
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [
        {"params": members[::-1] if job.backwards else members, "weight_decay": decay}
        for members, decay in zip((decayed, others), job.decay, strict=True)
    ]
    if job.experts:
        from support.training.deepspeed_experts import split

        groups = split(groups)
    kind = getattr(deepspeed.ops.adam, job.compiled) if job.compiled else torch.optim.AdamW
    optimizer = kind(groups, lr=1e-2)
    if job.fused:
        optimizer.__class__ = fused_adam()
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // dp // micro_batches,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": job.stage, **job.zero},
        **PRECISIONS[job.precision],
        **job.config,
    }
    if job.automatic and job.tp > 1:
        from support.training.deepspeed_parallel import automatic_config

        config |= automatic_config(job.tp)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config, mpu=mpu
    )
    return engine


def fused_adam() -> Any:
    """Return torch's AdamW as a class that DeepSpeed takes for its own, which is compiled."""
    import torch
    from deepspeed.ops.adam import FusedAdam

    class Fused(torch.optim.AdamW, FusedAdam):
        zero_grad = torch.optim.Optimizer.zero_grad

    return Fused


def make_model(is_partly_frozen: bool, has_empty: bool) -> Any:
    """Return a model with sizes that nothing divides, frozen and shared parameters, one of a single
    element (DeepSpeed takes none without dims), if asked two without elements, and buffers of
    several dtypes, one without dims."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(HIDDEN)
            self.up = nn.Linear(HIDDEN, 3 * HIDDEN + 1)
            self.down = nn.Linear(3 * HIDDEN + 1, HIDDEN)
            self.down.bias.requires_grad_(not is_partly_frozen)

        def forward(self, x: Any) -> Any:
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    class Model(nn.Module):
        calls: torch.Tensor
        average: torch.Tensor
        is_seen: torch.Tensor
        order: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
            self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
            self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
            self.head.weight = self.embedding.weight
            self.scale = nn.Parameter(torch.tensor([0.5]))
            if has_empty:
                self.none = nn.Parameter(torch.zeros(0, 3))
                self.nothing = nn.Parameter(torch.zeros(2, 0))
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.register_buffer("average", torch.zeros(3))
            self.register_buffer("is_seen", torch.zeros(3, 2, dtype=torch.bool))
            self.register_buffer("order", torch.arange(5, dtype=torch.int32))

        def forward(self, tokens: Any, labels: Any) -> Any:
            self.calls += 1
            self.average.mul_(0.5).add_(1)
            self.is_seen[int(self.calls) % 3] = True
            self.order.add_(1)
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            logits = self.head(x) * self.scale
            return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    return Model()


def batch(step: int, rank: int, world: int) -> Any:
    """Return a rank's part of a step's samples: the whole does not depend on the world."""
    import torch

    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
    own = tokens.chunk(world)[rank]
    return own[:, :-1].contiguous(), own[:, 1:].contiguous()


def as_line(job: Job) -> str:
    """Return a job as ``serve`` reads it."""
    return json.dumps(asdict(job)) + "\n"


if __name__ == "__main__":
    serve()
