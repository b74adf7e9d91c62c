"""Training scripts as people write them: they know nothing of Scalai. What they note is for the
tests."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.dataloader import RepeatingLoader
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import scalai
from support.training.rounds_worker import note

SAMPLES, WIDTH, CLASSES, MICRO_BATCH = 24, 6, 4, 3
CONFIG = {
    "train_batch_size": 6,
    "train_micro_batch_size_per_gpu": 3,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "steps_per_print": 10**9,
}
"""Four steps an epoch."""


class Rows(Dataset[Any]):
    """Rows of noise with a class each, and their numbers."""

    def __init__(self, samples: int = SAMPLES, *, is_numbered: bool = True) -> None:
        generator = torch.Generator().manual_seed(7)
        self.rows = torch.randn(samples, WIDTH, generator=generator)
        self.classes = torch.randint(CLASSES, (samples,), generator=generator)
        self.is_numbered = is_numbered

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return (self.rows[index], self.classes[index], index)[: 2 + self.is_numbered]


def build_model() -> torch.nn.Module:
    torch.manual_seed(3)
    layers = torch.nn.Linear(WIDTH, 10), torch.nn.Tanh(), torch.nn.Linear(10, CLASSES)
    return torch.nn.Sequential(*layers)


def build_engine(model: torch.nn.Module, optimizer: Any = None, **more: Any) -> Any:
    deepspeed.init_distributed()
    config = {**CONFIG, **more}
    if optimizer is not None:
        del config["optimizer"]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, model_parameters=model.parameters()
    )
    return engine


def loss_of(engine: Any, rows: Any, classes: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(engine(rows), classes)


def loaded(data: Rows, *dp: Any) -> tuple[Any, Any]:
    """Return a loader for training and its sampler."""
    sampler: Any = DistributedSampler(data, *dp)
    return DataLoader(data, MICRO_BATCH, sampler=sampler), sampler


def scale_of(is_by_rank: bool) -> float:
    """Make a loss another one on another number of ranks."""
    return 1.0 + 1e-4 * torch.distributed.get_world_size() if is_by_rank else 1.0


def train(engine: Any, epochs: int, scale: float = 1.0) -> Iterator[Any]:
    """Train; yield each step, and behind each epoch its number."""
    loader, sampler = loaded(Rows())
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        losses: list[torch.Tensor] = []
        drawn: list[int] = []
        for rows, classes, numbers in loader:
            loss = scale * loss_of(engine, rows, classes)
            engine.backward(loss)
            losses.append(loss.detach())
            drawn += numbers.tolist()
            rate = engine.optimizer.param_groups[0]["lr"]
            is_whole = engine.is_gradient_accumulation_boundary()
            engine.step()
            if is_whole:
                total = torch.stack(losses).mean()
                torch.distributed.all_reduce(total)
                mean = float(total) / torch.distributed.get_world_size()
                yield SimpleNamespace(number=engine.global_steps, rate=rate, loss=mean, drawn=drawn)
                losses, drawn = [], []
        yield epoch


def score_of(engine: Any) -> float:
    """Evaluate on some rows, as scripts do between steps."""
    rows = Rows(8)
    engine.eval()
    with torch.no_grad():
        score = float(loss_of(engine, rows.rows, rows.classes))
    engine.train()
    return score


SCHEDULES: dict[str, Any] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda at: (at + 1) / 20),
}


def trains(
    epochs: int = 1, *, dropout: float = 0.0, is_by_rank: bool = False, schedule: str = "",
    is_before: bool = True, is_each_step: bool = False, in_eval: bool = False, saves: str = "",
    patience: int = 0, asks: bool = False, is_offloaded: bool = False, output: str = "",
    per_rank: int = 0, config: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """A torch loop.

    Args:
        schedule: Schedule that it steps itself, made before the engine or behind it.
        in_eval: It trains without dropout, in eval(), and evaluates behind each epoch.
        saves: It has a best checkpoint behind epochs, by the "epoch", or by the "step": by
            something that it asks of the weights of now.
        patience: It ends behind so many epochs without a better evaluation; unless it ``asks``,
            also where it goes through them again.
        is_offloaded: The state is away between epochs, as in loops that generate there.
        per_rank: It computes its global batch, of so many samples a rank.
    """
    if per_rank:
        deepspeed.init_distributed()
        batch = per_rank * torch.distributed.get_world_size()
        config = {**(config or {}), "train_batch_size": batch}
    model = torch.nn.Sequential(build_model(), torch.nn.Dropout(dropout))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01) if schedule else None
    made = SCHEDULES[schedule](optimizer) if schedule and is_before else None
    engine = build_engine(model, optimizer, **(config or {}))
    if schedule and not is_before:
        made = SCHEDULES[schedule](optimizer)
    if in_eval:
        engine.eval()
    rows = Rows(9)
    evaluated: Any = DataLoader(rows, MICRO_BATCH, sampler=DistributedSampler(rows, shuffle=False))
    best, waited = [-1], [0]
    for step in train(engine, epochs, scale_of(is_by_rank)):
        is_epoch = isinstance(step, int)
        if made is not None and is_each_step != is_epoch:
            made.step()
        if not is_epoch:
            note(step=step.number, rate=step.rate, loss=step.loss)
            continue
        if in_eval:
            seen = 0
            for values, *_ in evaluated:
                with torch.no_grad():
                    engine(values)
                seen += len(values)
            note(seen=seen)
        if saves:
            note(score=score_of(engine))
            if step > 0 if saves == "epoch" else engine.global_steps > 4:
                engine.save_checkpoint(output, tag=f"best-{step}")  # line: best
        if is_offloaded:
            engine.offload_states(pin_memory=False)
            engine.reload_states()
        if patience and not (asks and scalai.elastic().is_replaying):
            score = engine.global_steps  # of the weights of now
            waited[0] = 0 if score > best[0] else waited[0] + 1
            best[0] = max(best[0], score)
            if waited[0] >= patience:
                break


def trains_in_stages(
    steps: int, *, dropout: float = 0.0, is_by_rank: bool = False, saves: str = "",
    output: str = "",
) -> None:  # fmt: skip
    """A pipeline. ``saves``: it counts its steps, and evaluates and saves on the way, by the "step"
    or by the "score" of the weights of now; empty: it asks the engine for its steps."""
    deepspeed.init_distributed()
    scale = scale_of(is_by_rank)
    torch.manual_seed(3)
    model = PipelineModule(
        layers=[
            LayerSpec(torch.nn.Linear, WIDTH, 10), LayerSpec(torch.nn.Dropout, dropout),
            LayerSpec(torch.nn.Tanh), LayerSpec(torch.nn.Linear, 10, CLASSES),
        ],
        num_stages=scalai.elastic().pp, partition_method="uniform",
        loss_fn=lambda logits, classes: scale * torch.nn.functional.cross_entropy(logits, classes),
    )  # fmt: skip
    grid = model.mpu()
    loader, _ = loaded(Rows(is_numbered=False), grid.data_parallel_size, grid.data_parallel_id)
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.01}}
    engine, *_ = deepspeed.initialize(
        model=model, config={**CONFIG, "scheduler": schedule, "gradient_clipping": 0.1},
        model_parameters=list(model.parameters()),
    )  # fmt: skip
    batches, scores, step = iter(RepeatingLoader(loader)), list[float](), 0
    while (step if saves else engine.global_steps) < steps:
        loss = float(engine.train_batch(batches))
        weights = [float(p.double().sum()) for p in model.parameters()]
        note(step=engine.global_steps, loss=loss, weights=weights, rate=engine.get_lr()[0])
        if saves and step % 3 == 1:
            evaluated: Any = DataLoader(Rows(6, is_numbered=False), MICRO_BATCH)
            scores.append(float(engine.eval_batch(iter(evaluated))))
            if saves == "step" or scores[-1] in scores[:-1]:
                engine.save_checkpoint(output, tag=f"step-{step}")  # line: piped
        step += 1


def keeps_best(epochs: int, output: str, best_at: int, back_at: int) -> None:
    """Keeps its best checkpoint and ends with it; where its loss jumps, here once at a step, it
    goes back to it. Then it saves what it has come to."""
    engine, jumped = build_engine(build_model()), Path(output, "jumped")
    for step in train(engine, epochs):
        if isinstance(step, int):
            continue
        note(step=step.number, drawn=step.drawn)
        if step.number == best_at and not jumped.exists():
            engine.save_checkpoint(output, tag="best")
            note(best=score_of(engine))
        if step.number == back_at and not jumped.exists():
            torch.distributed.barrier()
            engine.load_checkpoint(output, tag="best")
            jumped.touch()
            note(gone_back=score_of(engine), to=engine.global_steps)
    note(at_end=score_of(engine))
    path, _ = engine.load_checkpoint(output, tag="best")
    note(loaded=score_of(engine), step=engine.global_steps, path=path)
    engine.save_checkpoint(output, tag="final")
    engine.save_16bit_model(output, "final.bin")


def fine_tunes(output: str) -> None:
    """Begins with weights that were trained before, and resumes where it finds a checkpoint."""
    engine = build_engine(build_model())
    engine.save_checkpoint(output, tag="trained")  # stands for another job
    weights, _ = engine.load_checkpoint(output, tag="trained", load_module_only=True)
    resumed, _ = engine.load_checkpoint(f"{output}/own")
    note(weights=weights is not None, resumed=resumed is not None)
    for step in train(engine, 1):
        if not isinstance(step, int):
            note(step=step.number)


class Average:
    """A copy of the weights that follows them slowly, as people write it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.shadow[name].mul_(0.9).add_(parameter.detach(), alpha=0.1)


class Accuracy:
    """A metric that sums up over an epoch."""

    def __init__(self) -> None:
        self.right = self.total = 0

    def update(self, scores: torch.Tensor, classes: torch.Tensor) -> None:
        self.right += int((scores.argmax(1) == classes).sum())
        self.total += len(classes)


class Curriculum:
    """Makes the task harder with every step."""

    def __init__(self) -> None:
        self.difficulty = 0.1

    def advance(self) -> None:
        self.difficulty = min(1.0, self.difficulty * 1.01)


def keeps_beside(epochs: int, output: str, registers: bool = False) -> None:
    """A torch loop that keeps and does this and that beside the engine."""
    deepspeed.init_distributed()
    model = build_model()
    averaged = torch.optim.swa_utils.AveragedModel(model)  # line: averaged
    average = Average(model)  # line: average
    accuracy = Accuracy()  # line: accuracy
    curriculum = Curriculum()  # line: curriculum
    done = 0  # line: done
    if registers:

        def put(values: torch.Tensor) -> None:
            torch.nn.utils.vector_to_parameters(values, average.shadow.values())

        def take() -> torch.Tensor:
            return torch.nn.utils.parameters_to_vector(average.shadow.values())

        scalai.elastic().register_state("average", take, put)
    engine = build_engine(model)
    loader, sampler = loaded(Rows())
    evaluated = DataLoader(Rows(8), 4)
    total = 0.0  # line: total
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for place, (rows, classes, _) in enumerate(loader):
            scores = engine(rows)
            loss = torch.nn.functional.cross_entropy(scores, classes)
            engine.backward(loss)
            is_whole = engine.is_gradient_accumulation_boundary()
            engine.step()
            if not is_whole:
                continue
            average.update(model)
            averaged.update_parameters(model)
            accuracy.update(scores, classes)
            curriculum.advance()
            total += loss.item()
            done += 1
            shadow = sum(float(values.sum()) for values in average.shadow.values())
            note(step=engine.global_steps, done=done, place=place, shadow=shadow)
        engine.eval()
        with torch.no_grad():
            for rows, *_ in evaluated:  # line: evaluated
                engine(rows)
        engine.train()
        torch.save({"epoch": epoch}, f"{output}/own-{epoch}.pt")  # line: saved


def draws_in_order(steps: int, samples: int, later: int) -> None:
    """A loop that draws in Scalai's own order. ``later``: samples behind the first round."""
    engine, job = build_engine(build_model()), scalai.elastic()
    order = scalai.Shuffled(later if job.facts else samples, seed=5)
    micro = engine.train_micro_batch_size_per_gpu()
    batches = scalai.OrderedBatches(job, order, 6, micro_batch_size=micro)
    drawn = iter(DataLoader(Rows(), batch_sampler=batches))
    while engine.global_steps < steps:
        numbers: list[int] = []
        for _ in range(engine.gradient_accumulation_steps()):
            rows, classes, found = next(drawn)
            engine.backward(loss_of(engine, rows, classes))
            numbers += found.tolist()
            engine.step()
        note(step=engine.global_steps, drawn=numbers)


def accelerates(
    config: dict[str, Any], epochs: int = 1, *, kind: str = "", samples: int = 0,
    micro_batch: int = 1, seeding: bool | None = None, names: str = "", output: str = "",
) -> None:  # fmt: skip
    """A loop on Accelerate.

    Args:
        kind: Of a schedule that it prepares, by epoch, or by step and number of ranks; empty: none,
            and it does not know of accumulation.
        samples, micro_batch: Of an evaluation set, measured on behind each epoch; 0: none.
        seeding: It seeds before it shuffles: True: each rank otherwise.
        names: Under which it saves its state: its own by epoch or counter, or Accelerate's.
    """
    from accelerate import Accelerator, PartialState
    from accelerate.utils import (
        DataLoaderConfiguration,
        DeepSpeedPlugin,
        ProjectConfiguration,
        set_seed,
    )

    PartialState(cpu=True)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(config),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        project_config=ProjectConfiguration(
            output or None, automatic_checkpoint_naming=names == "automatic"
        ),
    )
    model: Any = build_model()
    if seeding is not None:
        set_seed(5, device_specific=seeding)
    loader: Any = DataLoader(Rows(), 2, shuffle=True)
    optimizer, scheduler = _optimizer_of(model, kind, accelerator, epochs, len(loader))
    evaluated = DataLoader(Rows(samples), micro_batch) if samples else None
    others = [each for each in (scheduler, evaluated) if each is not None]
    model, optimizer, loader, *others = accelerator.prepare(model, optimizer, loader, *others)
    is_by_epoch, done = kind in ("epoch", "plateau"), 0
    for epoch in range(epochs):
        if samples:
            model.train()
        for rows, classes, _ in loader:
            with accelerator.accumulate(model) if kind else nullcontext():
                accelerator.backward(loss_of(model, rows, classes))
                optimizer.step()
                if kind and not is_by_epoch:
                    others[0].step()
                optimizer.zero_grad()
            if not kind or not accelerator.sync_gradients:
                continue
            rates = model.get_lr() if kind == "engine's" else [optimizer.param_groups[0]["lr"]]
            note(step=model.global_steps, rate=rates[0])
            done += 1
            if names == "counted" and done % 3 == 0:
                accelerator.save_state(f"{output}/step_{done}")
        if is_by_epoch:
            others[0].step(*((3.0,) if kind == "plateau" else ()))
        if names in ("automatic", "epochs"):
            accelerator.save_state(*([f"{output}/epoch_{epoch}"] if names == "epochs" else []))
        if samples:
            model.eval()
            seen: list[int] = []
            for rows, _, numbers in others[-1]:
                with torch.no_grad():
                    model(rows)
                seen += accelerator.gather_for_metrics(numbers).tolist()
            note(epoch=epoch, step=model.global_steps, seen=seen)
    if kind and not names and kind != "engine's":
        note(ranks=accelerator.num_processes, length=len(loader))


def _optimizer_of(
    model: Any, kind: str, accelerator: Any, epochs: int, length: int
) -> tuple[Any, Any]:
    """Return an optimizer and its schedule, as people write them; ``engine's``: the engine makes
    it, for steps that Accelerate computes."""
    from accelerate.utils import DummyOptim, DummyScheduler

    if kind == "engine's":
        planned: Any = DummyOptim(model.parameters(), lr=0.01)
        return planned, DummyScheduler(planned, epochs * length, 3)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ranks, steps = accelerator.num_processes, epochs * SAMPLES // 4
    warm, total = {
        "ratio": (int(0.1 * (steps + 1) * ranks), (steps + 1) * ranks),
        "times ranks": (3 * ranks, epochs * length),
    }.get(kind, (1, 1))

    def curve(at: int) -> float:
        return at / warm if at < warm else max(0.0, (total - at) / (total - warm))

    makers: dict[str, Any] = {
        "": lambda: None,
        "epoch": lambda: lr_scheduler.StepLR(optimizer, 1, 0.5),
        "every third": lambda: lr_scheduler.StepLR(optimizer, 3),
        "plateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    }
    return optimizer, makers.get(kind, lambda: lr_scheduler.LambdaLR(optimizer, curve))()


class Scored(torch.nn.Module):
    """A model that makes its own loss, as Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build_model()

    def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.inner(rows)
        return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}


def calls_back(steps: int, output: str, config: dict[str, Any], **more: Any) -> None:
    """A script on Trainer with a callback that counts for itself.

    Args:
        more: Arguments of Trainer.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Counting(TrainerCallback):
        def __init__(self) -> None:
            self.n = 0  # line: counting

        def on_train_begin(self, *_: Any, **given: Any) -> None:
            for group in given["optimizer"].param_groups:
                group["weight_decay"] *= 0.5

        def on_step_begin(self, arguments: Any, state: Any, *_: Any, **given: Any) -> None:
            for group in given["optimizer"].param_groups:
                group["betas"] = (0.9, 1.0 - 1.0 / (state.global_step + 10))

        def on_evaluate(self, arguments: Any, state: Any, *_: Any, **given: Any) -> None:
            note(evaluated=state.global_step)

        def on_log(self, arguments: Any, state: Any, *_: Any, **given: Any) -> None:
            if "loss" in given["logs"]:
                note(logged=given["logs"]["loss"])

        def on_step_end(self, *_: Any, **given: Any) -> None:
            self.n += 1
            groups = given["optimizer"].param_groups
            note(n=self.n, decays=[g["weight_decay"] for g in groups], betas=groups[0]["betas"])

    arguments = TrainingArguments(
        output_dir=output, per_device_train_batch_size=2, max_steps=steps, use_cpu=True,
        weight_decay=0.1, deepspeed=config, save_strategy="no", report_to=[], disable_tqdm=True,
        **more,
    )  # fmt: skip
    rows = map(Rows().__getitem__, range(SAMPLES))
    data: Any = [{"rows": row, "labels": kind} for row, kind, _ in rows]
    callbacks = [Counting()]
    Trainer(Scored(), arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks).train()
