"""A training with FSDP2 on CPU that is saved and loaded by torch.distributed.checkpoint."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate.utils import fsdp_utils
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import StateDictType, fully_shard

from support.training import hugging_models, jobs

WORDS = 10


@dataclass(frozen=True)
class FsdpJob:
    """A job: ``load`` and ``save`` are directories; ``form`` is the tree of the checkpoint."""

    world: int
    form: str = "nested"
    optimizer: str = "adamw"
    load: str = ""
    save: str = ""
    steps: int = 3


class Lion(torch.optim.Optimizer):
    """One moment, and a step that is a number."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"], state["exp_avg"] = 0, torch.zeros_like(param)
                state["step"] += 1
                state["exp_avg"].lerp_(param.grad, 1 - group["beta"])
                param.sub_(state["exp_avg"].sign() * group["lr"] / state["step"])


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "plain_sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "lion": lambda groups: Lion(groups, lr=1e-3),
}


def build(job: FsdpJob) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of uneven sizes, cut over the ranks, and its optimizer of two groups."""
    mesh = init_device_mesh("cpu", (job.world,))
    torch.manual_seed(7 + bool(job.load))
    layers = [nn.Embedding(WORDS, 6), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, WORDS, bias=False)]
    model = nn.Sequential(*layers)
    for layer in layers:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    wide = [param for param in model.parameters() if param.ndim > 1]
    thin = [param for param in model.parameters() if param.ndim < 2]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": thin, "weight_decay": 0.0}]
    return model, OPTIMIZERS[job.optimizer](groups)


def tree(job: FsdpJob, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Any:
    """Return what is saved: nested as the tutorials do it, or flat as torchtitan does."""
    is_flat = job.form == "flat"
    weights = get_model_state_dict(model)
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    states = get_optimizer_state_dict(model, optimizer, options=options)
    if is_flat:
        return {
            **weights,
            "optimizer": states,
            "train_state": {"step": torch.tensor(step), "losses": [torch.tensor(1.5)]},
            "lr_scheduler": {"last_epoch": step},
            "dataloader": {"dp_rank_0": b"\0place", "world_size": job.world},
        }
    return {"app": {"model": weights, "optim": states}, "step": step}


def train(rank: int, store: dist.Store, job: FsdpJob) -> list[float]:
    """Train, after loading if asked; return the losses, and save if asked."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world)
    try:
        model, optimizer = build(job)
        begin = 0
        if job.load:
            begin = _load(job, model, optimizer)
        losses = []
        for step in range(begin, begin + job.steps):
            torch.manual_seed(step)
            words = torch.randint(0, WORDS, (8,))
            loss = nn.functional.cross_entropy(model(words), words.roll(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if job.save and job.form == "accelerate":
            plugin, accelerator = _accelerate(rank)
            fsdp_utils.save_fsdp_model(plugin, accelerator, model, job.save)
            fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, job.save)
        elif job.save:
            dcp.save(tree(job, model, optimizer, begin + job.steps), checkpoint_id=job.save)
        return losses
    finally:
        dist.destroy_process_group()


def _accelerate(rank: int) -> tuple[Any, Any]:
    """Return what Accelerate's functions ask of its plugin and of itself."""
    fsdp_utils.logger = logging.getLogger("accelerate")  # its own asks for Accelerate's state
    plugin = SimpleNamespace(
        fsdp_version=2,
        state_dict_type=StateDictType.SHARDED_STATE_DICT,
        state_dict_config=None,
    )
    accelerator = SimpleNamespace(
        process_index=rank, is_main_process=rank == 0, wait_for_everyone=dist.barrier
    )
    return plugin, accelerator


def _load(job: FsdpJob, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if job.form == "accelerate":
        plugin, accelerator = _accelerate(dist.get_rank())
        fsdp_utils.load_fsdp_model(plugin, accelerator, model, job.load)
        fsdp_utils.load_fsdp_optimizer(plugin, accelerator, optimizer, model, job.load)
        return 3
    content = tree(job, model, optimizer, 0)
    is_flat = job.form == "flat"
    dcp.load(content, checkpoint_id=job.load)
    if is_flat:
        assert content["train_state"]["losses"] == [torch.tensor(1.5)]
        assert content["dataloader"]["dp_rank_0"] == b"\0place"
        step, states = content["train_state"]["step"], content["optimizer"]
        weights = {name: content[name] for name in model.state_dict()}
    else:
        step, states, weights = content["step"], content["app"]["optim"], content["app"]["model"]
    set_model_state_dict(model, weights)
    options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
    set_optimizer_state_dict(model, optimizer, states, options=options)
    return int(step.item() if isinstance(step, Tensor) else step)


@dataclass(frozen=True)
class GptJob:
    """A model of ``hugging_models`` that goes on behind step ``AFTER.start``."""

    model: jobs.Job
    world: int
    load: str
    save: str
    """Saved as it was loaded."""


def go_on(rank: int, store: dist.Store, job: GptJob) -> list[float]:
    """Load a training, save it again and train on; return the mean losses."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world)
    try:
        torch.manual_seed(jobs.OTHER_SEED)
        model = hugging_models.model_of(job.model)
        mesh = init_device_mesh("cpu", (job.world,))
        for block in model.get_submodule("model.layers").children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        members: list[list[nn.Parameter]] = [[], []]
        for parameter in model.parameters():
            members[parameter.ndim < 2].append(parameter)
        optimizer = torch.optim.AdamW([{"params": of} for of in members], lr=1e-2)
        schedule = hugging_models.Schedule(optimizer)
        weights = get_model_state_dict(model)
        buffers = {name: value for name, value in weights.items() if "inv_freq" in name}
        kept = {name: value for name, value in weights.items() if name not in buffers}
        content: Any = {
            "model": kept, "optimizer": get_optimizer_state_dict(model, optimizer), "step": 0,
        }  # fmt: skip
        dcp.load(content, checkpoint_id=job.load)
        set_model_state_dict(model, {**content["model"], **buffers})
        set_optimizer_state_dict(model, optimizer, content["optimizer"])
        assert content["step"] == jobs.AFTER.start
        again = {**content, "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(again, checkpoint_id=job.save)
        schedule.load_state_dict({"last_epoch": jobs.AFTER.start})
        losses = []
        for step in jobs.AFTER:
            schedule._set()
            tokens, labels = (
                part.chunk(job.world)[rank] for part in hugging_models.samples(job.model, step)
            )
            loss = model(tokens, labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), job.model.clip)
            optimizer.step()
            optimizer.zero_grad()
            schedule.last_epoch += 1
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item() / job.world)
        return losses
    finally:
        dist.destroy_process_group()
