"""Training scripts as people write them: they know nothing of Scalai. What they note is for the
tests."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
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

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(7)
        self.rows = torch.randn(samples, WIDTH, generator=generator)
        self.classes = torch.randint(CLASSES, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], self.classes[index], index


def build_model() -> torch.nn.Module:
    torch.manual_seed(3)
    layers = torch.nn.Linear(WIDTH, 10), torch.nn.Tanh(), torch.nn.Linear(10, CLASSES)
    return torch.nn.Sequential(*layers)


def loss_of(engine: Any, rows: Any, classes: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(engine(rows), classes)


def loaders() -> tuple[Any, Any]:
    """Return a loader for training and its sampler."""
    data = Rows()
    sampler: Any = DistributedSampler(data)
    return DataLoader(data, MICRO_BATCH, sampler=sampler), sampler


def begun(**config: Any) -> tuple[Any, Any, Any]:
    """Return an engine, and a loader for training with its sampler."""
    deepspeed.init_distributed()
    return build_engine(build_model(), **config), *loaders()


def steps_of(engine: Any, loader: Any) -> Iterator[tuple[float, float]]:
    """Train an epoch; yield each step's learning rate and loss."""
    losses = []
    for rows, classes, _ in loader:
        loss = loss_of(engine, rows, classes)
        engine.backward(loss)
        losses.append(loss.detach())
        rate = engine.optimizer.param_groups[0]["lr"]
        is_whole = engine.is_gradient_accumulation_boundary()
        engine.step()
        if is_whole:
            total = torch.stack(losses).mean()
            torch.distributed.all_reduce(total)
            yield rate, float(total) / torch.distributed.get_world_size()
            losses.clear()


def computes(stage: int, dropout: float, is_by_rank: bool) -> None:
    """Two epochs; ``is_by_rank``: the loss is another one on another number of ranks."""
    model = torch.nn.Sequential(build_model(), torch.nn.Dropout(dropout))
    engine = build_engine(model, zero_optimization={"stage": stage})
    loader, sampler = loaders()
    scale = 1.0 + 1e-4 * torch.distributed.get_world_size() if is_by_rank else 1.0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for rows, classes, _ in loader:
            engine.backward(scale * loss_of(engine, rows, classes))
            engine.step()
            note(step=engine.global_steps)


class Pairs(Rows):
    """As a pipeline reads them."""

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], self.classes[index]


def computes_in_stages(dropout: float, is_by_rank: bool) -> None:
    """Two epochs of a pipeline."""
    deepspeed.init_distributed()
    scale = 1.0 + 1e-4 * torch.distributed.get_world_size() if is_by_rank else 1.0
    torch.manual_seed(3)
    model = PipelineModule(
        layers=[
            LayerSpec(torch.nn.Linear, WIDTH, 10), LayerSpec(torch.nn.Dropout, dropout),
            LayerSpec(torch.nn.Tanh), LayerSpec(torch.nn.Linear, 10, CLASSES),
        ],
        num_stages=scalai.elastic().pp,
        partition_method="uniform",
        loss_fn=lambda logits, classes: scale * torch.nn.functional.cross_entropy(logits, classes),
    )  # fmt: skip
    topology = model._grid
    data, dp = Pairs(), (topology.data_parallel_size, topology.data_parallel_id)
    sampler: Any = DistributedSampler(data, *dp)
    loader = DataLoader(data, MICRO_BATCH, sampler=sampler)
    batches = (batch for _ in range(2) for batch in loader)
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.01}}
    engine, *_ = deepspeed.initialize(
        model=model, config={**CONFIG, "scheduler": schedule, "gradient_clipping": 0.1},
        model_parameters=model.parameters(),
    )  # fmt: skip
    while engine.global_steps < 2 * SAMPLES // 6:
        loss = float(engine.train_batch(batches))
        weights = [float(p.double().sum()) for p in model.parameters()]
        note(step=engine.global_steps, loss=loss, weights=weights, rate=engine.get_lr()[0])


def build_engine(model: torch.nn.Module, optimizer: Any = None, **more: Any) -> Any:
    config = {**CONFIG, **more}
    if optimizer is not None:
        del config["optimizer"]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, model_parameters=model.parameters()
    )
    return engine


SCHEDULES: dict[str, Any] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda at: (at + 1) / 20),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=30),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 3), torch.optim.lr_scheduler.StepLR(o, 2)],
        [3],
    ),
    "none of ours": lambda o: torch.optim.lr_scheduler.LambdaLR(o, _Unplain()),
}


class _Unplain:
    """A learning rate's function with a state that no text holds."""

    def __init__(self) -> None:
        self.seen = {1, 2}

    def __call__(self, at: int) -> float:
        return 1.0


def keeps_schedule(kind: str, is_before: bool, is_each_step: bool, epochs: int) -> None:
    """A torch loop that steps a schedule itself, each step or each epoch."""
    deepspeed.init_distributed()
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = SCHEDULES[kind](optimizer) if is_before else None
    engine = build_engine(model, optimizer)
    if schedule is None:
        schedule = SCHEDULES[kind](optimizer)
    reported = (3.0,) if kind == "ReduceLROnPlateau" else ()
    loader, sampler = loaders()
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for rate, _ in steps_of(engine, loader):
            note(step=engine.global_steps, rate=rate)
            if is_each_step:
                schedule.step(*reported)
        if not is_each_step:
            schedule.step(*reported)


def score_of(engine: Any) -> float:
    """Evaluate on some rows, as scripts do between steps."""
    rows = Rows(8)
    engine.eval()
    with torch.no_grad():
        score = float(loss_of(engine, rows.rows, rows.classes))
    engine.train()
    return score


def keeps_best(epochs: int, output: str, best_at: int, back_at: int) -> None:
    """Keeps its best checkpoint and ends with it; where its loss jumps, here once at a step, it
    goes back to it. Then it saves what it has come to."""
    engine, loader, sampler = begun()
    jumped = Path(output, "jumped")
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        drawn: list[int] = []
        for rows, classes, numbers in loader:
            engine.backward(loss_of(engine, rows, classes))
            is_whole = engine.is_gradient_accumulation_boundary()
            engine.step()
            drawn += numbers.tolist()
            if not is_whole:
                continue
            note(step=engine.global_steps, drawn=drawn)
            drawn = []
            if engine.global_steps == best_at and not jumped.exists():
                engine.save_checkpoint(output, tag="best")
                note(best=score_of(engine))
            if engine.global_steps == back_at and not jumped.exists():
                torch.distributed.barrier()
                engine.load_checkpoint(output, tag="best")
                jumped.touch()
                note(gone_back=score_of(engine), to=engine.global_steps)
    note(at_end=score_of(engine))
    path, _ = engine.load_checkpoint(output, tag="best")
    note(loaded=score_of(engine), step=engine.global_steps, path=path)
    engine.save_checkpoint(output, tag="final")
    engine.save_16bit_model(output, "final.bin")


def saves_by_steps(epochs: int, output: str, is_known: bool) -> None:
    """A loop that has a best checkpoint behind epochs, by something that it asks of the weights of
    now; ``is_known``: it follows from the epoch."""
    engine, loader, sampler = begun()
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for _ in steps_of(engine, loader):
            note(step=engine.global_steps)
        note(score=score_of(engine))
        if epoch > 0 if is_known else engine.global_steps > 4:
            engine.save_checkpoint(output, tag=f"best-{epoch}")  # line: best


def counts_pipeline_steps(steps: int, output: str, is_known: bool) -> None:
    """A pipeline whose script counts its steps, evaluates and saves on the way; ``is_known``: not
    by what follows from the weights of now."""
    from deepspeed.runtime.dataloader import RepeatingLoader

    deepspeed.init_distributed()
    rows = Rows()
    data: Any = [rows[number][:2] for number in range(SAMPLES)]
    model: Any = deepspeed.pipe.PipelineModule(
        list(build_model().children()), num_stages=1, partition_method="uniform",
        loss_fn=torch.nn.functional.cross_entropy,
    )  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model, config={**CONFIG, "zero_optimization": {"stage": 0}},
        model_parameters=list(model.parameters()),
    )  # fmt: skip
    sampler: Any = DistributedSampler(data)
    batches = iter(RepeatingLoader(DataLoader(data, MICRO_BATCH, sampler=sampler)))
    scores: list[float] = []
    for step in range(steps):
        loss = float(engine.train_batch(batches))
        note(step=step, loss=loss)
        if step % 3 == 1:
            evaluated: Any = DataLoader(data[:6], MICRO_BATCH)
            scores.append(float(engine.eval_batch(iter(evaluated))))
            if is_known or scores[-1] in scores[:-1]:
                engine.save_checkpoint(output, tag=f"step-{step}")  # line: piped


def fine_tunes(output: str) -> None:
    """Begins with weights that were trained before, and resumes where it finds a checkpoint."""
    deepspeed.init_distributed()
    engine = build_engine(build_model())
    engine.save_checkpoint(output, tag="trained")  # stands for another job
    weights, _ = engine.load_checkpoint(output, tag="trained", load_module_only=True)
    resumed, _ = engine.load_checkpoint(f"{output}/own")
    note(weights=weights is not None, resumed=resumed is not None)
    loader, _ = loaders()
    for _ in steps_of(engine, loader):
        note(step=engine.global_steps)


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
        import scalai

        def put(values: torch.Tensor) -> None:
            torch.nn.utils.vector_to_parameters(values, average.shadow.values())

        def take() -> torch.Tensor:
            return torch.nn.utils.parameters_to_vector(average.shadow.values())

        scalai.elastic().register_state("average", take, put)
    engine = build_engine(model)
    loader, sampler = loaders()
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


def counts_its_steps(steps: int) -> None:
    """A loop for so many steps, over a loader that repeats itself."""
    from deepspeed.runtime.dataloader import RepeatingLoader

    deepspeed.init_distributed()
    plan = {"type": "WarmupDecayLR", "params": {"total_num_steps": steps, "warmup_num_steps": 2}}
    engine = build_engine(build_model(), scheduler=plan)
    batches = iter(RepeatingLoader(loaders()[0]))
    for number in range(steps):  # line: number
        rows, classes, _ = next(batches)
        engine.backward(loss_of(engine, rows, classes))
        engine.step()
        note(step=engine.global_steps, number=number)


def stops_early(epochs: int, patience: int, asks: bool) -> None:
    """Ends where the evaluation does not become better; this one does for four epochs."""
    engine, loader, sampler = begun()
    best, waited = [-1], [0]
    if asks:
        import scalai

        scalai_job = scalai.elastic()
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for _ in steps_of(engine, loader):
            note(step=engine.global_steps)
        if asks and scalai_job.is_replaying:
            continue
        score = engine.global_steps  # of the weights of now
        waited[0] = 0 if score > best[0] else waited[0] + 1
        best[0] = max(best[0], score)
        if waited[0] >= patience:
            break


def trains(
    epochs: int = 1, *, in_eval: bool = False, resized_to: int = 0,
    is_offloaded: bool = False, config: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """A torch loop.

    Args:
        in_eval: It trains without dropout, in eval(), and evaluates behind each epoch.
        resized_to: Samples of a step behind the second one; 0: as configured.
        is_offloaded: The state is away between epochs, as in loops that generate there.
    """
    engine, loader, sampler = begun(**(config or {}))
    if in_eval:
        engine.eval()
    rows = Rows(9)
    evaluated: Any = DataLoader(rows, MICRO_BATCH, sampler=DistributedSampler(rows, shuffle=False))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for _, loss in steps_of(engine, loader):
            note(step=engine.global_steps, loss=loss)
            if resized_to and engine.global_steps == 2:
                engine.set_train_batch_size(resized_to)
        if in_eval:
            seen = 0
            for values, *_ in evaluated:
                with torch.no_grad():
                    engine(values)
                seen += len(values)
            note(seen=seen)
        if is_offloaded:
            engine.offload_states(pin_memory=False)
            engine.reload_states()


def draws_in_order(steps: int, samples: int, later: int) -> None:
    """A loop that draws in Scalai's own order; ``later``: how many
    samples there are behind the first round."""
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


def accelerator_of(config: dict[str, Any], **more: Any) -> Any:
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DataLoaderConfiguration, DeepSpeedPlugin

    PartialState(cpu=True)
    return Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(config),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        **more,
    )


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
    from accelerate.utils import ProjectConfiguration, set_seed

    project = ProjectConfiguration(output or None, automatic_checkpoint_naming=names == "automatic")
    accelerator = accelerator_of(config, project_config=project)
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
                accelerator.save_state(f"{output}/step_{done}")  # line: counted
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
    schedules, ranks = torch.optim.lr_scheduler, accelerator.num_processes
    steps = epochs * SAMPLES // 4
    warm, total = {
        "ratio": (int(0.1 * (steps + 1) * ranks), (steps + 1) * ranks),
        "times ranks": (3 * ranks, epochs * length),
    }.get(kind, (1, 1))
    makers: dict[str, Any] = {
        "": lambda: None,
        "epoch": lambda: schedules.StepLR(optimizer, 1, 0.5),
        "every third": lambda: schedules.StepLR(optimizer, 3),
        "plateau": lambda: schedules.ReduceLROnPlateau(optimizer, patience=0),
    }
    plain = lambda: schedules.LambdaLR(  # noqa: E731
        optimizer, lambda at: at / warm if at < warm else max(0.0, (total - at) / (total - warm))
    )
    return optimizer, makers.get(kind, plain)()


class Scored(torch.nn.Module):
    """A model that makes its own loss, as Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build_model()

    def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.inner(rows)
        return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}


def calls_back(steps: int, output: str, config: dict[str, Any]) -> None:
    """A script on Trainer with a callback that counts for itself."""
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

        def on_step_end(self, *_: Any, **given: Any) -> None:
            self.n += 1
            groups = given["optimizer"].param_groups
            note(n=self.n, decays=[g["weight_decay"] for g in groups], betas=groups[0]["betas"])

    arguments = TrainingArguments(
        output_dir=output, per_device_train_batch_size=2, max_steps=steps, use_cpu=True,
        weight_decay=0.1, deepspeed=config, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    rows = Rows()
    data: Any = [
        {"rows": row, "labels": kind} for row, kind in zip(rows.rows, rows.classes, strict=True)
    ]
    Trainer(Scored(), arguments, train_dataset=data, callbacks=[Counting()]).train()


def has_no_engine(config: dict[str, Any]) -> None:
    """A loop on Accelerate as with --cpu, which turns DeepSpeed off."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(config))
    model = build_model()
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))  # line: unengined
