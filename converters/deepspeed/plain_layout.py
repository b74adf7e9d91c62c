"""DeepSpeed's checkpoints without ZeRO (stage 0): data-parallel ranks are equal and share one file.

Source: ``_common_checkpoint_state`` of deepspeed/runtime/engine.py, 0.19.8, and
``_configure_fp16_optimizer``, which chooses an engine's kind of optimizer.

The optimizer's state is a tensor per parameter, or flat buffers. Neither names a parameter, unless
torch had names. Its shape identifies it, and in 16 bits its weights: the masters round to them. The
match assumes the module's order within each group; several answers are refused. Parameters that
could be exchanged against this order are noted (``Checkpoint.guessed``). Frozen parameters may be
in no group.

Source: deepspeed 0.19.8: the ``state_dict`` of runtime/fp16/unfused_optimizer.py and of
fused_optimizer.py; torch.optim's ``state_dict`` in fp32.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, Protocol

from scalai.converters.checkpoint import (
    MAIN,
    STEP,
    Checkpoint,
    CheckpointFile,
    CheckpointTarget,
    FilePiece,
    Order,
    ReadOptions,
    WriteOptions,
    step_piece,
    stored_files,
)
from scalai.converters.deepspeed.drafts import Archives, Draft, Filled, Ranks, job_of, naming
from scalai.converters.deepspeed.experts import expert_of, optimizer_file
from scalai.converters.deepspeed.flat import split_each
from scalai.converters.deepspeed.grid import Grid, RankState
from scalai.converters.deepspeed.job import enables_bf16
from scalai.converters.deepspeed.loss_scale import to_plain, to_zero
from scalai.converters.deepspeed.model_reader import ModelStates
from scalai.converters.deepspeed.model_writer import add_experts, add_layers, add_model
from scalai.converters.deepspeed.optimizer_writer import Buffer, inner_state, part
from scalai.converters.deepspeed.tag_files import (
    LATEST,
    carried,
    find_tag,
    list_files,
    read_dictionary,
    scalar_of,
    tag_of,
)
from scalai.converters.deepspeed.validity import DEFAULT_CLIPPING
from scalai.converters.source_files import rounds_to
from scalai.converters.torch_archive import NewTensor, StoredTensor
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.region import row_major, whole

MASTERS = "fp32"
"""Key of the masters here, beside the optimizer's own names."""
CHECKED = 4096
"""Elements of a parameter to compare with its masters."""

Advance = Callable[[int, int, str], int | None]
"""(group, place, name) -> the place after a parameter at this place; None: it does not fit."""

_Way = tuple["_Way", str, int] | None
"""A chain of parameters and their groups, the last one first."""


class PlainState(Protocol):
    """An optimizer's state by parameter group; places count from 0."""

    @property
    def path(self) -> Path: ...

    def ends(self) -> list[int]:
        """Return each group's end."""
        ...

    def size(self, weight: StoredTensor) -> int:
        """Return the places of a parameter."""
        ...

    def fits(self, group: int, place: int, weight: StoredTensor, file: Path) -> bool:
        """Tell whether a parameter's state, with its weight in ``file``, can begin there."""
        ...

    def at(self, group: int, place: int, shape: tuple[int, ...]) -> Mapping[str, Any]:
        """Return the state at a place."""
        ...


@dataclass(frozen=True, slots=True)
class Separate:
    """A tensor per parameter: torch's own optimizers, also in ``FP16_UnfusedOptimizer``."""

    path: Path
    groups: Sequence[Sequence[Mapping[str, Any]]]

    def ends(self) -> list[int]:
        return [len(group) for group in self.groups]

    def size(self, weight: StoredTensor) -> int:
        return 1

    def fits(self, group: int, place: int, weight: StoredTensor, file: Path) -> bool:
        if place == len(self.groups[group]):
            return False
        state = self.groups[group][place]
        shapes = {entry.shape for key, entry in state.items() if _is_of_elements(key, entry)}
        return shapes == {weight.shape} and _rounds(state.get(MASTERS), self.path, weight, file)

    def at(self, group: int, place: int, shape: tuple[int, ...]) -> Mapping[str, Any]:
        return self.groups[group][place]


@dataclass(frozen=True, slots=True)
class Flattened:
    """A flat buffer per group, without padding: ``FP16_Optimizer``, around FusedAdam."""

    path: Path
    groups: Sequence[Mapping[str, Any]]

    def ends(self) -> list[int]:
        return [prod(group[MASTERS].shape) for group in self.groups]

    def size(self, weight: StoredTensor) -> int:
        return prod(weight.shape)

    def fits(self, group: int, place: int, weight: StoredTensor, file: Path) -> bool:
        if place + prod(weight.shape) > self.ends()[group]:
            return False
        masters = self.at(group, place, weight.shape)[MASTERS]
        return _rounds(masters, self.path, weight, file)

    def at(self, group: int, place: int, shape: tuple[int, ...]) -> Mapping[str, Any]:
        return {
            key: _part(entry, place, shape) if _is_of_elements(key, entry) else entry
            for key, entry in self.groups[group].items()
        }


def _is_of_elements(key: str, entry: Any) -> bool:
    return isinstance(entry, StoredTensor) and key != STEP


def _part(buffer: StoredTensor, place: int, shape: tuple[int, ...]) -> StoredTensor:
    begin = buffer.begin + place * ITEM_BYTES[buffer.dtype]
    return replace(buffer, shape=shape, stride=row_major(shape), begin=begin)


def _rounds(masters: StoredTensor | None, path: Path, weight: StoredTensor, file: Path) -> bool:
    """Tell whether the compared masters round to the weights; true in fp32, without masters."""
    if masters is None:
        return True
    rows = _first_rows(weight.shape)
    stored = ((replace(masters, shape=rows), path), (replace(weight, shape=rows), file))
    mine, its = ((part.dtype, carried(part, at).content) for part, at in stored)
    return rounds_to(mine[1], mine[0], its[1], its[0])


def _first_rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    if not shape:
        return shape
    return (min(shape[0], max(CHECKED // max(prod(shape[1:]), 1), 1)), *shape[1:])


def untold(
    groups: Sequence[Sequence[str]],
    state: PlainState,
    weights: Mapping[str, StoredTensor],
    file_of: Callable[[str], Path],
) -> frozenset[str]:
    """Return parameters with exchangeable but different states: of equal shapes and, if there are
    masters, equal weights."""
    alike: dict[Any, list[Mapping[str, Any]]] = {}
    names: dict[Any, list[str]] = {}
    for group, members in enumerate(groups):
        place = 0
        for name in members:
            weight = weights[name]
            found = state.at(group, place, weight.shape)
            place += state.size(weight)
            key: Any = weight.shape
            if MASTERS in found:
                content, _ = _sample(weight, file_of(name))
                width = ITEM_BYTES[weight.dtype]
                # In a flat buffer, constant weights of any shape look alike.
                is_one = content == content[:width] * (len(content) // width)
                shape = None if isinstance(state, Flattened) else weight.shape
                key = shape, content[:width] if is_one else content
            key = key, bool(expert_of(name))
            alike.setdefault(key, []).append(found)
            names.setdefault(key, []).append(name)
    return frozenset(
        name for key, states in alike.items() if _differ(states, state.path) for name in names[key]
    )


def _differ(states: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Tell whether states differ, or may differ beyond the compared rows."""

    def content(state: Mapping[str, Any]) -> list[Any]:
        parts = (v for key, v in sorted(state.items()) if _is_of_elements(key, v))
        return [(part.shape, _sample(part, path)) for part in parts]

    if len(states) < 2:
        return False
    first = content(states[0])
    return not all(is_whole for _, (_, is_whole) in first) or any(
        content(state) != first for state in states[1:]
    )


def _sample(tensor: StoredTensor, path: Path) -> tuple[bytes, bool]:
    rows = _first_rows(tensor.shape)
    return carried(replace(tensor, shape=rows), path).content, rows == tensor.shape


def match_names(
    names: Sequence[str], sizes: Sequence[int], ends: Sequence[int], advance: Advance
) -> list[list[tuple[str, ...]]]:
    """Return up to two ways to deal parameters to groups: names by group.

    Args:
        names: Parameters in the module's order.
        sizes: Places of each parameter.
        ends: End of each group; groups begin at 0.
        advance: Next place of a group after a parameter.
    """
    left = [*accumulate(reversed(sizes), initial=0)][-2::-1]
    ways: dict[tuple[int, ...], list[_Way]] = {(0,) * len(ends): [None]}
    for name, rest in zip(names, left, strict=True):
        after: dict[tuple[int, ...], list[_Way]] = {}
        for places, found in ways.items():
            moves: list[tuple[tuple[int, ...], list[_Way]]] = [(places, found)]
            for group, place in enumerate(places):
                beyond = advance(group, place, name)
                if beyond is not None:
                    moved = (*places[:group], beyond, *places[group + 1 :])
                    moves.append((moved, [(way, name, group) for way in found]))
            for moved, longer in moves:
                if sum(ends) - sum(moved) <= rest:
                    after[moved] = (after.get(moved, []) + longer)[:2]
        ways = after
    return [_by_group(way, len(ends)) for way in ways.get(tuple(ends), [])]


def _by_group(way: _Way, groups: int) -> list[tuple[str, ...]]:
    names: list[list[str]] = [[] for _ in range(groups)]
    while way is not None:
        way, name, group = way
        names[group].append(name)
    return [tuple(reversed(group)) for group in names]


Names = Sequence[tuple[str, ...]]

SAY_THE_ORDER = (
    "Say the optimizer's order by --args-from: a file with [[deepspeed.group]], or a checkpoint of "
    "the job in ZeRO stage 1."
)


@dataclass(frozen=True, slots=True)
class _Tree:
    """An optimizer's state in the file of one expert-parallel rank."""

    model: ModelStates
    path: Path
    tree: Mapping[str, Any]
    ep_rank: int

    @property
    def inner(self) -> Mapping[str, Any]:
        """The state of torch's optimizer in it."""
        inner: Mapping[str, Any] = self.tree.get("optimizer_state_dict", self.tree)
        return inner

    def state(self) -> PlainState:
        """Return it by parameter group. Raises ``RefusedError``: it is of an unknown kind."""
        path, tree, inner = self.path, self.tree, self.inner
        is_known = inner is tree or {"fp32_groups", "fp32_groups_flat"} & tree.keys()
        if not is_known or not {"state", "param_groups"} <= inner.keys():
            raise RefusedError(
                f"{path} holds an optimizer of another kind ({sorted(tree)[:5]}...): the state of "
                "torch's Adam is expected, or of DeepSpeed's FP16_Optimizer or "
                "FP16_UnfusedOptimizer around one."
            )
        groups = []
        for group in inner["param_groups"]:
            for number in group["params"]:
                if not inner["state"].get(number):
                    raise RefusedError(
                        f"{path}: parameter {number} of the optimizer has no state, so its name "
                        "cannot be told. Save with ZeRO, or train a step first."
                    )
            groups.append([dict(inner["state"][number]) for number in group["params"]])
        for group, masters in zip(groups, tree.get("fp32_groups", ()), strict=False):
            for state, master in zip(group, masters, strict=True):
                state[MASTERS] = master
        if "fp32_groups_flat" not in tree:
            return Separate(path, groups)
        flat = zip(groups, tree["fp32_groups_flat"], strict=True)
        return Flattened(path, [{**state, MASTERS: master} for (state,), master in flat])

    def names(self, state: PlainState, order: Order | None) -> tuple[Names, frozenset[str]]:
        """Return the parameters of each group, and the guessed ones among them.

        Raises:
            RefusedError: They cannot be identified, or do not fit ``order``.
        """
        model, groups = self.model, self.inner["param_groups"]
        is_of_experts = [bool(group.get("moe")) for group in groups]
        others = {*(model.first.get("buffer_names") or ()), *model.aliases()}
        has_masters = "fp32_groups" in self.tree or isinstance(state, Flattened)
        weights = {
            name: entry
            for name, entry in model.first["module"].items()
            if isinstance(entry, StoredTensor)
            and name not in others
            and model.experts.is_on(name, self.ep_rank)
            # The 16-bit optimizers leave out parameters without elements.
            and not (has_masters and 0 in entry.shape)
        }

        def file_of(name: str) -> Path:
            return model.directory / model.file_of(name)

        def advance(group: int, at: int, name: str) -> int | None:
            weight = weights[name]
            is_other = is_of_experts[group] != bool(expert_of(name))
            if is_other or not state.fits(group, at, weight, file_of(name)):
                return None
            return at + state.size(weight)

        given = [group.get("param_names") for group in groups]  # torch 2.7, by named_parameters()
        told = None if order is None else order([*weights])
        if all(isinstance(names, list) and weights.keys() >= {*names} for names in given):
            named: Names = [tuple(names) for names in given]
        elif told is not None:
            named = [tuple(filter(weights.__contains__, names)) for names in told]
        else:
            sizes = [state.size(weight) for weight in weights.values()]
            found = match_names(list(weights), sizes, state.ends(), advance)
            if len(found) != 1:
                raise RefusedError(
                    f"{self.path} does not name the optimizer's parameters, and by their shapes "
                    f"{'and weights ' if has_masters else ''}"
                    f"{'no' if not found else 'more than one'} assignment to those of the module "
                    f"is possible. {SAY_THE_ORDER}"
                )
            return found[0], untold(found[0], state, weights, file_of)
        self._check_order(named, state.ends(), advance)
        return named, frozenset()

    def _check_order(self, named: Names, ends: Sequence[int], advance: Advance) -> None:
        places = [0] * len(ends)
        for group, names in enumerate(named[: len(ends)]):
            for name in names:
                beyond = advance(group, places[group], name)
                if beyond is None:
                    raise RefusedError(
                        f"{self.path}: the optimizer's state at place {places[group]} of group "
                        f"{group} is not of {name}, which stands there by the order that was "
                        "given. Correct the order."
                    )
                places[group] = beyond
        if len(named) != len(ends) or places != [*ends]:
            raise RefusedError(
                f"{self.path}: the optimizer has groups of {[*ends]} places, and the order that "
                f"was given of {places}. Correct the order: frozen parameters are in no group."
            )


@dataclass(frozen=True, slots=True)
class PlainReader:
    """One model_states file that is being read, with the optimizer's state in it.

    With experts, each expert-parallel rank has a file with an optimizer's state. Rank 0's experts,
    and all parameters outside experts, occur there again: as ``duplicates``.
    """

    model: ModelStates
    trust: bool
    order: Order | None = None
    pieces: list[FilePiece] = field(default_factory=list)
    duplicates: list[FilePiece] = field(default_factory=list)
    steps: dict[str, CheckpointFile] = field(default_factory=dict)

    def read(self) -> RankState:
        """Return the file's content.

        Raises:
            RefusedError: The optimizer is of an unknown kind, or its parameters have no clear
                names.
        """
        path = self.model.path
        first, *others = self._trees()
        tree, inner = first.tree, first.inner
        state = first.state()
        names, guessed = first.names(state, self.order)
        scale = {"clip_grad": tree["clip_grad"]} if "clip_grad" in tree else {}
        if "dynamic_loss_scale" in tree:
            scale |= to_zero(carried(_plain_entries(tree), path), self.model.config)
        module = self.model.first["module"]
        sizes = {name: prod(module[name].shape) for of in names for name in of}
        param_groups = carried(inner["param_groups"], path)
        groups, param_groups = self.model.experts.whole_groups(names, param_groups, sizes)
        job = self.model.job(
            groups,
            scale,
            has_number_steps=any(isinstance(s.get("step"), int) for s in inner["state"].values()),
            is_bf16=enables_bf16(self.model.config),
            is_fused=isinstance(state, Flattened) if inner is not tree else None,
        )
        self.pieces.extend(self.model.pieces())
        self._place_tree(first, state, names, set())
        known = {name for of in names for name in of}
        for other in others:
            state = other.state()
            names, more = other.names(state, self.order)
            guessed |= more
            self._place_tree(other, state, names, known)
            known.update(name for of in names for name in of)
        names_of_files = (path.name, *(other.path.name for other in others))
        files = stored_files(self.model.directory, names_of_files)
        return RankState(
            self.model,
            job,
            param_groups,
            self.pieces,
            self.duplicates,
            [*files, *self.model.expert_files(), *self.steps.values()],
            guessed=guessed,
        )

    def _trees(self) -> list[_Tree]:
        """Return the states of all expert-parallel ranks, the model file's first."""
        model = self.model
        trees = [_Tree(model, model.path, model.first["optimizer"], 0)]
        for ep_rank, name in enumerate(model.experts.optimizers):
            path = model.directory / name
            tree = read_dictionary(path, trust=self.trust).get("optimizer")
            if not isinstance(tree, dict):
                raise RefusedError(f"{path} holds no optimizer. Use another checkpoint.")
            trees.append(_Tree(model, path, tree, ep_rank))
        return trees

    def _place_tree(
        self,
        tree: _Tree,
        state: PlainState,
        names: Sequence[Sequence[str]],
        known: Collection[str],
    ) -> None:
        for group, members in enumerate(names):
            at = 0
            for name in members:
                weight: StoredTensor = self.model.first["module"][name]
                into = self.duplicates if name in known else self.pieces
                self._place(name, state.at(group, at, weight.shape), tree.path, into)
                at += state.size(weight)

    def _place(
        self, name: str, state: Mapping[str, Any], path: Path, into: list[FilePiece]
    ) -> None:
        file = path.name
        for key, entry in state.items():
            if isinstance(entry, StoredTensor) and key != STEP:
                kind = MAIN if key == MASTERS else key
                tensor = Tensor(f"{kind}/{name}", entry.shape, entry.dtype)
                box = whole(entry.shape)
                into.append(FilePiece(tensor, box, file, entry.begin, entry.stride))
        step = scalar_of(state.get("step"), path)
        if step is not None:
            piece, known = step_piece(name, step)
            self.steps[known.path] = known
            into.append(piece)


def _plain_entries(tree: Mapping[str, Any]) -> dict[str, Any]:
    large = ("optimizer_state_dict", "fp32_groups", "fp32_groups_flat")
    return {key: value for key, value in tree.items() if key not in large}


def _lay_out(source: Checkpoint, options: WriteOptions) -> CheckpointTarget:
    """Lay out a checkpoint of ``source`` without ZeRO.

    Raises:
        RefusedError: The source has no DeepSpeed job's names, or lacks some of its tensors.
    """
    job, archives = job_of(source, options), Archives()
    if job.pipeline is not None and job.is_bf16:
        raise RefusedError(
            "stage 0 is asked of a bf16 pipeline, for which DeepSpeed 0.19.8 cannot load its own "
            "checkpoints without ZeRO. Convert to deepspeed_zero1."
        )
    ranks = Ranks.of(source, job, 0, options)
    drafts = ranks.drafts(archives, job.tag)
    for draft in drafts:
        for share in draft.of_experts():
            filled = Filled()
            optimizer = _optimizer(share, filled)
            if not share.ep_rank:
                add_model(share, 0, [], optimizer, filled)
            if draft.job.experts is not None:
                path = f"{draft.folder}/{optimizer_file(share.ep_rank)}"
                archives.add(path, {"optimizer": optimizer}, filled)
        add_experts(draft)
    for draft in drafts[: ranks.tp]:
        add_layers(draft)
    notes = [*source.notes, *drafts[0].notes(), *ranks.notes()]
    if job.is_fused is None and _has_masters(drafts[0]):
        kind = "FP16_Optimizer" if _is_fused(drafts[0]) else "FP16_UnfusedOptimizer"
        notes.append(f"by its parameter groups, the job's optimizer goes into DeepSpeed's {kind}")
    return CheckpointTarget(
        "deepspeed_zero0",
        archives.placed(),
        archives.fixed,
        naming(LATEST, job.tag),
        tuple(notes),
        keeps_order=job.pipeline is None and _is_cut_alike(source, options),
    )


def _is_cut_alike(source: Checkpoint, options: WriteOptions) -> bool:
    was = source.values.degrees
    return source.layout == "deepspeed_zero0" and all(
        options.degrees.get(axis, was.get(axis, 1)) == was.get(axis, 1)
        for axis in ("tp", "pp", "ep")
    )


def _optimizer(draft: Draft, filled: Filled) -> dict[str, Any]:
    if not _has_masters(draft):
        return _separate(draft, filled)
    scale = to_plain(draft.job.optimizer, draft.source.values.step)
    if not _is_fused(draft):
        masters = [
            [_new(draft.stored(None, name), filled) for name in group] for group in draft.job.groups
        ]
        inner = _separate(draft, filled)
        return {**scale, "optimizer_state_dict": inner, "fp32_groups": masters}
    buffers = [_buffer(draft, group) for group in range(len(draft.job.groups))]
    is_scaled = draft.parameter(draft.job.groups[0][0]).dtype == "F16"
    return {
        **(scale if is_scaled else {}),
        "optimizer_state_dict": inner_state(draft, 0, buffers, filled),
        "fp32_groups_flat": [
            part(draft, None, buffer, 0, buffer.flat.rank_elements, filled) for buffer in buffers
        ],
        "clip_grad": DEFAULT_CLIPPING,
        **draft.clip_grad,
    }


def _has_masters(draft: Draft) -> bool:
    names = (name for group in draft.job.groups for name in group)
    return any(f"{MAIN}/{name}" in draft.tensors for name in names)


def _is_fused(draft: Draft) -> bool:
    """Tell whether the job's optimizer is FusedAdam; if unknown, by the keys of its groups."""
    if draft.job.is_fused is not None:
        return draft.job.is_fused
    group: Mapping[str, Any] = next(iter(draft.param_groups([[] for _ in draft.job.groups])), {})
    return "bias_correction" in group and "amsgrad" not in group


def _separate(draft: Draft, filled: Filled) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    numbers: list[list[int]] = []
    for names in draft.job.groups:
        numbers.append(list(range(len(state), len(state) + len(names))))
        for number, name in zip(numbers[-1], names, strict=True):
            kinds = draft.kinds([name])
            moments = {kind: _new(draft.stored(kind, name), filled) for kind in kinds}
            state[number] = {**draft.step(name, filled), **moments}
    return {"state": state, "param_groups": draft.param_groups(numbers)}


def _buffer(draft: Draft, group: int) -> Buffer:
    shapes = {name: draft.parameter(name).shape for name in draft.job.groups[group]}
    return Buffer(shapes, split_each(shapes, 1), group)


def _new(tensor: Tensor, filled: Filled) -> NewTensor:
    made = NewTensor(tensor.dtype, tensor.shape)
    filled[made] = [FilePiece(tensor, whole(tensor.shape), "", 0)]
    return made


FILE = "mp_rank_00_model_states.pt"
_NEEDED = ("module", "optimizer", "global_steps", "dp_world_size")


@dataclass(frozen=True, slots=True)
class DeepSpeedPlainLayout:
    """The layout ``deepspeed_zero0``."""

    name: str = "deepspeed_zero0"
    framework: str = "deepspeed"

    def find(self, path: Path) -> bool:
        """Tell whether there is a tag with a model file and without ZeRO's optimizer files."""
        directory = find_tag(path, None)
        if directory is None or (directory / "zero").exists():
            return False
        return (directory / FILE).is_file() and not any(directory.glob("*zero_pp_rank_*"))

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        """Read the metadata of a tag, or of the tag in ``latest``."""
        grid = Grid.of(list_files(tag_of(path, options.iteration)), options)
        states = [
            PlainReader(model, options.trust_pickle, options.order).read()
            for _, model in grid.models(_NEEDED)
        ]
        return grid.unite(self.name, states, is_split=False)

    def lay_out(self, source: Checkpoint, options: WriteOptions) -> CheckpointTarget:
        """Lay out a tag and ``latest``, for ``engine.load_checkpoint``."""
        return _lay_out(source, options)
