"""The draft of a DeepSpeed target: its model-parallel ranks with their jobs, the source's tensors,
and the torch archives to fill."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    CheckpointFile,
    FilePiece,
    PlacedTensors,
    WriteOptions,
    parameters_of,
    place,
)
from scalai.converters.deepspeed.cuts import (
    EVERYTHING,
    INFO,
    CutRules,
    ShardCut,
    Shards,
    contiguous,
    info_at,
    read_cuts,
)
from scalai.converters.deepspeed.experts import expert_of, split_groups
from scalai.converters.deepspeed.flat import Shape, Span
from scalai.converters.deepspeed.job import STATE, DeepSpeedJob, is_number, sub_group_elements
from scalai.converters.deepspeed.loss_scale import to_plain
from scalai.converters.deepspeed.pipeline import read_pipeline, stages_at, unit_of
from scalai.converters.pickles import foreign
from scalai.converters.source_files import read_steps
from scalai.converters.torch_archive import ArchiveLayout, NewTensor, lay_out_archive
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor, split_name
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.region import flat_range, whole
from scalai.store.atomic import replace_file

Filled = dict[NewTensor, list[FilePiece]]
"""Pieces of a new tensor, by identity; positions count from its start."""


@dataclass(frozen=True, eq=False, slots=True)
class Archives:
    """Files, their known bytes, and the pieces to fill the rest.

    ``shards``: the parts of the rank with these files; pieces refer to them.
    """

    pieces: list[FilePiece] = field(default_factory=list)
    files: list[CheckpointFile] = field(default_factory=list)
    fixed: dict[int, Sequence[tuple[int, bytes]]] = field(default_factory=dict)
    shards: Shards = EVERYTHING

    def of(self, shards: Shards) -> "Archives":
        """Return the same files, to add those of another rank."""
        return replace(self, shards=shards)

    def add(self, path: str, value: Any, filled: Mapping[NewTensor, Sequence[FilePiece]]) -> None:
        """Add a file; torch reads it as ``value``."""
        archive = lay_out_archive(value, Path(path).stem)
        self.add_laid_out(path, archive, [filled.get(tensor, ()) for tensor in archive.tensors])

    def add_laid_out(
        self, path: str, archive: ArchiveLayout, filled: Sequence[Sequence[FilePiece]]
    ) -> None:
        """Add a file with this layout; ``filled`` are the pieces of its tensors, in order."""
        for pieces, begin in zip(filled, archive.begin, strict=True):
            for own in pieces:
                for part in self.shards.of_whole(own):
                    self.pieces.extend(
                        replace(piece, file=path, begin=begin + piece.begin)
                        for piece in contiguous(part)
                    )
        self.fixed[len(self.files)] = archive.fixed
        self.files.append(CheckpointFile(path, archive.size_bytes))

    def placed(self) -> PlacedTensors:
        """Return the rows to fill."""
        return place(self.pieces, self.files)


def pieces_of(tensor: Tensor, span: Span) -> Iterator[FilePiece]:
    """Yield a span of a tensor as boxes, with bytes counted from the start of its buffer."""
    item = ITEM_BYTES[tensor.dtype]
    begin = span.at * item
    for box in flat_range(tensor.shape, span.low, span.high):
        yield FilePiece(tensor, box, "", begin)
        begin += box.numel * item


def naming(file: str, tag: str) -> Callable[[Path, npt.NDArray[np.uint64]], None]:
    """Return the last act of a target: the file that names its tag."""
    return lambda directory, _: replace_file(directory / file, tag.encode())


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


@dataclass(frozen=True, eq=False, slots=True)
class Ranks:
    """The ranks of a target.

    Attributes:
        source, options, job, stage: As in ``Draft``, but for all ranks.
        cuts: The cuts at the target's ``tp``.
        stages: Units by stage; empty without a pipeline.
        how: Origin of the stages, for the notes.
    """

    source: Checkpoint
    options: WriteOptions
    job: DeepSpeedJob
    stage: int
    dp: int
    tp: int
    pp: int
    ep: int
    known: Mapping[str, ShardCut]
    cuts: Mapping[str, ShardCut]
    stages: tuple[frozenset[str], ...]
    how: str

    @classmethod
    def of(
        cls, source: Checkpoint, job: DeepSpeedJob, stage: int, options: WriteOptions
    ) -> "Ranks":
        """Find each rank's part of a target.

        Raises:
            RefusedError: The degrees are unknown or impossible; or the cuts of parameters, or the
                bounds of stages, are unknown.
        """
        dp, tp, pp, ep = _degrees(source, options, job)
        if job.experts is not None and (stage == 3 or tp * pp > 1):
            raise RefusedError(
                f"stage {stage} at tp={tp} pp={pp} is asked of a DeepSpeed job with experts, which "
                "are written for stages 0 to 2, tp=1 and pp=1. Convert to deepspeed_zero2."
            )
        shapes = {name: tensor.shape for name, tensor in parameters_of(source).items()}
        stages, how = _stages(source, job, stage, pp, shapes, options)
        uncut = {name: shape for name, shape in shapes.items() if name not in job.buffers}
        known = _known(job, uncut, options, is_needed=tp > 1)
        cuts = {name: known[name].recut(name, tp) for name in uncut} if tp > 1 else {}
        return cls(source, options, job, stage, dp, tp, pp, ep, known, cuts, stages, how)

    def notes(self) -> Iterator[str]:
        """Yield notes for the target's job."""
        if self.how:
            yield (
                f"stages begin where they do by {self.how}; DeepSpeed refuses other ones, and "
                "prints its own when it starts"
            )
        if self.job.of_ranks and not self._is_same and len(self.job.of_ranks) > 1:
            yield (
                "what the client saved beside the model is that of model-parallel rank 0 for every "
                "rank, RNG states included"
            )
        uneven = [name for name, cut in self.cuts.items() if any(map(_is_uneven, cut.widths))]
        if uneven:
            yield (
                f"tp={self.tp} cuts {len(uneven)} parameters unevenly (as {uneven[0]}), the first "
                "ranks having more, as DeepSpeed's AutoTP does"
            )

    def drafts(self, archives: Archives, folder: str) -> list[Draft]:
        """Return a draft of each model-parallel rank, in order.

        Raises:
            RefusedError: The source lacks tensors, or a parameter group would be empty.
        """
        return [
            Draft(
                self.source,
                self.options,
                self._job(rank),
                self.stage,
                self.dp,
                archives.of(Shards(self.cuts, rank % self.tp)),
                folder,
                (self.tp, self.pp),
                rank,
                self.ep,
            )
            for rank in range(self.tp * self.pp)
        ]

    @property
    def _is_same(self) -> bool:
        degrees = self.source.values.degrees
        return (degrees.get("tp"), degrees.get("pp")) == (self.tp, self.pp)

    def _job(self, rank: int) -> DeepSpeedJob:
        job = self.job
        if self._is_same and len(job.of_ranks) == self.tp * self.pp:
            job = replace(job, model=job.of_ranks[rank])
        elif INFO in job.model:
            model = {**job.model, INFO: info_at(job.model[INFO], self.cuts or self._alone())}
            job = replace(job, model=model)
        if not self.stages:
            return job
        return self._of_stage(job, rank // self.tp)

    def _alone(self) -> dict[str, ShardCut]:
        return {name: cut.recut(name, 1) for name, cut in self.known.items()}

    def _of_stage(self, job: DeepSpeedJob, stage: int) -> DeepSpeedJob:
        units = self.stages[stage]
        groups = tuple(tuple(n for n in group if unit_of(n) in units) for group in job.groups)
        for number, group in enumerate(groups):
            if not group:
                raise RefusedError(
                    f"stage {stage} of pp={self.pp} would have no parameter of group "
                    f"{number}, which DeepSpeed does not save. Choose another --pp."
                )
        return replace(
            job,
            groups=groups,
            dtypes={name: dtype for name, dtype in job.dtypes.items() if unit_of(name) in units},
            aliases={name: own for name, own in job.aliases.items() if unit_of(name) in units},
            buffers=tuple(name for name in job.buffers if unit_of(name) in units),
            frozen=tuple(name for name in job.frozen if unit_of(name) in units),
        )


def _degrees(
    source: Checkpoint, options: WriteOptions, job: DeepSpeedJob
) -> tuple[int, int, int, int]:
    degrees = {**source.values.degrees, **options.degrees}
    known = ("dp", "tp", "pp", "ep") if job.experts is not None else ("dp", "tp", "pp")
    for axis, size in sorted(degrees.items()):
        if axis not in known and size != 1:
            raise RefusedError(
                f"{axis}={size} is asked of a DeepSpeed checkpoint, which has {', '.join(known)} "
                f"alone. Give --{axis} 1."
            )
    if "dp" not in degrees:
        raise RefusedError("the number of data-parallel ranks is not known. Give --dp.")
    dp, ep = degrees["dp"], degrees.get("ep", 1)
    if job.experts is not None:
        job.experts.check(ep, dp)
    return dp, degrees.get("tp", 1), degrees.get("pp", 1), ep


def _stages(
    source: Checkpoint,
    job: DeepSpeedJob,
    stage: int,
    pp: int,
    shapes: Mapping[str, Shape],
    options: WriteOptions,
) -> tuple[tuple[frozenset[str], ...], str]:
    """Return the units by stage, empty without a pipeline; and their origin."""
    if job.pipeline is None:
        if pp != 1:
            raise RefusedError(
                f"pp={pp} is asked of {source.directory}, whose engine is no pipeline. Give --pp 1."
            )
        return (), ""
    if stage > 1:
        raise RefusedError(
            f"stage {stage} is asked of a pipeline, for which DeepSpeed has stages 0 and 1 alone. "
            "Convert to deepspeed_zero1."
        )
    other = _reference(options)
    if other is not None and other.pipeline is not None and len(other.pipeline.stages) == pp:
        return other.pipeline.stages, "the checkpoint of --args-from"
    trained = {name: shapes[name] for group in job.groups for name in group}
    return stages_at(job.pipeline, pp, trained, read_pipeline(options.cuts))


def _reference(options: WriteOptions) -> DeepSpeedJob | None:
    job = options.reference.extra.get(STATE) if options.reference is not None else None
    return job if isinstance(job, DeepSpeedJob) else None


def _known(
    job: DeepSpeedJob, shapes: Mapping[str, Shape], options: WriteOptions, *, is_needed: bool
) -> Mapping[str, ShardCut]:
    """Return the cuts of parameters: the source's; else by rules, a file's, or those of
    ``--args-from``. Raises if some ``is_needed`` and unknown."""
    if job.cuts:
        return job.cuts
    rules = CutRules(job.model.get(INFO) or {}, read_cuts(options.cuts))
    alone = {name: [shape] for name, shape in shapes.items()}
    other = _reference(options)
    known = {**(other.cuts if other is not None else {}), **rules.known_cuts(alone)}
    if is_needed:
        known |= rules.cuts({name: of for name, of in alone.items() if name not in known})
    return known


def _is_uneven(widths: tuple[int, ...]) -> bool:
    return len(set(widths)) > 1
