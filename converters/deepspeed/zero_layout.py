"""DeepSpeed's own checkpoints with ZeRO, stages 1 to 3.

Stages 1 and 2 are one layout: the weights whole, masters and moments in flat buffers cut over the
ranks. Stage 3 keeps no 16-bit weights: they are its rounded masters. A conversion rounds them, as
DeepSpeed's loader does.

Names are the module's ``state_dict`` keys; buffers and frozen parameters are ``param`` too.

Source: deepspeed 0.19.8: runtime/engine.py (``_save_zero_checkpoint``), the ``state_dict`` of
runtime/zero/stage_1_and_2.py, stage3.py and runtime/bf16_optimizer.py. Differs in: no copies of the
recovery scripts (``zero_to_fp32.py``).

Files exchanged between ranks are detected: stages 1 and 2 keep weights beside the masters, so
exchanged files contradict them. Stage 3 keeps nothing twice: the remaining marks are a file's name
when torch saved it, the devices of its tensors, and the padding at the end of the last rank's
parts, with moments of zero.

Source: ``archive_name`` of caffe2/serialize/inline_container.cc of torch 2.13; ``partition`` of
runtime/zero/partition_parameters.py of DeepSpeed 0.19.8.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from scalai.converters.checkpoint import (
    MAIN,
    PARAM,
    Checkpoint,
    CheckpointFile,
    CheckpointTarget,
    FilePiece,
    ReadOptions,
    WriteOptions,
    step_piece,
    stored_files,
)
from scalai.converters.deepspeed.drafts import Archives, Ranks, job_of, naming
from scalai.converters.deepspeed.experts import expert_of
from scalai.converters.deepspeed.flat import (
    Flat,
    Shape,
    Span,
    part_of,
    split_each,
    split_whole,
    undo_round_robin,
)
from scalai.converters.deepspeed.grid import Grid, RankState
from scalai.converters.deepspeed.job import DeepSpeedJob, round_robins
from scalai.converters.deepspeed.model_reader import ModelStates
from scalai.converters.deepspeed.model_writer import add_experts, add_layers, add_model
from scalai.converters.deepspeed.optimizer_writer import add_optimizer, buffers_of
from scalai.converters.deepspeed.tag_files import (
    LATEST,
    TagFiles,
    carried,
    find_tag,
    list_files,
    read_dictionary,
    scalar_of,
    tag_of,
)
from scalai.converters.torch_archive import StoredTensor
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.region import flat_range
from scalai.store.files import map_file

MAX_PADDED = 256
"""Parameters with padding to check."""
NO_SECOND_COPY = (
    "stage 3 keeps no second copy of masters and moments, and these files do not say of which rank "
    "they are: optim_states.pt of two ranks that were exchanged for each other are not noticed"
)

_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(?:optim|model)_states")
_DEVICE = re.compile(r"[a-z]+:\d+")


def check_names(directory: Path, trees: Mapping[str, Any]) -> bool:
    """Compare the names of files with their names when torch saved them.

    Args:
        directory: Directory of the files.
        trees: Content by file.

    Returns:
        Whether every file had a stored name to compare.

    Raises:
        RefusedError: A file is another rank's.
    """
    has_all = True
    for name, tree in trees.items():
        tensor = next(_tensors(tree), None)
        root = "" if tensor is None or tensor.storage is None else tensor.storage.record
        own, saved = _FILE.fullmatch(Path(name).stem), _FILE.fullmatch(root.partition("/")[0])
        if own and saved and own.groups() != saved.groups():
            raise RefusedError(
                f"{directory / name} was saved as {saved[0]}.pt, by another rank: files were "
                "exchanged or renamed. Copy them again under their own names."
            )
        has_all &= bool(own and saved)
    return has_all


def check_devices(
    directory: Path, models: Mapping[str, Any], optimizers: Mapping[str, Any]
) -> bool:
    """Compare the devices of each rank's two files, in the order of ranks.

    Returns:
        Whether they distinguish all ranks.

    Raises:
        RefusedError: A rank's two files are from different devices.
    """
    seen = []
    for (model, one), (optimizer, two) in zip(models.items(), optimizers.items(), strict=True):
        devices = _devices(one), _devices(two)
        if all(devices) and not devices[0] & devices[1]:
            raise RefusedError(
                f"{directory / optimizer} was saved from {', '.join(sorted(devices[1]))}, and "
                f"{model} of the same rank from {', '.join(sorted(devices[0]))}: files of two "
                "ranks were exchanged. Copy them again under their own names."
            )
        seen.append(frozenset(devices[0] & devices[1]))
    return all(seen) and len({*seen}) == len(seen)


def check_padding(
    directory: Path, shapes: Mapping[str, Shape], ranks: Sequence[tuple[str, Mapping[str, Any]]]
) -> None:
    """Look for a rank with another rank's padding.

    Args:
        directory: Directory of the files.
        shapes: Shapes of the parameters of a stage 3 buffer, in its order.
        ranks: By rank its file, and the flat buffers of moments by kind.

    Raises:
        RefusedError: A rank has numbers in its padding, and another rank has none there.
    """
    for rank, (file, _) in enumerate(ranks):
        places = list(_padding(shapes, len(ranks), rank))[:MAX_PADDED]
        if not places or _are_zero(directory, *ranks[rank], places):
            continue
        for other, (name, _) in enumerate(ranks):
            if other != rank and _are_zero(directory, *ranks[other], places):
                raise RefusedError(
                    f"{directory / file} has moments where rank {rank} has padding, and {name} has "
                    "padding there: files of two ranks were exchanged. Copy them again under their "
                    "own names."
                )


def _padding(shapes: Mapping[str, Shape], dp: int, rank: int) -> Iterator[range]:
    at = 0
    for shape in shapes.values():
        part = part_of(shape, dp)
        padding = min(max((rank + 1) * part - prod(shape), 0), part)
        at += part
        if padding:
            yield range(at - padding, at)


def _are_zero(
    directory: Path, file: str, moments: Mapping[str, Any], places: Sequence[range]
) -> bool:
    data = map_file(directory / file)
    for stored in moments.values():
        item = ITEM_BYTES[stored.dtype]
        for place in places:
            begin = stored.begin + place.start * item
            if np.frombuffer(data, np.uint8, len(place) * item, begin).any():
                return False
    return True


def _devices(tree: Any) -> set[str]:
    found = (t.storage.device for t in _tensors(tree) if t.storage is not None)
    return {device for device in found if _DEVICE.fullmatch(device)}


def _tensors(tree: Any) -> Iterator[StoredTensor]:
    if isinstance(tree, StoredTensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors(value)


MASTERS = "fp32"
"""Key of the flat buffer of masters here, beside the optimizer's own names."""

_MADE_ANEW = (
    "base_optimizer_state", "single_partition_of_fp32_groups", "group_paddings", "partition_count",
    "param_slice_mappings", "param_alignment_paddings", "optimizer_state_dict", "fp32_flat_groups",
    "zero_stage", "ds_version", "base_optimizer_state_step",
)  # fmt: skip
"""Entries of a rank's optimizer state that a writer rebuilds."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A flat buffer of all ranks, or of the ranks with the same experts.

    ``states``: by one of its ``ranks``, the optimizer's state of its part, with the masters as
    ``MASTERS``.
    """

    shapes: Mapping[str, tuple[int, ...]]
    flat: Flat
    ranks: Sequence[int]
    states: tuple[Mapping[str, Any], ...]


def open_rank(files: TagFiles, model: ModelStates, trust: bool) -> "ZeroReader":
    """Read the optimizer's pickles of a model-parallel rank.

    Raises:
        RefusedError: Files are missing, or of two saves.
    """
    directory = files.directory
    optimizers = []
    for name in files.optimizer:
        state = read_dictionary(directory / name, trust=trust).get("optimizer_state_dict")
        if not isinstance(state, dict):
            raise RefusedError(f"{directory / name} holds no optimizer_state_dict.")
        counts = state.get("partition_count")
        expected = [
            model.dp // model.experts.ep if any(map(expert_of, shapes)) else model.dp
            for shapes in model.shapes()
        ]
        listed = counts if isinstance(counts, list | tuple) else [counts] * len(expected)
        if list(listed) != expected:
            raise RefusedError(
                f"{directory / name} is one of {counts} parts, and {files.model[0]} of "
                f"{model.dp} data-parallel ranks ({model.experts.ep} expert-parallel ones): files "
                "of two checkpoints are mixed. Use another checkpoint."
            )
        optimizers.append(_as_rigid(state))
    if model.dp != len(optimizers):
        raise RefusedError(
            f"{directory} was saved by {model.dp} data-parallel ranks, and has optim_states.pt of "
            f"{len(optimizers)}. Copy the missing files of the same save, or use another "
            "checkpoint."
        )
    check_names(directory, dict(zip(files.optimizer, optimizers, strict=True)))
    return ZeroReader(files, model, tuple(optimizers))


def _as_rigid(state: dict[str, Any]) -> dict[str, Any]:
    """Return an ``elastic_checkpoint`` state in the usual form; groups remain unknown."""
    base = state.get("base_optimizer_state")
    if not isinstance(base, list):
        return state
    inner = {"state": dict(enumerate(base)), "param_groups": []}
    return {**state, "base_optimizer_state": inner}


@dataclass(frozen=True, slots=True)
class ZeroReader:
    """One model-parallel rank that is being read."""

    files: TagFiles
    model: ModelStates
    optimizers: tuple[dict[str, Any], ...]
    pieces: list[FilePiece] = field(default_factory=list)
    duplicates: list[FilePiece] = field(default_factory=list)
    steps: dict[str, CheckpointFile] = field(default_factory=dict)

    def read(self) -> RankState:
        """Return the rank's state. Raises ``RefusedError`` if its files disagree."""
        groups = list(self._groups())
        notes = [*self._notes(), *self._marks(groups)]
        self.pieces.extend(self.model.pieces())
        for group in groups:
            self._check_steps(group)
            self._place_group(group)
        job, param_groups = self._job(groups)
        return RankState(
            self.model,
            job,
            param_groups,
            self.pieces,
            self.duplicates,
            self._placed_files(),
            tuple(notes),
        )

    def _path(self, rank: int) -> Path:
        return self.files.directory / self.files.optimizer[rank]

    def _inner(self, rank: int) -> Mapping[str, Any]:
        key = "optimizer_state_dict" if self.files.is_stage_3 else "base_optimizer_state"
        inner = self.optimizers[rank].get(key)
        if not isinstance(inner, dict) or not {"state", "param_groups"} <= inner.keys():
            raise RefusedError(f"{self._path(rank)} holds no {key}. Use another checkpoint.")
        return inner

    def stage(self) -> int:
        """Return the ZeRO stage."""
        if self.files.is_stage_3:
            return 3
        if self._is_bf16_optimizer():
            return 1
        stage = self.optimizers[0]["zero_stage"]
        return int(getattr(stage, "args", (stage,))[0])

    def _is_bf16_optimizer(self) -> bool:
        """Tell whether the optimizer is ``BF16_Optimizer``, with shards as in stage 1."""
        return self.optimizers[0].get("zero_stage") is None

    def _placed_files(self) -> list[CheckpointFile]:
        stored = stored_files(self.files.directory, (*self.files.model, *self.files.optimizer))
        return [*stored, *self.model.expert_files(), *self.steps.values()]

    def _groups(self) -> Iterator[_Group]:
        """Yield the flat buffers.

        One per parameter group, for experts one per expert-parallel rank; in stage 3 one per part
        of a group.
        """
        is_3 = self.files.is_stage_3
        key = "fp32_flat_groups" if is_3 else "single_partition_of_fp32_groups"
        for number, of_rank in enumerate(self.model.shapes()):
            for ranks, shapes in self._shares(of_rank):
                if is_3:
                    flat = split_each(shapes, self.model.dp)
                else:
                    gaps = self.optimizers[0].get("param_alignment_paddings")
                    flat = split_whole(shapes, len(ranks), gaps[number] if gaps else ())
                states = []
                for part, rank in enumerate(ranks):
                    masters = self.optimizers[rank].get(key, ())
                    if len(masters) != len(self.model.shapes()):
                        raise RefusedError(
                            f"{self._path(rank)} has {len(masters)} buffers of masters for "
                            f"{len(self.model.shapes())} groups of parameters: files of two "
                            "checkpoints are mixed. Use another one."
                        )
                    state = self._inner(rank)["state"].get(number, {})
                    states.append({**state, MASTERS: masters[number]})
                    self._check_sizes(rank, states[-1], flat, flat.padding[part])
                yield _Group(shapes, flat, ranks, tuple(states))

    def _shares(
        self, shapes: Mapping[str, tuple[int, ...]]
    ) -> Iterator[tuple[Sequence[int], Mapping[str, tuple[int, ...]]]]:
        dp, ep, experts = self.model.dp, self.model.experts.ep, self.model.experts.experts
        if not any(map(expert_of, shapes)):
            yield range(dp), shapes
            return
        for ep_rank in range(ep):
            names = {experts.whole(name, ep, ep_rank): shape for name, shape in shapes.items()}
            yield range(ep_rank, dp, ep), names

    def _check_sizes(self, rank: int, state: Mapping[str, Any], flat: Flat, padding: int) -> None:
        sizes = {flat.rank_elements, flat.rank_elements - padding}
        for key, entry in state.items():
            if not _is_flat(entry):
                continue
            if entry.shape[0] not in sizes or entry.stride != (1,):
                raise RefusedError(
                    f"{self._path(rank)} has {key} of {entry.shape[0]} elements, and "
                    f"{flat.rank_elements} are expected of these parameters. Files of two "
                    "checkpoints are mixed, or the buffers are of a kind that is not read (NVMe "
                    "offload, MiCS): use another checkpoint."
                )

    def _check_steps(self, group: _Group) -> None:
        steps = [
            scalar_of(state.get("step"), self._path(rank))
            for rank, state in zip(group.ranks, group.states, strict=True)
        ]
        for rank, step in zip(group.ranks, steps, strict=True):
            if step != steps[0]:
                raise RefusedError(
                    f"{self._path(rank)} has made {step} optimizer steps, and "
                    f"{self.files.optimizer[group.ranks[0]]} {steps[0]}: files of two checkpoints "
                    "are mixed. Use another one."
                )

    def _place_group(self, group: _Group) -> None:
        for rank, state, spans in zip(group.ranks, group.states, group.flat.spans, strict=True):
            for key, entry in state.items():
                if _is_flat(entry):
                    for span in spans:
                        self._place_span(key, span, group.shapes[span.name], entry, rank)
        step = scalar_of(group.states[0].get("step"), self._path(group.ranks[0]))
        if step is not None:
            for name in group.shapes:
                piece, file = step_piece(name, step)
                self.pieces.append(piece)
                self.steps[file.path] = file

    def _place_span(
        self, key: str, span: Span, shape: tuple[int, ...], entry: StoredTensor, rank: int
    ) -> None:
        weight, item = self.model.weight_dtype(span.name), ITEM_BYTES[entry.dtype]
        file, begin = self.files.optimizer[rank], entry.begin + span.at * item
        is_master = key == MASTERS
        is_weight = is_master and entry.dtype == weight
        kind = PARAM if is_weight else MAIN if is_master else key
        into = self.duplicates if is_weight and not self.files.is_stage_3 else self.pieces
        for box in flat_range(shape, span.low, span.high):
            into.append(
                FilePiece(Tensor(f"{kind}/{span.name}", shape, entry.dtype), box, file, begin)
            )
            if is_master and not is_weight and self.files.is_stage_3:
                rounded = Tensor(f"{PARAM}/{span.name}", shape, weight)
                self.pieces.append(FilePiece(rounded, box, file, begin, is_rounded=True))
            begin += box.numel * item

    def _job(self, groups: Sequence[_Group]) -> tuple[DeepSpeedJob, Sequence[Mapping[str, Any]]]:
        names = [tuple(shapes) for shapes in self.model.shapes()]
        param_groups = carried(self._inner(0)["param_groups"], self._path(0))
        if self.files.is_stage_3:
            parts = [group["params"] for group in param_groups]
            names = [tuple(name for part in group for name in names[part]) for group in parts]
        elif round_robins(self.model.config) and not self._is_bf16_optimizer():
            counts = self.optimizers[0]["partition_count"]
            names = [undo_round_robin(of, n) for of, n in zip(names, counts, strict=True)]
        sizes = {name: prod(of[name]) for of in self.model.shapes() for name in of}
        names, param_groups = self.model.experts.whole_groups(names, param_groups, sizes)
        rest = {k: v for k, v in self.optimizers[0].items() if k not in _MADE_ANEW}
        job = self.model.job(
            names,
            carried(rest, self._path(0)),
            has_number_steps=any(isinstance(g.states[0].get("step"), int) for g in groups),
            is_bf16=self.files.is_bf16,
        )
        return job, param_groups

    def _marks(self, groups: Sequence[_Group]) -> Iterator[str]:
        """Yield notes on ranks the files do not identify. Raises ``RefusedError`` if a file is of
        another rank than its name says."""
        directory = self.files.directory
        optimizers = dict(zip(self.files.optimizer, self.optimizers, strict=True))
        is_certain = check_names(directory, optimizers)
        if not self.files.is_stage_3:
            return
        models = dict(zip(self.files.model, self.model.states, strict=True))
        check_names(directory, models)
        is_certain |= check_devices(directory, models, optimizers)
        for group in groups:
            moments = (
                {key: entry for key, entry in state.items() if _is_flat(entry) and key != MASTERS}
                for state in group.states
            )
            ranks = list(zip(self.files.optimizer, moments, strict=True))
            check_padding(directory, group.shapes, ranks)
        if not is_certain and len(optimizers) > 1:
            yield NO_SECOND_COPY

    def _notes(self) -> Iterator[str]:
        if not self._inner(0)["state"]:
            yield "the optimizer has made no step: there are no moments"
        elif not self._inner(0)["param_groups"]:
            yield (
                "elastic_checkpoint keeps no parameter groups: without --args-from the job's own "
                "hyperparameters stay, so set the learning rates after load_checkpoint"
            )


def _is_flat(entry: Any) -> bool:
    return isinstance(entry, StoredTensor) and len(entry.shape) == 1


def _lay_out(source: Checkpoint, options: WriteOptions, stage: int) -> CheckpointTarget:
    """Lay out a checkpoint of ``source`` at other degrees, with ZeRO's ``stage`` 1 to 3.

    Raises:
        RefusedError: The source has no DeepSpeed job's names, or lacks some of its tensors.
    """
    job, archives = job_of(source, options), Archives()
    ranks = Ranks.of(source, job, stage, options)
    drafts = ranks.drafts(archives, job.tag)
    for draft in drafts:
        of_experts = draft.of_experts()
        buffers = [list(buffers_of(share)) for share in of_experts]
        for rank in range(draft.dp):
            at = rank % len(of_experts)
            add_optimizer(of_experts[at], rank, buffers[at])
        for rank in range(draft.dp if stage == 3 else 1):
            add_model(of_experts[0], rank, buffers[0])
        add_experts(draft)
    for draft in drafts[: ranks.tp]:
        add_layers(draft)
    notes = [*source.notes, *drafts[0].notes(), *ranks.notes()]
    return CheckpointTarget(
        f"deepspeed_zero{stage}",
        archives.placed(),
        archives.fixed,
        naming(LATEST, job.tag),
        tuple(notes),
    )


@dataclass(frozen=True, slots=True)
class DeepSpeedZeroLayout:
    """The layout ``deepspeed_zero<stage>``. Each finds and reads all stages."""

    stage: int
    framework: str = "deepspeed"

    @property
    def name(self) -> str:
        return f"deepspeed_zero{self.stage}"

    def find(self, path: Path) -> bool:
        """Tell whether there is a tag with files of ranks."""
        directory = find_tag(path, None)
        return directory is not None and any(directory.glob("*zero_pp_rank_*_optim_states.pt"))

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        """Read the metadata of a tag, or of the tag in ``latest``."""
        grid = Grid.of(list_files(tag_of(path, options.iteration)), options)
        readers = [open_rank(files, model, options.trust_pickle) for files, model in grid.models()]
        states = [reader.read() for reader in readers]
        return grid.unite(f"deepspeed_zero{readers[0].stage()}", states, is_split=True)

    def lay_out(self, source: Checkpoint, options: WriteOptions) -> CheckpointTarget:
        """Lay out a tag and ``latest``, for ``engine.load_checkpoint``."""
        return _lay_out(source, options, self.stage)
