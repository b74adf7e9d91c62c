"""The state of a rank's optimizers in a legacy checkpoint, given to their parameters.

The key is the order of the rank's parameters: the whole optimizer's state goes by number within the
parameter groups, the distributed one's by place in flat buffers. The content is the check: masters
must round to the weights beside them.

Source: ``state_dict`` of megatron/core/optimizer/optimizer.py, ``get_parameter_state_dp_zero`` of
megatron/core/optimizer/distrib_optimizer.py and ``_get_param_groups`` of
megatron/core/optimizer/__init__.py (0.16.1).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from scalai.converters.checkpoint import MAIN, PARAM, STEP, FilePiece
from scalai.converters.megatron.grad_buffers import BufferMember, bucket_numel, lay_buffer
from scalai.converters.megatron.modules import RankBox, expert_of, group_of
from scalai.converters.source_files import rounds_to
from scalai.converters.torch_archive import StoredTensor
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.dtypes import ITEM_BYTES
from scalai.core.tensors.region import Index, row_major, whole

MODEL, OPTIMIZER = "model_optim_rng.pt", "distrib_optim.pt"
CHECKED = 256
"""Elements at each end of a parameter, compared as masters with the weights."""

Coordinate = tuple[int, int, int]
"""(tp, pp, ep) ranks."""


@dataclass(frozen=True, slots=True)
class Rank:
    """A model-parallel rank's folder, state and flat buffers."""

    folder: str
    tree: Mapping[str, Any]
    buffers: Any


@dataclass(frozen=True, slots=True)
class LegacyParameter:
    """A parameter of one rank.

    ``shape`` is the whole one; ``parts`` are the rank's. ``is_copy``: it is the output layer of the
    last stage, tied to the embedding of the first. ``is_shared``: it is either of such a pair.
    """

    name: str
    shape: Index
    stored: StoredTensor
    parts: Sequence[RankBox]
    chunk: int
    is_copy: bool
    is_shared: bool

    @property
    def numel(self) -> int:
        return prod(self.stored.shape)


@dataclass(frozen=True, slots=True)
class FoundTensors:
    """Tensors found in a checkpoint: pieces, second copies.

    ``stepped`` are the parameters with their group's step, ``notes`` losses.
    """

    directory: Path
    degrees: Mapping[str, int]
    pieces: list[FilePiece] = field(default_factory=list)
    duplicates: list[FilePiece] = field(default_factory=list)
    stepped: dict[str, None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_stored(
        self, kind: str, parameter: LegacyParameter, stored: StoredTensor, file: str
    ) -> None:
        if stored.shape != parameter.stored.shape:
            raise self.misfit(
                file,
                f"{kind} of {parameter.name} has shape {list(stored.shape)}, and the weight "
                f"{list(parameter.stored.shape)}",
            )
        tensor = Tensor(f"{kind}/{parameter.name}", parameter.shape, stored.dtype)
        into = self.duplicates if parameter.is_copy else self.pieces
        item = ITEM_BYTES[stored.dtype]
        for part in parameter.parts:
            begin = stored.begin + item * _dot(part.local, stored.stride)
            into.append(FilePiece(tensor, part.box, file, begin, stored.stride))

    def add_optimizer(
        self, coordinate: Coordinate, rank: Rank, parameters: Sequence[LegacyParameter]
    ) -> None:
        """Add the state of a rank's optimizers; experts may have one of their own."""
        tree, buffers = rank.tree["optimizer"], rank.buffers
        is_chained = isinstance(tree, list)
        links = tree if is_chained else [tree]
        states = buffers if isinstance(buffers, list) else [buffers]
        if any("state" in link.get("optimizer", link) for link in links):
            states = [None] * len(links)
        elif len(states) != len(links):
            raise self._missing(rank)
        for number, (link, state) in enumerate(zip(links, states, strict=True)):
            mine = [p for p in parameters if not is_chained or _is_expert(p) == bool(number)]
            if "state" in link.get("optimizer", link):
                self._add_whole(rank, link, mine)
            elif state is not None:
                self._add_buffers(coordinate, rank, state, mine)
            elif number or not coordinate[2]:
                # The first of the sharing ranks has the dense parameters' state.
                raise self._missing(rank)

    def _add_whole(
        self, rank: Rank, link: Mapping[str, Any], parameters: Sequence[LegacyParameter]
    ) -> None:
        file = f"{rank.folder}/{MODEL}"
        inner = link.get("optimizer", link)
        masters = link.get("fp32_from_fp16_params", link.get("fp32_from_fp16"))
        groups = inner["param_groups"]
        for number, group in enumerate(groups):
            members = [p for p in parameters if group_of(p.name, len(p.shape), groups) == number]
            if len(members) != len(group["params"]):
                raise self.misfit(
                    file,
                    f"group {number} has {len(group['params'])} parameters, not {len(members)}",
                )
            for parameter, key in zip(members, group["params"], strict=True):
                for kind, value in inner["state"].get(key, {}).items():
                    if kind == STEP:
                        self._add_step(parameter, value, file)
                    elif isinstance(value, StoredTensor):
                        self.add_stored(kind, parameter, value, file)
                if STEP not in inner["state"].get(key, {}):
                    self.stepped[parameter.name] = None
            if masters is not None:
                narrow = [p for p in members if p.stored.dtype != "F32"]
                for parameter, value in zip(narrow, masters[number], strict=True):
                    self.add_stored(MAIN, parameter, value, file)
                    self._check(parameter, value.begin, value.dtype, file)

    def _add_step(self, parameter: LegacyParameter, value: Any, file: str) -> None:
        if isinstance(value, StoredTensor) and value.shape == () and value.dtype == "F32":
            tensor = Tensor(f"{STEP}/{parameter.name}", (), "F32")
            into = self.duplicates if parameter.is_copy else self.pieces
            into.append(FilePiece(tensor, whole(()), file, value.begin))
        else:
            raise self.misfit(file, f"the step of {parameter.name} is {value!r}")

    def _add_buffers(
        self, coordinate: Coordinate, rank: Rank, state: Any, parameters: Sequence[LegacyParameter]
    ) -> None:
        if not isinstance(state, dict) or state.get("buckets_coalesced") is not True:
            raise RefusedError(
                f"{self.directory / rank.folder / OPTIMIZER} is of a form from before February "
                "2024. Load it in Megatron with --ckpt-convert-update-legacy-dist-opt-format and "
                "save it again."
            )
        number = 0
        for chunk in range(self.degrees["vpp"]):
            of_chunk = [p for p in parameters if p.chunk == chunk]
            for dtype in dict.fromkeys(p.stored.dtype for p in of_chunk):
                mine = [p for p in of_chunk if p.stored.dtype == dtype]
                by_dtype = list(state.get(number, {}).values())
                if len(by_dtype) != 1:
                    raise self.misfit(f"{rank.folder}/{OPTIMIZER}", f"there is no buffer {number}")
                self._add_buffer(coordinate, rank, by_dtype[0], mine, chunk, parameters)
                number += 1
        if number in state:
            raise self.misfit(f"{rank.folder}/{OPTIMIZER}", f"there is a buffer {number}")

    def _add_buffer(
        self,
        coordinate: Coordinate,
        rank: Rank,
        state: Mapping[str, Any],
        parameters: Sequence[LegacyParameter],
        chunk: int,
        all_parameters: Sequence[LegacyParameter],
    ) -> None:
        file = f"{rank.folder}/{OPTIMIZER}"
        total = int(state["numel_unpadded"])
        tensors = {key: value for key, value in state.items() if isinstance(value, StoredTensor)}
        if any(value.shape != (total,) for value in tensors.values()) or "param" not in tensors:
            raise self.misfit(file, f"a buffer of {total} elements has {tensors}")
        members = [BufferMember(parameter.numel, parameter.is_shared) for parameter in parameters]
        unequal = ""
        for size in self._bucket_sizes(coordinate, rank, chunk, all_parameters):
            starts, end = lay_buffer(members, size)
            if end != total:
                continue
            placed = list(zip(parameters, starts, strict=True))
            unequal = next((p.name for p, at in placed if not self._fits(p, at, tensors, file)), "")
            if not unequal:
                break
        else:
            raise self.misfit(
                file,
                f"the masters of {unequal} are not its weights, wherever buckets may begin"
                if unequal
                else f"a buffer has {total} elements, and the parameters fill {end}",
            )
        for kind, stored in tensors.items():
            for parameter, start in placed:
                self._add_flat(kind, parameter, stored, start, file)

    def _bucket_sizes(
        self, coordinate: Coordinate, rank: Rank, chunk: int, parameters: Sequence[LegacyParameter]
    ) -> list[int | None]:
        """Return possible sizes of buckets: by the arguments, else by Megatron's defaults."""
        arguments = vars(rank.tree["args"]) if "args" in rank.tree else {}
        dp = self.degrees.get("dp", 1) * self.degrees.get("cp", 1)
        numel = sum(parameter.numel for parameter in parameters)
        listed = [
            bucket_numel(
                {"overlap_grad_reduce": True, **given}, dp=dp, pp_rank=pp, chunk=at, numel=numel
            )
            for given in (arguments, {})
            for pp, at in ((coordinate[1], chunk), (0, 0))
        ]
        return list(dict.fromkeys([*listed, None]))

    def _fits(
        self, parameter: LegacyParameter, start: int, tensors: Mapping[str, StoredTensor], file: str
    ) -> bool:
        """Whether the masters at ``start`` are those of a parameter."""
        masters = tensors["param"]
        begin = masters.begin + start * ITEM_BYTES[masters.dtype]
        return self._is_equal(parameter, begin, masters.dtype, file)

    def _is_equal(self, parameter: LegacyParameter, begin: int, dtype: str, file: str) -> bool:
        """Whether the masters at both ends of a parameter round to its weights."""
        model = f"{file.rpartition('/')[0]}/{MODEL}"
        stored = parameter.stored
        if stored.stride != row_major(stored.shape) and parameter.numel > 1:
            return True
        item, width = ITEM_BYTES[dtype], ITEM_BYTES[stored.dtype]
        count = min(CHECKED, parameter.numel)
        for first in {0, parameter.numel - count}:
            masters = self.read(file, begin + first * item, count * item)
            weights = self.read(model, stored.begin + first * width, count * width)
            if not rounds_to(masters, dtype, weights, stored.dtype):
                return False
        return True

    def _check(self, parameter: LegacyParameter, begin: int, dtype: str, file: str) -> None:
        if not self._is_equal(parameter, begin, dtype, file):
            raise self.misfit(file, f"the masters of {parameter.name} are not its weights")

    def _add_flat(
        self, key: str, parameter: LegacyParameter, stored: StoredTensor, start: int, file: str
    ) -> None:
        is_own_master = key == "param" and stored.dtype == parameter.stored.dtype
        kind = (PARAM if is_own_master else MAIN) if key == "param" else key
        tensor = Tensor(f"{kind}/{parameter.name}", parameter.shape, stored.dtype)
        into = self.duplicates if is_own_master or parameter.is_copy else self.pieces
        stride = row_major(parameter.stored.shape)
        for part in parameter.parts:
            at = start + _dot(part.local, stride)
            begin = stored.begin + at * ITEM_BYTES[stored.dtype]
            into.append(FilePiece(tensor, part.box, file, begin, stride))
        if key != "param":
            self.stepped[parameter.name] = None

    def read(self, file: str, begin: int, size: int) -> bytes:
        with open(self.directory / file, "rb") as opened:
            opened.seek(begin)
            return opened.read(size)

    def _missing(self, rank: Rank) -> RefusedError:
        return RefusedError(
            f"{self.directory / rank.folder} has an optimizer without its state, and no whole "
            f"{OPTIMIZER}: the save or a copy was interrupted. Copy it again, or use another "
            "checkpoint."
        )

    def misfit(self, file: str, what: str) -> RefusedError:
        return RefusedError(
            f"{self.directory / file} does not fit its model: {what}. Load the checkpoint in "
            "Megatron at its own degrees and save it with --ckpt-format torch_dist."
        )


def _dot(offset: Index, stride: Index) -> int:
    return sum(low * step for low, step in zip(offset, stride, strict=True))


def _is_expert(parameter: LegacyParameter) -> bool:
    return expert_of(parameter.name) is not None
