"""What each rank of a job has of a model: which tensors, which parts, and under which names.

Source: ``get_checkpoint_name`` of megatron/training/checkpointing.py and GPTModel of
megatron/core/models/gpt/gpt_model.py (0.16.1).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from scalai.converters.checkpoint import MAIN, PARAM, STEP, Checkpoint, WriteOptions
from scalai.converters.megatron.module_order import in_order
from scalai.converters.megatron.modules import (
    EMBEDDING,
    OUTPUT,
    Naming,
    Part,
    experts_of_rank,
    gated,
    parts,
    stage_layers,
)
from scalai.converters.megatron.names import expert_of, layer_of
from scalai.converters.megatron.padding import padding_note
from scalai.converters.megatron.torch_dist_common import whole_groups
from scalai.converters.megatron.values import with_degrees
from scalai.converters.scalars import read_steps
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor, split_name
from scalai.core.tensors.region import Index

Coordinate = tuple[int, int, int]
"""(tp, pp, ep) ranks."""


def folder_name(coordinate: Coordinate, degrees: Mapping[str, int]) -> str:
    """Return the folder of a rank, as ``get_checkpoint_name`` of Megatron has it."""
    tp, pp, ep = coordinate
    name = f"mp_rank_{tp:02d}"
    name += f"_{pp:03d}" if degrees.get("pp", 1) > 1 else ""
    return name + (f"_{ep:03d}" if degrees.get("ep", 1) > 1 else "")


@dataclass(frozen=True, slots=True)
class Local:
    """A parameter as one rank has it: called ``key`` there."""

    name: str
    key: str
    shape: Index
    parts: Sequence[Part]
    chunk: int
    is_shared: bool

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_expert(self) -> bool:
        return expert_of(self.name) is not None


@dataclass(frozen=True, slots=True)
class Job:
    """What is written, for all ranks."""

    source: Checkpoint
    degrees: Mapping[str, int]
    tensors: Mapping[str, Tensor]
    arguments: Mapping[str, Any] | None
    groups: Sequence[Mapping[str, Any]]
    step: float | None
    is_split: bool | None
    is_tied: bool
    naming: Naming
    layers: Sequence[Sequence[range]]
    gated: frozenset[str]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, source: Checkpoint, options: WriteOptions) -> "Job":
        values, reference = source.values, options.reference
        degrees = _degrees(source.values.degrees, options.degrees)
        tensors = {tensor.name: tensor for tensor in source.placed.collection.tensors}
        notes = list(source.notes)
        arguments = values.arguments
        if arguments is None and reference is not None and reference.arguments is not None:
            arguments = {**reference.arguments, **values.counters, "iteration": values.step}
            notes.append("Megatron's arguments are those of --args-from")
        elif arguments is None:
            notes.append("the source has no Megatron arguments: give all model flags when loading")
        note = padding_note(source, tensors, degrees, reference)
        notes += [] if note is None else [note]
        kinds = {split_name(name)[0] for name in tensors}
        has_optimizer = not kinds <= {PARAM, MAIN, STEP}
        requested = options.is_split if options.is_split is not None else values.is_split
        is_split = (requested is not False) if has_optimizer else None
        parameters = [split_name(name)[1] for name in tensors if name.startswith(f"{PARAM}/")]
        _check_gpt(parameters)
        count = len({layer_of(name) for name in parameters} - {None})
        groups = whole_groups(source, reference, notes) if has_optimizer else []
        job = cls(
            source,
            degrees,
            tensors,
            with_degrees(arguments, degrees) if arguments is not None else None,
            groups,
            read_steps(source) if has_optimizer else None,
            is_split,
            EMBEDDING in parameters and OUTPUT not in parameters,
            _naming(source, arguments, notes),
            stage_layers(count, degrees["pp"], degrees["vpp"], arguments or {}),
            gated({name: tensors[f"{PARAM}/{name}"].shape for name in parameters}),
            notes,
        )
        notes.extend(job.warnings())
        return job

    @property
    def is_chained(self) -> bool:
        """Whether experts have an optimizer of their own."""
        return self.degrees["ep"] > 1 and any(expert_of(name) is not None for name in self.tensors)

    @property
    def folder(self) -> str:
        return f"iter_{self.source.values.step:07d}"

    def coordinates(self) -> Iterator[Coordinate]:
        for tp_rank in range(self.degrees["tp"]):
            for pp_rank in range(self.degrees["pp"]):
                for ep_rank in range(self.degrees["ep"]):
                    yield tp_rank, pp_rank, ep_rank

    def warnings(self) -> Iterator[str]:
        """Yield what the job that loads this has to keep to."""
        given = self.arguments or {}
        if self.is_split and given.get("overlap_grad_reduce"):
            size = given.get("ddp_bucket_size") or given.get("ddp_num_buckets") or "default"
            yield (
                f"distrib_optim.pt has the buckets of --overlap-grad-reduce ({size}) at "
                f"dp={self.ranks}: load it with the same flags, Megatron may not notice others"
            )
        elif self.is_split:
            yield "distrib_optim.pt has one bucket: load it without --overlap-grad-reduce"

    @property
    def kinds(self) -> list[str]:
        """Kinds of tensors that the optimizer keeps for a parameter."""
        kinds = {split_name(name)[0] for name in self.tensors}
        return sorted(kinds - {PARAM, MAIN, STEP})

    def is_trained(self, name: str) -> bool:
        """Tell whether the optimizer has a parameter.

        Raises:
            RefusedError: It has a part of its state, or no fp32 master.
        """
        found = [kind for kind in self.kinds if f"{kind}/{name}" in self.tensors]
        if not found:
            return False
        weight = self.tensors[f"{PARAM}/{name}"]
        if found != self.kinds or (weight.dtype != "F32" and f"{MAIN}/{name}" not in self.tensors):
            raise RefusedError(
                f"of {name} ({weight.dtype}) there is {found}, but not {self.kinds} and an fp32 "
                "master. Use a checkpoint that was saved with its whole optimizer."
            )
        return True

    @property
    def ranks(self) -> int:
        """Ranks that share a bucket."""
        return self.degrees.get("dp", 1) * self.degrees.get("cp", 1)

    def locals(self, coordinate: Coordinate) -> list[Local]:
        """Return a rank's tensors, chunk by chunk, in the order of its modules."""
        tp_rank, pp_rank, ep_rank = coordinate
        pp, vpp = self.degrees["pp"], self.degrees["vpp"]
        names = [split_name(n)[1] for n in self.tensors if n.startswith(f"{PARAM}/")]
        experts = experts_of_rank(names, self.degrees["ep"], ep_rank)
        found = []
        for chunk, layers in enumerate(self.layers[pp_rank]):
            is_first, is_last = (pp_rank, chunk) == (0, 0), (pp_rank, chunk) == (pp - 1, vpp - 1)
            mine = [
                (name, name)
                for name in names
                if _is_here(name, layers, experts, is_first=is_first, is_last=is_last)
            ]
            if is_last and self.is_tied and pp > 1:
                mine.append((EMBEDDING, OUTPUT))
            of_chunk = [
                self._local(name, called, layers.start, experts.start, tp_rank, chunk)
                for name, called in mine
            ]
            found += sorted(of_chunk, key=lambda local: in_order(local.key))
        return found

    def _local(
        self, name: str, called: str, layer: int, expert: int, tp_rank: int, chunk: int
    ) -> Local:
        shape, tp = self.tensors[f"{PARAM}/{name}"].shape, self.degrees["tp"]
        mine = parts(name, shape, tp, tp_rank, is_gated=name in self.gated)
        boxes = [part.box.shape for part in mine]
        local = boxes[0] if len(boxes) == 1 else (sum(box[0] for box in boxes), *boxes[0][1:])
        is_shared = self.is_tied and self.degrees["pp"] > 1 and name == EMBEDDING
        key = self.naming.to_rank(called, layer, expert)
        return Local(name, key, local, mine, chunk, is_shared)


def _check_gpt(parameters: Sequence[str]) -> None:
    """Refuse models of other parts than an embedding, a decoder and an output layer."""
    known = "embedding.", "decoder.", "output_layer."
    other = next((name for name in parameters if not name.startswith(known)), None)
    if other is not None:
        raise RefusedError(
            f"{other} is no parameter of a GPT's embedding, decoder or output layer, and others "
            "are not written in this layout. Write torch_dist instead."
        )


def _degrees(old: Mapping[str, int], requested: Mapping[str, int]) -> dict[str, int]:
    """Return all degrees of the target. Experts are cut as the rest where they were."""
    degrees = {"tp": 1, "pp": 1, "vpp": 1, "ep": 1, **old, **requested}
    if old.get("etp", old.get("tp")) == old.get("tp") and degrees.get("etp") == old.get("etp"):
        degrees["etp"] = degrees["tp"]
    if degrees["etp"] != degrees["tp"] and degrees["ep"] > 1:
        raise RefusedError(
            f"experts cut by etp={degrees['etp']} beside tp={degrees['tp']} are not written in "
            "this layout. Use --etp of the same size, or --to torch_dist."
        )
    return degrees


def _is_here(name: str, layers: range, experts: range, *, is_first: bool, is_last: bool) -> bool:
    """Tell whether a model chunk has a tensor."""
    layer, expert = layer_of(name), expert_of(name)
    if layer is not None:
        return layer in layers and (expert is None or expert in experts)
    return is_first if name.startswith("embedding.") else is_last


def _naming(source: Checkpoint, arguments: Mapping[str, Any] | None, notes: list[str]) -> Naming:
    """Return how the target's ranks call their modules: as its arguments say, else the source."""
    extra, given = source.values.extra, arguments or {}
    if "is_local" in extra:
        return Naming(bool(extra["is_local"]), bool(extra["is_grouped"]))
    if "transformer_impl" not in given:
        notes.append("modules are named as those of --transformer-impl transformer_engine")
    is_local = given.get("transformer_impl", "transformer_engine") == "local"
    is_grouped = bool(given.get("moe_grouped_gemm"))
    if is_local and is_grouped:
        raise RefusedError(
            "the experts of --moe-grouped-gemm with --transformer-impl local are one transposed "
            "tensor for all, which is not written. Use --to torch_dist."
        )
    return Naming(is_local, is_grouped)
