"""The model-parallel ranks of a DeepSpeed checkpoint, put together.

A reader reads each rank's files alone, in the rank's own shapes. Here its pieces become pieces of
whole tensors: shards of tensor-parallel ranks by the cuts of their parameters. Parameters on all
ranks, and tied layers on several stages, are taken once; their other copies become duplicates,
which must be equal.

Without ZeRO a pipeline's files do not record its stages: the optimizer numbers parameters. Each
stage has consecutive layers, with as many elements as its optimizer has states. Tied layers look
like others, so the user names them (``tied`` in ``[pipeline]`` of a file of cuts).

A pipeline's weights are in a file per layer. Its keys are the layer's own; the engine's names have
the layer's place as prefix, or the key of a tied layer. The file lacks this key; names and shapes
of the parameters identify it.

A stage has a whole copy of a tied layer, with parameters its own function of the layer may not use,
such as the embedding's positions in a head. DeepSpeed does not keep these equal, and no file names
them; but without a gradient, their moments are zero.

Source: deepspeed 0.19.8: ``save_state_dict``, ``ckpt_layer_path`` and ``_synchronize_tied_weights``
of runtime/pipe/module.py.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    ReadOptions,
    place,
    stored_files,
)
from scalai.converters.deepspeed.cuts import INFO, CutRules, ShardCut, Shards, read_cuts
from scalai.converters.deepspeed.flat import Shape
from scalai.converters.deepspeed.job import DeepSpeedJob
from scalai.converters.deepspeed.model_reader import NEEDED, ModelStates
from scalai.converters.deepspeed.pipeline import (
    TIED,
    LayerFile,
    Pipeline,
    order,
    read_pipeline,
    unit_of,
)
from scalai.converters.deepspeed.tag_files import Tag, TagFiles, read_dictionary
from scalai.converters.torch_archive import StoredTensor
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor, split_name
from scalai.core.tensors.region import whole

Stages = tuple[frozenset[str], ...]


def units_by_stage(
    directory: Path,
    files: Sequence[LayerFile],
    tied: Mapping[int, str],
    tensors: Mapping[str, StoredTensor],
    states: Sequence[Mapping[str, Any]],
) -> Stages:
    """Return the units of each stage.

    Args:
        files: Layers with files.
        tied: Units of tied layers, by place.
        tensors: Tensors of all layers, by the engine's names.
        states: Content of each stage's model file.

    Raises:
        RefusedError: No cut of the layers fits, or more than one.
    """
    buffers = [frozenset(state.get("buffer_names") or ()) for state in states]
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        if not any(name in names for names in buffers):
            sizes[unit_of(name)] = sizes.get(unit_of(name), 0) + prod(tensor.shape)
    places = {layer.place: layer.unit for layer in files} | dict(tied)
    units = [places[place] for place in sorted(places) if sizes.get(places[place])]
    totals = [_elements(state.get("optimizer") or {}) for state in states]
    found = set(_ways(units, sizes, totals))
    if len(found) != 1:
        raise RefusedError(
            f"{directory} is of a pipeline without ZeRO, and {len(found) or 'none'} of the ways to "
            f"cut its {len(units)} layers into {len(totals)} stages fits their optimizers. If "
            "layers are tied, pass --cuts with a file that says tied = {KEY = [PLACE, PLACE]} in "
            "[pipeline]; else save the job with ZeRO stage 1 once."
        )
    return tuple(
        stage | {unit_of(name) for name in names}
        for stage, names in zip(found.pop(), buffers, strict=True)
    )


def _ways(
    units: Sequence[str], sizes: Mapping[str, int], totals: Sequence[int]
) -> Iterator[Stages]:
    """Yield the cuts of units, in order, into stages with these sums; a stage counts a repeated
    unit once."""
    if not totals:
        if not units:
            yield ()
        return
    for count in range(len(units) + 1):
        stage = frozenset(units[:count])
        if sum(sizes[unit] for unit in stage) == totals[0]:
            for rest in _ways(units[count:], sizes, totals[1:]):
                yield (stage, *rest)


def _elements(tree: Mapping[str, Any]) -> int:
    inner = tree.get("optimizer_state_dict", tree)
    return sum(
        max((prod(t.shape) for t in state.values() if isinstance(t, StoredTensor)), default=0)
        for state in inner.get("state", {}).values()
    )


Shapes = Mapping[str, Shape]

SAMPLED = 4096
"""Elements of a moment's piece to check, spread over it."""


@dataclass(frozen=True, eq=False, slots=True)
class Layers:
    """The layer files of one tensor-parallel rank.

    ``states``: the files' dictionaries, by place, in order; ``names``: the files.
    """

    directory: Path
    names: Mapping[int, str]
    states: Mapping[int, Mapping[str, Any]]

    @classmethod
    def read(cls, tag: Tag, tp_rank: int, *, trust: bool) -> "Layers":
        """Read the files. Raises as ``read_dictionary``; ``RefusedError``: a file holds other
        values than tensors."""
        names = tag.layers[tp_rank]
        states = {}
        for at in sorted(names):
            path = tag.directory / names[at]
            states[at] = read_dictionary(path, trust=trust)
            odd = [k for k, v in states[at].items() if not isinstance(v, StoredTensor)]
            if odd:
                raise RefusedError(
                    f"{path} holds {odd[0]}, which is no tensor: extra state of a layer is not "
                    "read. Save the model without it."
                )
        return cls(tag.directory, names, states)

    def files(self, trained: Shapes, tied: Mapping[int, str]) -> tuple[LayerFile, ...]:
        """Return the layers by place.

        Args:
            trained: Shapes of all trained parameters on this rank, by name; empty: the files do not
                name them.
            tied: Units of known tied layers, by place.

        Raises:
            RefusedError: A file fits several tied layers.
        """
        units: dict[str, dict[str, Shape]] = {}
        for name, shape in trained.items():
            units.setdefault(unit_of(name), {})[name.removeprefix(f"{unit_of(name)}.")] = shape
        return tuple(
            LayerFile(
                place,
                tied.get(place) or self._unit(place, units),
                tuple(state),
                getattr(state, "_metadata", None),
            )
            for place, state in self.states.items()
        )

    def _unit(self, place: int, units: Mapping[str, Shapes]) -> str:
        state = self.states[place]
        if str(place) in units or not state:
            return str(place)
        fitting = [
            unit
            for unit, shapes in units.items()
            if unit.startswith(TIED)
            and all(name in state and state[name].shape == shapes[name] for name in shapes)
        ]
        if len(fitting) > 1:
            raise RefusedError(
                f"{self.directory / self.names[place]} may be of the tied layers "
                f"{', '.join(fitting)}, whose parameters have equal names and shapes. Give them "
                "different names in the model."
            )
        return fitting[0] if fitting else str(place)

    def tensors(self, files: Sequence[LayerFile]) -> dict[str, StoredTensor]:
        """Return the tensors of these layers by the engine's names."""
        return {
            f"{layer.unit}.{name}": self.states[layer.place][name]
            for layer in reversed(files)
            for name in layer.names
        }

    def pieces(self, files: Sequence[LayerFile]) -> Iterator[tuple[FilePiece, bool]]:
        """Yield the tensors of these layers, and whether each is a repeat: tied layers may have a
        file at every place."""
        seen = set()
        for layer in files:
            for name in layer.names:
                stored: StoredTensor = self.states[layer.place][name]
                tensor = Tensor(f"{PARAM}/{layer.unit}.{name}", stored.shape, stored.dtype)
                file, box = self.names[layer.place], whole(stored.shape)
                yield FilePiece(tensor, box, file, stored.begin, stored.stride), tensor.name in seen
                seen.add(tensor.name)


def parameter_of(piece: FilePiece) -> str:
    """Return the name of a piece's parameter."""
    return split_name(piece.tensor.name)[1]


def unused_copies(
    directory: Path, pieces: Sequence[FilePiece], before: Collection[str]
) -> set[str]:
    """Return the parameters with copies on this stage that never had a gradient.

    Args:
        pieces: Pieces of one rank of the stage.
        before: Units of earlier stages.
    """
    found: dict[str, bool] = {}
    for piece in pieces:
        kind, name = split_name(piece.tensor.name)
        if kind not in (PARAM, MAIN, STEP) and unit_of(name) in before:
            is_zero = piece.tensor.dtype == "F32" and not _sample(directory, piece).any()
            found[name] = found.get(name, True) and is_zero
    return {name for name, is_unused in found.items() if is_unused}


def _sample(directory: Path, piece: FilePiece) -> npt.NDArray[Any]:
    count = prod(piece.box.shape)
    data = np.memmap(directory / piece.file, np.uint8, "r", piece.begin, (4 * count,))
    return data.view(np.float32)[:: max(count // SAMPLED, 1)]


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

    def models(self, needed: Sequence[str] = NEEDED) -> Iterator[tuple[TagFiles, ModelStates]]:
        """Yield each model-parallel rank's files, with its model's content, which has ``needed``
        entries."""
        shared: Any = None
        for number, files in enumerate(self.tag.ranks):
            has_layers = bool(self.layers)
            model = ModelStates.read(
                files.directory, files.model, is_stage_3=files.is_stage_3,
                trust=self.options.trust_pickle, needed=needed,
                layers=self._tensors(number) if has_layers else None,
                # Only the job's first rank notes shared parameters.
                shared=None if has_layers else shared, tag=self.tag,
            )  # fmt: skip
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
        for layers in self.layers:
            names = layers.names.values()
            files |= {file.path: file for file in stored_files(self.tag.directory, names)}
        job = self.job(states, cuts)
        values = states[0].model.values(job, states[0].param_groups, is_split=is_split)
        stage = int(layout[-1])
        notes = [
            *(note for state in states for note in state.notes),
            *states[0].model.notes(job, stage),
        ]
        return Checkpoint(
            layout,
            self.tag.directory,
            place(pieces, list(files.values())),
            replace(values, degrees={**values.degrees, "tp": self.tp, "pp": self.pp}),
            duplicates=place(duplicates, list(files.values())) if duplicates else None,
            notes=tuple(dict.fromkeys(notes)),
            guessed=frozenset().union(*(state.guessed for state in states)),
        )

    def gather(
        self, states: Sequence[RankState], cuts: Mapping[str, ShardCut]
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

    def _cuts(self, states: Sequence[RankState]) -> dict[str, ShardCut]:
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

    def job(self, states: Sequence[RankState], cuts: Mapping[str, ShardCut]) -> DeepSpeedJob:
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
