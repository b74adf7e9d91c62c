"""The model-parallel ranks of a DeepSpeed checkpoint, put together.

A reader reads each rank's files alone, in the rank's own shapes. Here its pieces become pieces of
whole tensors: shards of tensor-parallel ranks by the cuts of their parameters. Parameters on all
ranks, and tied layers on several stages, are taken once; their other copies become duplicates,
which must be equal.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scalai.converters.checkpoint import (
    MAIN,
    PARAM,
    Checkpoint,
    CheckpointFile,
    FilePiece,
    ReadOptions,
    place,
)
from scalai.converters.deepspeed.files import Tag, TagFiles, read_dictionary
from scalai.converters.deepspeed.job import DeepSpeedJob
from scalai.converters.deepspeed.reading.layers import Layers, parameter_of, unused_copies
from scalai.converters.deepspeed.reading.model import ModelStates
from scalai.converters.deepspeed.reading.plain_stages import units_by_stage
from scalai.converters.deepspeed.shards.cut_rules import INFO, CutRules, read_cuts
from scalai.converters.deepspeed.shards.cuts import Cut, Shards
from scalai.converters.deepspeed.shards.flat import Shape
from scalai.converters.deepspeed.shards.pipeline import (
    LayerFile,
    Pipeline,
    order,
    read_pipeline,
    unit_of,
)
from scalai.converters.torch_archive import StoredTensor
from scalai.core.errors import RefusedError


@dataclass(frozen=True, eq=False, slots=True)
class RankState:
    """One model-parallel rank's content, in its own shapes."""

    model: ModelStates
    job: DeepSpeedJob
    param_groups: Sequence[Mapping[str, Any]]
    pieces: Sequence[FilePiece]
    duplicates: Sequence[FilePiece]
    files: Sequence[CheckpointFile]
    notes: tuple[str, ...] = ()
    guessed: frozenset[str] = frozenset()


ReadModel = Callable[[TagFiles, Mapping[str, StoredTensor] | None, Any], ModelStates]
"""Reads a rank's model files, given a pipeline's tensors and the shared parameters."""


@dataclass(frozen=True, eq=False, slots=True)
class Grid:
    """A tag that is being read: ``tp`` times ``pp`` model-parallel ranks.

    ``layers`` and ``files`` are a pipeline's, by tensor-parallel rank; ``stages``: units of each
    stage, if the model's files do not name them.
    """

    tag: Tag
    options: ReadOptions
    tp: int
    pp: int
    layers: tuple[Layers, ...]
    files: tuple[tuple[LayerFile, ...], ...]
    stages: tuple[frozenset[str], ...] = ()

    @classmethod
    def of(cls, tag: Tag, options: ReadOptions) -> "Grid":
        """Read a pipeline's layer files, and find the ranks.

        Raises:
            RefusedError: Files are missing, or of an unsupported kind.
        """
        count, trust = len(tag.ranks), options.trust_pickle
        tp = len(tag.layers) or count
        if count % tp:
            raise RefusedError(
                f"{tag.directory} has files of {count} model-parallel ranks, and layers of {tp} "
                "tensor-parallel ones. Copy the missing files of the same save."
            )
        layers = tuple(Layers.read(tag, rank, trust=trust) for rank in range(len(tag.layers)))
        given = read_pipeline(options.cuts).tied if layers else {}
        tied = {place: unit for unit, places in given.items() for place in places}
        ranks = tag.ranks if layers else ()
        states = [read_dictionary(tag.directory / of.model[0], trust=trust) for of in ranks]
        files = tuple(of.files(_trained(states[rank::tp]), tied) for rank, of in enumerate(layers))
        stages: tuple[frozenset[str], ...] = ()
        if layers and states[0].get("param_shapes") is None:
            if tag.ranks[0].optimizer:
                raise RefusedError(
                    f"{tag.directory} is of a bf16 pipeline without ZeRO, which DeepSpeed 0.19.8 "
                    "saves in a form that it cannot load itself. Save the job with ZeRO stage 1."
                )
            tensors = layers[0].tensors(files[0])
            stages = units_by_stage(tag.directory, files[0], tied, tensors, states[::tp])
        return cls(tag, options, tp, count // tp, layers, files, stages)

    def models(self, read: ReadModel) -> Iterator[tuple[TagFiles, ModelStates]]:
        """Yield each model-parallel rank's files, with its model's content."""
        shared: Any = None
        for number, files in enumerate(self.tag.ranks):
            has_layers = bool(self.layers)
            tensors = self._tensors(number) if has_layers else None
            # Only the job's first rank notes shared parameters.
            model = read(files, tensors, None if has_layers else shared)
            model = replace(model, layer_files=self._files(number))
            shared = model.first.get("shared_params") if number == 0 else shared
            yield files, model

    def _tensors(self, number: int) -> dict[str, StoredTensor]:
        rank = number % self.tp
        tensors = self.layers[rank].tensors(self.files[rank])
        units = self.stages[number // self.tp] if self.stages else None
        names = order([name for name in tensors if units is None or unit_of(name) in units])
        return {name: tensors[name] for name in names}

    def _files(self, number: int) -> dict[str, str]:
        if not self.layers:
            return {}
        layers, files = self.layers[number % self.tp], self.files[number % self.tp]
        return {
            f"{layer.unit}.{name}": layers.names[layer.place]
            for layer in reversed(files)
            for name in layer.names
        }

    def unite(self, layout: str, states: Sequence[RankState], *, is_split: bool) -> Checkpoint:
        """Put the ranks together.

        Raises:
            RefusedError: They do not fit together, or the cuts of their parameters are unknown.
        """
        cuts = self._cuts(states)
        pieces, duplicates = self.gather(states, cuts)
        files = {file.path: file for state in states for file in state.files}
        files |= {file.path: file for file in self._layer_files()}
        values = states[0].model.values(
            self.job(states, cuts), states[0].param_groups, is_split=is_split
        )
        return Checkpoint(
            layout,
            self.tag.directory,
            place(pieces, list(files.values())),
            replace(values, degrees={**values.degrees, "tp": self.tp, "pp": self.pp}),
            duplicates=place(duplicates, list(files.values())) if duplicates else None,
            notes=tuple(dict.fromkeys(note for state in states for note in state.notes)),
            guessed=frozenset().union(*(state.guessed for state in states)),
        )

    def gather(
        self, states: Sequence[RankState], cuts: Mapping[str, Cut]
    ) -> tuple[list[FilePiece], list[FilePiece]]:
        """Return the pieces of whole tensors, and those of second copies.

        Raises:
            RefusedError: Ranks are of two saves, or have unequal parameter groups.
        """
        for state in states:
            self._check_alike(states[0], state)
        pieces: list[FilePiece] = []
        duplicates: list[FilePiece] = []
        before: set[str] = set()
        for number, state in enumerate(states):
            shards = Shards(cuts, number % self.tp)
            unused = unused_copies(self.tag.directory, state.pieces, before)
            for piece in state.pieces:
                if parameter_of(piece) in unused:
                    continue
                is_copy = shards.rank > 0 and shards.is_shared(piece.tensor)
                is_copy = is_copy or unit_of(parameter_of(piece)) in before
                if not (is_copy and piece.is_rounded):
                    (duplicates if is_copy else pieces).extend(shards.of_whole(piece))
            for piece in state.duplicates:
                if parameter_of(piece) not in unused:
                    duplicates.extend(shards.of_whole(piece))
            if self.pp > 1 and shards.rank == self.tp - 1:
                before |= _units(state.job)
        for rank, layers in enumerate(self.layers):
            shards = Shards(cuts, rank)
            for piece, was_there in layers.pieces(self.files[rank]):
                is_copy = was_there or (rank > 0 and shards.is_shared(piece.tensor))
                (duplicates if is_copy else pieces).extend(shards.of_whole(piece))
        return pieces, duplicates

    def _layer_files(self) -> Iterator[CheckpointFile]:
        for layers in self.layers:
            for name in layers.names.values():
                yield CheckpointFile(name, (self.tag.directory / name).stat().st_size)

    def _check_alike(self, first: RankState, state: RankState) -> None:
        path = state.model.path
        for key in ("global_steps", "dp_world_size"):
            if state.model.first[key] != first.model.first[key]:
                raise RefusedError(
                    f"{path} has {key} {state.model.first[key]}, and {first.model.path.name} has "
                    f"{first.model.first[key]}: files of two checkpoints are mixed. Use another "
                    "one."
                )
        if len(state.job.groups) != len(first.job.groups):
            raise RefusedError(
                f"{path} has {len(state.job.groups)} parameter groups, and "
                f"{first.model.path.name} {len(first.job.groups)}. Stages with unequal groups are "
                "not read: give every stage all groups."
            )

    def _cuts(self, states: Sequence[RankState]) -> dict[str, Cut]:
        if self.tp == 1:
            return {}
        shapes: dict[str, list[Shape]] = {}
        for number in range(len(states)):
            for name, shape in self._shapes(states[number], number % self.tp).items():
                found = shapes.setdefault(name, [])
                if len(found) == number % self.tp:
                    found.append(shape)
        short = [name for name, of in shapes.items() if len(of) != self.tp]
        if short:
            raise RefusedError(
                f"{self.tag.directory} has {short[0]} on some tensor-parallel ranks alone. Use "
                "another checkpoint."
            )
        info = states[0].job.model.get(INFO) or {}
        return CutRules(info, read_cuts(self.options.cuts)).cuts(shapes)

    def _shapes(self, state: RankState, tp_rank: int) -> dict[str, Shape]:
        found = {
            parameter_of(piece): piece.tensor.shape
            for piece in (*state.duplicates, *state.pieces)
            if piece.tensor.name.startswith((f"{PARAM}/", f"{MAIN}/"))
            and parameter_of(piece) not in state.job.buffers
        }
        for layer in self.files[tp_rank] if self.files else ():
            for name in layer.names:
                full = f"{layer.unit}.{name}"
                if full in state.job.dtypes and full not in state.job.buffers:
                    found[full] = self.layers[tp_rank].states[layer.place][name].shape
        return found

    def job(self, states: Sequence[RankState], cuts: Mapping[str, Cut]) -> DeepSpeedJob:
        """Return the job of all ranks.

        Raises:
            RefusedError: Tensor-parallel ranks have unequal parameters.
        """
        jobs = [state.job for state in states]
        for rank, job in enumerate(jobs):
            if job.groups != jobs[rank - rank % self.tp].groups:
                raise RefusedError(
                    f"{states[rank].model.path} has other parameters than the tensor-parallel "
                    "rank 0 of its stage. Use another checkpoint."
                )
        job = replace(jobs[0], cuts=cuts, of_ranks=tuple(job.model for job in jobs))
        if not self.files:
            return job
        stages = jobs[:: self.tp]
        groups = tuple(
            tuple(order([name for stage in stages for name in stage.groups[number]]))
            for number in range(len(job.groups))
        )
        names = [f"{layer.unit}.{name}" for layer in self.files[0] for name in layer.names]
        names_tp = any("-model_0" in file for of in self.tag.layers for file in of.values())
        return replace(
            job,
            groups=groups,
            module=tuple(dict.fromkeys(names)),
            dtypes={name: dtype for stage in stages for name, dtype in stage.dtypes.items()},
            aliases={name: owner for stage in stages for name, owner in stage.aliases.items()},
            buffers=tuple(dict.fromkeys(name for stage in stages for name in stage.buffers)),
            frozen=tuple(dict.fromkeys(name for stage in stages for name in stage.frozen)),
            pipeline=Pipeline(self.files[0], tuple(map(_units, stages)), names_tp),
        )


def _units(job: DeepSpeedJob) -> frozenset[str]:
    return frozenset(unit_of(name) for group in job.groups for name in group)


def _trained(states: Sequence[Mapping[str, Any]]) -> dict[str, Shape]:
    return {
        name: tuple(shape)
        for state in states
        for shapes in state.get("param_shapes") or ()
        for name, shape in shapes.items()
    }
