"""Lays out a DeepSpeed checkpoint with ZeRO for any number of ranks and any stage.

What is written is what ``engine.load_checkpoint`` of a job at the target's degree and stage reads;
DeepSpeed itself refuses to load at another degree or stage.

Source: deepspeed 0.19.8, as ``deepspeed_zero``. Differs in: no copies of the recovery scripts
(``zero_to_fp32.py``).
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scalai.converters.checkpoint import (
    MAIN,
    PARAM,
    STEP,
    Checkpoint,
    Piece,
    Target,
    WriteOptions,
)
from scalai.converters.deepspeed_archives import Archives, Filled, pieces_of, write_tag
from scalai.converters.deepspeed_files import LATEST
from scalai.converters.deepspeed_flat import (
    Flat,
    Span,
    gaps_of,
    part_of,
    round_robin,
    split_each,
    split_whole,
    sub_groups,
)
from scalai.converters.deepspeed_job import (
    STATE,
    DeepSpeedJob,
    aligns_parameters,
    round_robins,
    sub_group_elements,
    zero_config,
)
from scalai.converters.pickles import Foreign, foreign
from scalai.converters.scalars import read_steps
from scalai.converters.torch_archive import NewTensor
from scalai.core.collection import ITEM_BYTES, Tensor
from scalai.core.errors import RefusedError
from scalai.core.region import whole

Shape = tuple[int, ...]


def lay_out(source: Checkpoint, options: WriteOptions, stage: int) -> Target:
    """Lay out a checkpoint of ``source`` at other degrees, with ZeRO's ``stage`` 1 to 3.

    Raises:
        RefusedError: The source has no DeepSpeed job's names, or lacks tensors of them.
    """
    job, archives = job_of(source, options), Archives()
    writer = Writer(source, job, stage, dp_of(source, options), archives, job.tag)
    groups = list(writer.groups())
    for rank in range(writer.dp):
        writer.add_optimizer(rank, groups)
    for rank in range(writer.dp if stage == 3 else 1):
        writer.add_model(rank, groups)

    def finish(directory: Path, _: npt.NDArray[np.uint64]) -> None:
        write_tag(directory / LATEST, job.tag)

    notes = [*source.notes, *writer.notes()]
    return Target(f"deepspeed_zero{stage}", archives.placed(), archives.fixed, finish, tuple(notes))


def job_of(source: Checkpoint, options: WriteOptions) -> DeepSpeedJob:
    """Return the job that the target is for: the source's, or that of ``--args-from``.

    Raises:
        RefusedError: There is none.
    """
    for values in (source.values, options.reference):
        job = values.extra.get(STATE) if values is not None else None
        if isinstance(job, DeepSpeedJob):
            return job
    raise RefusedError(
        f"{source.directory} ({source.layout}) does not say in which order a DeepSpeed engine "
        "keeps its parameters. Pass --args-from with a DeepSpeed checkpoint of the same model."
    )


def dp_of(source: Checkpoint, options: WriteOptions) -> int:
    """Return the target's data-parallel ranks.

    Raises:
        RefusedError: They are not known, or other degrees than 1 are asked of other axes.
    """
    degrees = {**source.values.degrees, **options.degrees}
    for axis, size in sorted(degrees.items()):
        if axis != "dp" and size != 1:
            raise RefusedError(
                f"{axis}={size} is asked of a DeepSpeed checkpoint, and only dp can be changed so "
                f"far. Give --{axis} 1."
            )
    if "dp" not in degrees:
        raise RefusedError("the number of data-parallel ranks is not known. Give --dp.")
    return degrees["dp"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A flat buffer of the target, the optimizer's keys of it, and its parameter group."""

    shapes: Mapping[str, Shape]
    flat: Flat
    group: int


@dataclass(frozen=True, slots=True)
class Writer:
    """A target that is being laid out."""

    source: Checkpoint
    job: DeepSpeedJob
    stage: int
    dp: int
    archives: Archives
    folder: str
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tensors = {tensor.name: tensor for tensor in self.source.placed.collection.tensors}
        self.tensors.update(tensors)
        names = [name for name in self.job.dtypes if self.job.aliases.get(name, name) == name]
        missing = [name for name in names if f"{PARAM}/{name}" not in tensors]
        if missing:
            raise RefusedError(
                f"{self.source.directory} lacks {len(missing)} tensors of the DeepSpeed job's "
                f"module, first {missing[0]}. It is of another model, or names need a mapping."
            )

    @property
    def config(self) -> dict[str, Any]:
        """The job's configuration with the target's stage."""
        config = dict(self.job.model.get("ds_config") or {})
        config["zero_optimization"] = {**zero_config(config), "stage": self.stage}
        return config

    def notes(self) -> Iterator[str]:
        yield "ds_config of the source is kept, but for the stage: set the batch sizes anew"
        if self.stage == 3:
            size = sub_group_elements(self.config)
            yield f"sub_group_size is {size}, as in the source's ds_config or by default"

    def groups(self) -> Iterator[Buffer]:
        """Yield the target's flat buffers."""
        for number, names in enumerate(self.job.groups):
            shapes = {name: self.tensors[f"{PARAM}/{name}"].shape for name in names}
            if self.stage == 3:
                size = sub_group_elements(self.config)
                for some in sub_groups(shapes, self.dp, size):
                    part = {name: shapes[name] for name in some}
                    yield Buffer(part, split_each(part, self.dp), number)
                continue
            if round_robins(self.config):
                shapes = {name: shapes[name] for name in round_robin(names, self.dp)}
            gaps = self._gaps(shapes)
            yield Buffer(shapes, split_whole(shapes, self.dp, gaps), number)

    def _gaps(self, shapes: Mapping[str, Shape]) -> list[int]:
        # DeepSpeed looks at the first of the parameters, before it orders them.
        item = ITEM_BYTES[self.tensors[f"{PARAM}/{next(iter(shapes))}"].dtype]
        return gaps_of(shapes, item, is_aligned=aligns_parameters(self.config))

    def add_model(
        self,
        rank: int,
        groups: Sequence[Buffer],
        optimizer: Mapping[str, Any] | None = None,
        filled: Filled | None = None,
    ) -> None:
        """Lay out a model_states file: of all ranks, or of one in stage 3.

        ``optimizer``: what stage 0 keeps there, and what its tensors are filled with.
        """
        filled = Filled() if filled is None else filled
        module = self._module(filled)
        entries: dict[str, Any] = {
            **self.job.model,
            "module": module,
            "buffer_names": list(self.job.buffers),
            "optimizer": optimizer,
            "shared_params": dict(self.job.aliases) if self.stage else None,
            "param_shapes": [self._sizes(group.shapes) for group in groups] or None,
            "frozen_param_shapes": None,
            "frozen_param_fragments": None,
            "dp_world_size": self.dp,
            "ds_config": self.config,
        }
        if self.stage > 1:
            entries["frozen_param_shapes"] = self._sizes(self.job.frozen)
            entries["frozen_param_fragments"] = OrderedDict(
                (name, self._frozen(name, rank, module, filled)) for name in self.job.frozen
            )
        prefix = f"zero_pp_rank_{rank}_" if self.stage == 3 else ""
        path = f"{self.folder}/{prefix}mp_rank_00_model_states.pt"
        self.archives.add(path, entries, filled)

    def _module(self, filled: Filled) -> OrderedDict[str, Any]:
        """Return the module's state_dict, shared parameters as one tensor."""
        job = self.job
        module: OrderedDict[str, Any] = OrderedDict()
        new: dict[str, NewTensor] = {}
        for name in job.module:
            owner = job.aliases.get(name, name)
            if name in job.module_values:
                module[name] = job.module_values[name]
            elif self.stage == 3 and name not in job.buffers:
                module[name] = NewTensor(job.dtypes[name], (0,), b"")
            else:
                tensor = self.tensors[f"{PARAM}/{owner}"]
                if owner not in new:
                    new[owner] = NewTensor(tensor.dtype, tensor.shape)
                    filled[new[owner]] = [Piece(tensor, whole(tensor.shape), "", 0)]
                module[name] = new[owner]
        if job.module_metadata is not None:
            module.__dict__["_metadata"] = job.module_metadata
        return module

    def _sizes(self, names: Iterable[str]) -> OrderedDict[str, Any]:
        """Return the shapes of parameters as torch has them."""
        size = foreign("torch", "Size")
        return OrderedDict((name, size(self.tensors[f"{PARAM}/{name}"].shape)) for name in names)

    def _frozen(self, name: str, rank: int, module: Mapping[str, Any], filled: Filled) -> NewTensor:
        """Return what a rank keeps of a parameter that is not trained."""
        if self.stage == 2:
            same: NewTensor = module[name]
            return same
        tensor = self.tensors[f"{PARAM}/{name}"]
        numel, part = prod(tensor.shape), part_of(tensor.shape, self.dp)
        new = NewTensor(tensor.dtype, (part,))
        span = Span(name, min(rank * part, numel), min((rank + 1) * part, numel), 0)
        filled[new] = list(pieces_of(tensor, span))
        return new

    def add_optimizer(self, rank: int, groups: Sequence[Buffer]) -> None:
        """Lay out the optim_states file of a rank."""
        filled: Filled = {}
        states = {}
        masters = []
        for number, group in enumerate(groups):
            keys = self.keys(list(group.shapes))
            states[number] = {
                **self.step(next(iter(group.shapes)), filled),
                **{key: self._flat(key, group, rank, filled) for key in keys},
            }
            masters.append(self._flat(None, group, rank, filled))
        state = self.global_state()
        inner = {
            "state": {number: entry for number, entry in states.items() if entry},
            "param_groups": self.param_groups(self.members(groups)),
        }
        if self.stage == 3:
            state.pop("clip_grad", None)
            state |= {
                "partition_count": self.dp,
                "optimizer_state_dict": inner,
                "fp32_flat_groups": masters,
            }
        else:
            state |= {
                "base_optimizer_state": inner,
                "single_partition_of_fp32_groups": masters,
                "group_paddings": [group.flat.padding[rank] for group in groups],
                "partition_count": [self.dp] * len(groups),
                "param_alignment_paddings": [self._gaps(group.shapes) for group in groups],
                "param_slice_mappings": [_fragments(group, rank) for group in groups],
            }
        prefix = "bf16_" if self.job.is_bf16 else ""
        name = f"{self.folder}/{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        value = {
            "optimizer_state_dict": state,
            "ds_config": self.config,
            "ds_version": state["ds_version"],
        }
        self.archives.add(name, value, filled)

    def global_state(self) -> dict[str, Any]:
        """Return what all ranks' optimizers keep alike."""
        return {
            "loss_scaler": _static_scaler(),
            "dynamic_loss_scale": False,
            "overflow": False,
            "clip_grad": float(self.config.get("gradient_clipping", 0.0)),
            **self.job.optimizer,
            "zero_stage": _enum(self.stage),
            "ds_version": self.job.model.get("ds_version"),
        }

    def keys(self, names: Sequence[str]) -> list[str]:
        """Return what the optimizer keeps of parameters of one group, in the source's order.

        Raises:
            RefusedError: It is not the same of all.
        """
        first = names[0]
        kinds = [
            kind
            for name in self.tensors
            for kind, _, parameter in (name.partition("/"),)
            if parameter == first and kind not in (PARAM, MAIN, STEP)
        ]
        for name in names:
            missing = [kind for kind in kinds if f"{kind}/{name}" not in self.tensors]
            if missing:
                raise RefusedError(
                    f"{self.source.directory} has {', '.join(missing)} of {first}, and not of "
                    f"{name} in the same group. It is incomplete: run scalai verify on it."
                )
        return kinds

    def step(self, name: str, filled: Filled) -> dict[str, Any]:
        """Return the optimizer's step for a parameter, under its key; nothing if it has none."""
        tensor = self.tensors.get(f"{STEP}/{name}")
        if tensor is None:
            return {}
        if self.job.has_number_steps:
            return {"step": int(read_steps(self.source) or 0)}
        step = NewTensor(tensor.dtype, ())
        filled[step] = [Piece(tensor, whole(()), "", 0)]
        return {"step": step}

    def _flat(self, kind: str | None, group: Buffer, rank: int, filled: Filled) -> NewTensor:
        """Return a rank's part of a buffer; ``kind`` None: of the masters."""
        tensors = {name: self.stored(kind, name) for name in group.shapes}
        dtypes = {tensor.dtype for tensor in tensors.values()}
        if len(dtypes) != 1:
            raise RefusedError(
                f"{kind or 'masters'} of one parameter group have several dtypes "
                f"({', '.join(sorted(dtypes))}); ZeRO keeps them in one buffer."
            )
        elements = group.flat.rank_elements
        if kind is None and self.stage != 3:
            elements -= group.flat.padding[rank]
        dtype = dtypes.pop()
        new = NewTensor(dtype, (elements,))
        filled[new] = [
            piece
            for span in group.flat.spans[rank]
            for piece in pieces_of(tensors[span.name], span)
        ]
        return new

    def stored(self, kind: str | None, name: str) -> Tensor:
        """Return a parameter's tensor of a kind; ``kind`` None: its master.

        Raises:
            RefusedError: There is no master.
        """
        if kind is not None:
            return self.tensors[f"{kind}/{name}"]
        tensor = self.tensors.get(f"{MAIN}/{name}", self.tensors[f"{PARAM}/{name}"])
        if tensor.dtype != "F32":
            raise RefusedError(
                f"there is no fp32 master of {name} ({tensor.dtype}). Use a checkpoint that was "
                "saved with its optimizer."
            )
        return tensor

    def param_groups(self, members: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """Return the optimizer's groups, each with the numbers of its tensors.

        Raises:
            RefusedError: The source has not as many.
        """
        values = self.source.values.param_groups
        if len(values) != len(members):
            raise RefusedError(
                f"{self.source.directory} has {len(values)} parameter groups, and the DeepSpeed "
                f"job {len(members)}. Pass --args-from with a checkpoint of the same job."
            )
        return [
            {**group, "params": list(numbers)}
            for group, numbers in zip(values, members, strict=True)
        ]

    def members(self, groups: Sequence[Buffer]) -> list[list[int]]:
        """Return by parameter group the numbers of its buffers."""
        found: list[list[int]] = [[] for _ in self.job.groups]
        for number, group in enumerate(groups):
            found[group.group].append(number)
        return found


def _fragments(group: Buffer, rank: int) -> OrderedDict[str, Foreign]:
    """Return where parameters lie in a rank's part, as ds_to_universal asks."""
    fragment = foreign("deepspeed.utils.tensor_fragment", "fragment_address")
    found: OrderedDict[str, Foreign] = OrderedDict()
    for span in group.flat.spans[rank]:
        found[span.name] = _made(fragment, {"numel": span.high - span.low, "start": span.at})
    return found


def _enum(stage: int) -> Foreign:
    return foreign("deepspeed.runtime.zero.config", "ZeroStageEnum")(stage)


def _static_scaler() -> Foreign:
    """Return the loss scaler of a job that does not scale its loss."""
    scaler = foreign("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
    return _made(scaler, {"cur_scale": 1.0, "dynamic": False})


def _made(cls: type[Foreign], state: Mapping[str, Any]) -> Foreign:
    """Return an object as pickle makes it: by ``__new__`` and a state, without a call."""
    made = cls.__new__(cls)
    made.__setstate__(dict(state))
    return made
