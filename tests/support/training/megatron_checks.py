"""Facts about one rank of a megatron job: its live state, what its sharded state dicts say of a
parameter against what they do with its values, and the collectives of the CPU emulation."""

import gc
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.ssm.mamba_mixer import _split_tensor_factory
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from scalai.core.errors import RefusedError
from scalai.patches.megatron.megatron_state import MegatronState
from scalai.patches.megatron.optimizer_state import asked_of
from scalai.patches.megatron.shapes import global_name, parts_of, shards_of, unwrap
from scalai.runtime.live import collection_of, held_rows
from scalai.runtime.live_fingerprints import live_fingerprints
from support.training.jobs import BEFORE, OTHER_SEED, Job
from support.training.live_checks import built
from support.training.tiny_gpt import Training

MEGATRON = "tiny_gpt"


def refused(call: Callable[[], Any]) -> str:
    """Return how a call is refused, or ``taken``."""
    try:
        call()
    except RefusedError as error:
        return str(error)
    return "taken"


def replicas(rank: int, store: dist.Store, job: Job, drifting: str = "") -> Any:
    """Train a job; return what this rank holds then, and its fingerprints.

    Args:
        drifting: The second rank alone changes parameters of such names.
    """
    with built(MEGATRON, job, rank, store) as training:
        slots = training.state().slots()
        training.train(BEFORE)
        for slot in slots:
            if drifting and drifting in slot.tensor.name and rank == 1:
                slot.buffer.add_(1e-6)
        rows = [row for row in held_rows(slots) if not row[0].is_volatile]
        return collection_of(rows), live_fingerprints(rows).tolist()


def another_schedule(rank: int, store: dist.Store) -> str:
    """Scalars of a job with other parameter groups are refused; returns the message."""
    with built(MEGATRON, Job(), rank, store) as training:
        scalars = training.state().scalars()
        first, second = training.optimizer.param_groups
        first["params"].append(second["params"].pop())
        return refused(lambda: training.state().load_scalars(scalars))


def owner_of_a_group(rank: int, store: dist.Store) -> Any:
    """A rank without parameters of a group does not count its steps, and does not say any."""
    with built(MEGATRON, Job(), rank, store) as training:
        state = training.state()
        state.scalars()  # whose parameters they are is read before
        first, second = training.optimizer.param_groups
        first["step"], second["step"] = 3, 7
        first["params"].clear()
        said = state.scalars()
        first["step"] = 4  # it takes nothing of the other, of another kind of weight decay
        state.load_scalars(said)
        steps = [values["step"] for values in said["megatron"]["groups"]["values"].values()]
        return steps, first["wd_mult"]


def adapter(
    rank: int, store: dist.Store, tp: int, is_described: bool, is_duplicated: bool = False
) -> str:
    """List a model with an adapter of a script's own that tensor parallelism cuts; its module says
    so to megatron's checkpoints, or not. Returns the refusal.

    Args:
        is_duplicated: The module is marked as Transformer Engine marks one that nothing cuts.
    """
    lora: Any = torch.nn.Module()
    lora.b = torch.nn.Parameter(torch.zeros(8, 2))
    lora.b.tensor_model_parallel, lora.b.partition_dim = True, 0
    if is_duplicated:
        lora.parallel_mode = None
    if is_described:
        lora.sharded_state_dict = lambda prefix="", sharded_offsets=(), metadata=None: (
            make_sharded_tensors_for_checkpoint({"b": lora.b}, prefix, {"b": 0}, sharded_offsets)
        )
    with built(MEGATRON, Job(world=2, tp=tp), rank, store) as training:
        unwrap(training.chunks[0]).decoder.layers[1].self_attention.lora = lora
        return refused(lambda: shards_of(training.chunks))


Setting = dict[str, float | list[float]]


def moved_groups(
    rank: int, store: dist.Store, first: Job, set_: Setting, flags: Setting, wins: str
) -> Any:
    """Move the scalars of a job at step 3 into a new one, and train both on by a step.

    Args:
        set_: What a checkpoint or the script has set in the first job's groups.
        flags: What the flags of the new job say otherwise, by attribute of its scheduler.
        wins: Which of Megatron-LM's two flags the new job has; empty: neither.

    Returns:
        The groups' values of both jobs before and after the step; or the refusal.
    """

    def state_of(job: Any, asked: Any) -> MegatronState:
        return MegatronState(job.chunks, job.optimizer, job.scheduler, asked=asked)

    with built(MEGATRON, first, rank, store) as then:
        asked = asked_of(then.optimizer, then.scheduler)
        for group in then.optimizer.param_groups:
            group.update(set_)
        for key in set_.keys() & vars(then.scheduler).keys():
            setattr(then.scheduler, key, set_[key])
        state = state_of(then, asked)
        then.train(BEFORE)
        scalars, found = json.loads(json.dumps(state.scalars())), [_hyperparameters(then)]
        then.train(range(3, 4))
        found.append(_hyperparameters(then))
    with built(MEGATRON, first, rank, store, OTHER_SEED) as now:
        for group in now.optimizer.param_groups:
            group.update({key: value for key, value in flags.items() if key in group})
        vars(now.scheduler).update(flags)
        now.scheduler.use_checkpoint_opt_param_scheduler = wins == "use_checkpoint"
        now.scheduler.override_opt_param_scheduler = wins == "override"
        state = state_of(now, asked_of(now.optimizer, now.scheduler))
        if (why := refused(lambda: state.load_scalars(scalars))) != "taken":
            return why
        found.append(_hyperparameters(now))
        now.train(range(3, 4))
        return [*found, _hyperparameters(now)]


def _hyperparameters(training: Training) -> list[dict[str, Any]]:
    groups = training.optimizer.param_groups
    return [{key: value for key, value in of.items() if key != "params"} for of in groups]


class Halving:
    """A schedule of a script's own, whose length is named as a count of Megatron-LM's is."""

    def __init__(self, optimizer: Any, num_steps: int) -> None:
        self.optimizer, self.num_steps, self.done = optimizer, num_steps, 0

    def step(self) -> None:
        self.done += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= 1 - self.done / self.num_steps

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def moved_rates(rank: int, store: dist.Store) -> Any:
    """Move the scalars of a job with two rates and a schedule of its own that keeps ``num_steps``;
    return its length and the rates of both jobs behind one more step."""
    found, scalars = [], None
    for _ in range(2):
        with built(MEGATRON, Job(), rank, store) as training:
            optimizer, schedule = training.optimizer, Halving(training.optimizer, 8)
            for group, rate in zip(optimizer.param_groups, (1.0, 0.5), strict=True):
                group.update(lr=rate, initial_lr=rate, wd_mult=1.0)  # alike, but for their rates
            state = MegatronState(training.chunks, optimizer, schedule)
            if scalars is None:
                schedule.step()
                scalars = json.loads(json.dumps(state.scalars()))
            else:
                state.load_scalars(scalars)
            schedule.step()
            found.append((schedule.num_steps, [group["lr"] for group in optimizer.param_groups]))
    return found


# ------------------------------------------------------------------ sharded state dicts


def shard(key: str, values: torch.Tensor, *offsets: tuple[int, int, int]) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, values, *offsets, prepend_axis_num=1)


def gated(rank: int, store: dist.Store) -> list[str]:
    """Gate and up projection in one buffer: two boxes of one tensor, on the second of two ranks."""
    key = "decoder.layers.mlp.linear_fc1.weight"
    weight = shard(key, torch.randn(6, 4), (0, 2, 3), (1, 1, 2))
    return _agree(apply_swiglu_sharded_factory(weight, ((0, 2, 3),)))


def mamba(rank: int, store: dist.Store) -> list[str]:
    """One parameter that is a part of four tensors."""
    key = "decoder.layers.mixer.in_proj.weight"
    weight = shard(key, torch.randn(12, 4), (0, 1, 3), (1, 1, 2))
    return _agree(_split_tensor_factory(weight, [4, 4, 2, 2], ["z", "x", "B", "dt"], 0))


def transposed(rank: int, store: dist.Store) -> list[str]:
    """GroupedMLP up to 0.16: [hidden, experts * 2 * ffn], kept as experts of [2 * ffn, hidden]."""
    experts, hidden, ffn, tp, tp_rank = 2, 6, 5, 2, 1

    def build(key: str, values: torch.Tensor, replica: Any, flat: Any) -> list[ShardedTensor]:
        by_expert = values.view(experts, hidden, 2 * ffn).transpose(-1, -2)
        gate, up = torch.chunk(by_expert, 2, -2)
        return [
            shard(key, half.contiguous(), (0, 3, 4), (1, 0, 2), (2, position, tp * 2))
            for half, position in ((gate, tp_rank), (up, tp + tp_rank))
        ]

    return _agree(_factory(torch.randn(hidden, experts * 2 * ffn), build))


def averaging(rank: int, store: dist.Store) -> str:
    """A factory that is no slice is refused; returns the message."""

    def build(key: str, values: torch.Tensor, replica: Any, flat: Any) -> list[ShardedTensor]:
        return [ShardedTensor.from_rank_offsets(key, values.flip(0) * values)]

    return refused(lambda: list(parts_of(_factory(torch.randn(4, 3), build))))


def _factory(data: torch.Tensor, build: Callable[..., Any]) -> ShardedTensorFactory:
    key = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    return ShardedTensorFactory(key, data, build, lambda shards: None)


def _agree(item: Any) -> list[str]:
    """Compare each piece with what the factory makes of real values; return what was compared."""
    made = {}
    for part in item.build_fn(item.key, item.data, item.replica_id, None):
        layers = part.prepend_axis_num
        name = global_name(part.key, part.global_offset[:layers])
        made[name, tuple(part.global_offset[layers:])] = part.data
    compared = []
    for part in parts_of(item):
        for piece in part.pieces:
            values = made.pop((part.name, piece.box.offset))
            ours = torch.as_strided(item.data, piece.box.shape, piece.stride, piece.start)
            # A leading axis of size 1 may stand for the layer, which is in the name here.
            assert torch.equal(ours, values.reshape(piece.box.shape)), (part.name, piece)
            compared.append(f"{part.name} {list(part.shape)} {list(piece.box.offset)}")
    assert not made, f"not described: {sorted(made)}"
    return compared


# ------------------------------------------------------------------ collectives


def unequal_parts(rank: int, store: dist.Store, sizes: list[int]) -> tuple[list[int], list[int]]:
    """Gather parts of these sizes, and give each rank the sum of its part; return both."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(sizes))
    gathered = list(torch.split(torch.zeros(sum(sizes), 2), sizes))
    dist.all_gather(gathered, torch.full((sizes[rank], 2), rank + 1.0))
    parts = list(torch.split(torch.arange(2.0 * sum(sizes)).view(-1, 2), sizes))
    mine = torch.zeros(sizes[rank], 2)
    dist.reduce_scatter(mine, parts)
    dist.destroy_process_group()
    gc.collect()
    return torch.cat(gathered)[:, 0].int().tolist(), mine.flatten().int().tolist()
