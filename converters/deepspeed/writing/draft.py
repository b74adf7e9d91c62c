"""The draft of a DeepSpeed checkpoint: its job, stage and ranks, and the source's tensors."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from scalai.converters.checkpoint import MAIN, PARAM, STEP, Checkpoint, FilePiece, WriteOptions
from scalai.converters.deepspeed.job import STATE, DeepSpeedJob, sub_group_elements
from scalai.converters.deepspeed.loss_scale import to_plain
from scalai.converters.deepspeed.shards.expert_names import expert_of
from scalai.converters.deepspeed.shards.experts import split_groups
from scalai.converters.deepspeed.stored_config import is_number
from scalai.converters.deepspeed.writing.archives import Archives, Filled
from scalai.converters.pickles import foreign
from scalai.converters.source_files import read_steps
from scalai.converters.torch_archive import NewTensor
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor, split_name
from scalai.core.tensors.region import whole


def job_of(source: Checkpoint, options: WriteOptions) -> DeepSpeedJob:
    """Return the target's job: the source's, else the one of ``--args-from``.

    Raises:
        RefusedError: Neither has one.
    """
    for values in (source.values, options.reference):
        job = values.extra.get(STATE) if values is not None else None
        if isinstance(job, DeepSpeedJob):
            return job
    raise RefusedError(
        f"{source.directory} ({source.layout}) does not say in which order a DeepSpeed engine "
        "keeps its parameters. Pass --args-from with a DeepSpeed checkpoint of the same model."
    )


@dataclass(frozen=True, slots=True)
class Draft:
    """A target under construction.

    Attributes:
        source, options: The source, and how to write it.
        job: The target's job, with this model-parallel rank's parameters.
        stage, dp: ZeRO stage and data-parallel ranks of the target.
        folder: The tag's directory.
        degrees: ``tp`` and ``pp`` of the target.
        ep, ep_rank: Number of expert-parallel ranks; the rank with the job's groups.
        origins: Source group of each of the job's groups; None: the same.
        tensors: The source's tensors by name, in the rank's own shapes.
        kept: Kinds of optimizer state by parameter.
    """

    source: Checkpoint
    options: WriteOptions
    job: DeepSpeedJob
    stage: int
    dp: int
    archives: Archives
    folder: str
    degrees: tuple[int, int] = (1, 1)
    rank: int = 0
    ep: int = 1
    ep_rank: int = 0
    origins: Sequence[int] | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tensors:
            return
        shard = self.archives.shards.shard
        tensors = {tensor.name: shard(tensor) for tensor in self.source.placed.collection.tensors}
        self.tensors.update(tensors)
        for tensor in tensors:
            kind, parameter = split_name(tensor)
            if kind not in (PARAM, MAIN, STEP):
                self.kept.setdefault(parameter, []).append(kind)
        names = [name for name in self.job.dtypes if self.job.aliases.get(name, name) == name]
        missing = [name for name in names if f"{PARAM}/{name}" not in tensors]
        if missing:
            raise RefusedError(
                f"{self.source.directory} lacks {len(missing)} tensors of the DeepSpeed job's "
                f"module, first {missing[0]}. It is of another model, or names need a mapping."
            )

    def of_experts(self) -> list["Draft"]:
        """Return a draft for each expert-parallel rank, with its part of the job's groups."""
        experts = self.job.experts
        if experts is None:
            return [self]
        drafts = []
        for ep_rank in range(self.ep):
            mine = [
                tuple(name for name in group if experts.is_on(name, self.ep, ep_rank))
                for group in self.job.groups
            ]
            sizes = {name: prod(self.parameter(name).shape) for group in mine for name in group}
            groups, origins = split_groups(mine, sizes)
            job = replace(self.job, groups=tuple(groups))
            drafts.append(replace(self, job=job, ep_rank=ep_rank, origins=origins))
        return drafts

    def local(self, name: str) -> str:
        """Return this expert-parallel rank's name of a parameter."""
        experts = self.job.experts
        return name if experts is None else experts.local(name, self.ep)

    def is_here(self, name: str) -> bool:
        """Tell whether this expert-parallel rank has a parameter or a buffer."""
        experts = self.job.experts
        return experts is None or experts.is_on(name, self.ep, self.ep_rank)

    @property
    def config(self) -> dict[str, Any]:
        """The job's configuration with the target's stage."""
        config = dict(self.job.model.get("ds_config") or {})
        config["zero_optimization"] = {
            **(config.get("zero_optimization") or {}),
            "stage": self.stage,
        }
        return config

    @property
    def clip_grad(self) -> dict[str, float]:
        """The largest gradient norm, from the source's optimizer or configuration.

        Empty: not stated; the engine then uses its default, different between releases.

        Raises:
            RefusedError: It is not a number of 0 or more.
        """
        stated = self.job.optimizer.get("clip_grad", self.config.get("gradient_clipping"))
        if stated is None:
            return {}
        if not is_number(stated):
            raise RefusedError(
                f"{self.source.directory}: the optimizer's clip_grad is {stated!r:.80}, and a "
                "number that is not negative is expected. Use another checkpoint."
            )
        return {"clip_grad": float(stated)}

    @property
    def spreads_frozen_experts(self) -> bool:
        """Whether frozen parameters differ between expert-parallel ranks.

        With stage 2 DeepSpeed saves rank 0's a second time, and loads them into all ranks
        (``load_module_state_dict`` of deepspeed/runtime/engine.py, 0.19.8).
        """
        return self.ep > 1 and any(map(expert_of, self.job.frozen))

    def notes(self) -> Iterator[str]:
        """Yield notes for the target's job."""
        if self.stage == 2 and self.spreads_frozen_experts:
            yield (
                "frozen experts are kept once: DeepSpeed 0.19.8 with stage 2 saves those of rank 0 "
                "again, and when it loads what it saved gives them to every expert-parallel rank"
            )
        yield "ds_config of the source is kept, but for the stage: set the batch sizes anew"
        if self.stage == 3:
            size = sub_group_elements(self.config)
            yield f"sub_group_size is {size}, as in the source's ds_config or by default"
        is_scaled = to_plain(self.job.optimizer, 0)["cur_scale"] != 1
        if is_scaled and (self.source.layout == "deepspeed_zero0") != (self.stage == 0):
            yield (
                "without ZeRO, DeepSpeed 0.19.8 divides gradients by the fp16 loss scale and does "
                "not multiply the loss by it: the moments of such a job are smaller by the scale"
            )

    def parameter(self, name: str) -> Tensor:
        """Return the tensor of a parameter or a buffer."""
        return self.tensors[f"{PARAM}/{name}"]

    def sizes(self, names: Iterable[str]) -> OrderedDict[str, Any]:
        """Return shapes of parameters as torch's sizes; with experts as tuples.

        With experts DeepSpeed saves a copy with tuples (``clone_tensors_for_torch_save``).
        """
        size = foreign("torch", "Size") if self.job.experts is None else tuple
        return OrderedDict((name, size(self.parameter(name).shape)) for name in names)

    def stored(self, kind: str | None, name: str) -> Tensor:
        """Return a parameter's tensor of a kind; ``kind`` None: its master.

        Raises:
            RefusedError: There is no fp32 master.
        """
        if kind is not None:
            return self.tensors[f"{kind}/{name}"]
        tensor = self.tensors.get(f"{MAIN}/{name}", self.parameter(name))
        if tensor.dtype != "F32":
            raise RefusedError(
                f"there is no fp32 master of {name} ({tensor.dtype}). Use a checkpoint that was "
                "saved with its optimizer; masters in 16 bits (fp16_master_weights_and_grads, "
                "bf16_master_weights_and_grads) are not written."
            )
        return tensor

    def kinds(self, names: Sequence[str]) -> list[str]:
        """Return the kinds of optimizer state of one group's parameters, in the source's order.

        Raises:
            RefusedError: Parameters differ in their kinds.
        """
        kinds = list(dict.fromkeys(kind for name in names for kind in self.kept.get(name, ())))
        for name in names:
            missing = [kind for kind in kinds if kind not in self.kept.get(name, ())]
            if missing:
                raise RefusedError(
                    f"{self.source.directory} has no {', '.join(missing)} of {name}, and of others "
                    "in the same group. It is incomplete (run scalai verify on it), or an offload "
                    "ratio below 1 kept the optimizer's state of a part: save without that."
                )
        return kinds

    def step(self, name: str, filled: Filled) -> dict[str, Any]:
        """Return the optimizer's step of a parameter, under its key; empty: it has none."""
        tensor = self.tensors.get(f"{STEP}/{name}")
        if tensor is None:
            return {}
        if self.job.has_number_steps:
            return {"step": int(read_steps(self.source) or 0)}
        step = NewTensor(tensor.dtype, ())
        filled[step] = [FilePiece(tensor, whole(()), "", 0)]
        return {"step": step}

    def param_groups(self, members: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """Return the optimizer's groups, each with the numbers of its tensors.

        Raises:
            RefusedError: The source has another number of groups.
        """
        values, origins = self._group_values(), self.origins
        count = len(members) if origins is None else len(set(origins))
        if len(values) != count:
            raise RefusedError(
                f"{self.source.directory} has {len(values)} parameter groups, and the DeepSpeed "
                f"job {count}. Pass --args-from with a checkpoint of the same job."
            )
        return [
            {**values[origin], **self._of_group(values[origin]), "params": list(numbers)}
            for origin, numbers in zip(origins or range(count), members, strict=True)
        ]

    def _of_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a group's entries for the target's ranks: DeepSpeed finds them by its name."""
        return {"name": f"ep_size_{self.ep}"} if group.get("moe") else {}

    @property
    def knows_param_groups(self) -> bool:
        """Whether the groups have hyperparameters; in elastic checkpoints they have none."""
        return bool(self._group_values())

    def _group_values(self) -> Sequence[Mapping[str, Any]]:
        reference = self.options.reference
        groups = self.source.values.param_groups
        return groups or (reference.param_groups if reference is not None else ())
