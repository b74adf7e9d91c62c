"""A training with FSDP2 of a model with Llama's names, by whatever torch runs this file.

``python fsdp_by_torch.py save FORM WORLD DIRECTORY`` trains three steps and saves them by
``torch.distributed.checkpoint``; ``load FORM WORLD DIRECTORY...`` loads each into other weights and
trains two steps more. Both print losses and fingerprints of all that was saved or loaded.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

WORDS, HIDDEN, FFN, LAYERS, STEPS = 14, 6, 10, 2, 3


def _linears(rows: int, columns: int, *names: str) -> dict[str, nn.Module]:
    return {f"{name}_proj": nn.Linear(columns, rows, bias=False) for name in names}


class Layer(nn.Module):
    """Llama's parameters in a simpler sum."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.ModuleDict(_linears(HIDDEN, HIDDEN, "q", "k", "v", "o"))
        self.mlp = nn.ModuleDict(
            {**_linears(FFN, HIDDEN, "gate", "up"), **_linears(HIDDEN, FFN, "down")}
        )
        self.input_layernorm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, eps=1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two, three, out = self.self_attn.values()
        y = self.input_layernorm(x)
        x = x + out(one(y) * two(y) + three(y))
        gate, up, down = self.mlp.values()
        y = self.post_attention_layernorm(x)
        z: torch.Tensor = x + down(nn.functional.silu(gate(y)) * up(y))
        return z


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model: Any = nn.Module()
        self.model.embed_tokens = nn.Embedding(WORDS, HIDDEN)
        self.model.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.model.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.lm_head = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.model.embed_tokens(words)
        for layer in self.model.layers:
            x = layer(x)
        y: torch.Tensor = self.lm_head(self.model.norm(x))
        return y


def _built(seed: int, world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=1e-2)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        words = torch.randint(0, WORDS, (8,), generator=generator)
        loss = nn.functional.cross_entropy(model(words), words.roll(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _tree(form: str, weights: Any, states: Any) -> dict[str, Any]:
    """Return what is saved: nested as the tutorials do it, or flat as torchtitan does."""
    if form == "flat":
        return {**weights, "optimizer": states}
    return {"app": {"model": weights, "optim": states}}


def _fingerprints(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return those of the whole tensors, and the other values: called by all ranks."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole: Any = get_state_dict(model, optimizer, options=options)
    weights, states = whole
    found = {name: _hash(value) for name, value in weights.items()}
    for name, state in states.get("state", {}).items():
        found |= {f"{name}/{kind}": _hash(value) for kind, value in state.items()}
    rates = ("lr", "betas", "eps", "weight_decay")
    for number, group in enumerate(states.get("param_groups", ())):
        found[f"group {number}"] = repr([*map(group.get, rates), sorted(group["params"])])
    return found


def _hash(tensor: torch.Tensor) -> str:
    content = tensor.contiguous().numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(content).hexdigest()}"


def _save(form: str, world: int, directory: str) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    model, optimizer = _built(7, world)
    losses = _train(model, optimizer, range(STEPS))
    content = _tree(form, *get_state_dict(model, optimizer, options=options))
    # What the trainings themselves keep beside both.
    step = {"train_state": {"step": torch.tensor(STEPS)}} if form == "flat" else {"step": STEPS}
    dcp.save({**content, **step}, checkpoint_id=directory)
    return {"losses": losses, "whole": _fingerprints(model, optimizer)}


def _load(form: str, world: int, directory: str) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    model, optimizer = _built(8, world)
    weights, states = get_state_dict(model, optimizer, options=options)
    dcp.load(_tree(form, weights, states), checkpoint_id=directory)
    set_state_dict(
        model, optimizer, model_state_dict=weights, optim_state_dict=states, options=options
    )
    whole = _fingerprints(model, optimizer)
    return {"losses": _train(model, optimizer, range(STEPS, STEPS + 2)), "whole": whole}


def run(rank: int, verb: str, form: str, world: int, place: str, *directories: str) -> None:
    store = dist.FileStore(f"{place}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    each = _save if verb == "save" else _load
    found = [{"torch": torch.__version__, **each(form, world, path)} for path in directories]
    if rank == 0:
        Path(place, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    verb, form, world, *directories = sys.argv[1:]
    with tempfile.TemporaryDirectory() as place:
        given = (verb, form, int(world), place, *directories)
        spawn(run, given, int(world))
        print(Path(place, "found.json").read_text())
