"""Lays out a legacy ``torch`` checkpoint: each model-parallel rank's files, as Megatron saves them.

Megatron loads it by order and by place: it must have the parts, names and order of the job's own
ranks, at its degrees, virtual stages and, for the distributed optimizer, with the buckets of its
arguments. ``distrib_optim.pt`` does not depend on the number of data-parallel ranks, except for the
size of buckets under overlapped communication.

Source: ``save_checkpoint``, ``generate_state_dict`` and ``get_checkpoint_name`` of
megatron/training/checkpointing.py, GPTModel of megatron/core/models/gpt/gpt_model.py, the
optimizers' ``state_dict`` in megatron/core/optimizer and ``get_parameter_state_dp_zero`` of
megatron/core/optimizer/distrib_optimizer.py (0.16.1).
"""

import argparse
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
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
    CheckpointFile,
    CheckpointTarget,
    FilePiece,
    WriteOptions,
    parameters_of,
    place,
)
from scalai.converters.megatron.beside_tensors import TRACKER, with_degrees
from scalai.converters.megatron.grad_buffers import BufferMember, bucket_numel, lay_buffer
from scalai.converters.megatron.model_limits import padding_note
from scalai.converters.megatron.modules import (
    EMBEDDING,
    OUTPUT,
    Naming,
    RankBox,
    expert_of,
    experts_of_rank,
    gated,
    group_of,
    has_extra_state,
    has_latent,
    in_order,
    layer_of,
    parts,
    stage_layers,
)
from scalai.converters.megatron.rng_states import rng_states_of
from scalai.converters.megatron.torch_dist_writer import whole_groups
from scalai.converters.pickles import foreign
from scalai.converters.source_files import read_steps
from scalai.converters.torch_archive import NewTensor, lay_out_archive
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import Tensor, split_name
from scalai.core.tensors.dtypes import TORCH_NAMES
from scalai.core.tensors.region import Box, Index, whole
from scalai.store.atomic import replace_file, sync_directory

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
    parts: Sequence[RankBox]
    chunk: int
    is_shared: bool

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_expert(self) -> bool:
        return expert_of(self.name) is not None


@dataclass(frozen=True, slots=True)
class LegacyJob:
    """The job to write, for all ranks."""

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
    def of(cls, source: Checkpoint, options: WriteOptions) -> "LegacyJob":
        values, reference = source.values, options.reference
        degrees = _target_degrees(source.values.degrees, options.degrees)
        tensors = {tensor.name: tensor for tensor in source.placed.collection.tensors}
        notes = list(source.notes)
        arguments = values.arguments
        if arguments is None and reference is not None and reference.arguments is not None:
            arguments = {**reference.arguments, **values.counters, "iteration": values.step}
            notes.append(
                "Megatron's arguments are of --args-from, else by the tensors and config.json"
            )
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
            naming_of(source, arguments, notes),
            stage_layers(count, degrees["pp"], degrees["vpp"], arguments or {}),
            gated({name: tensors[f"{PARAM}/{name}"].shape for name in parameters}),
            notes,
        )
        notes.extend(job.warnings())
        return job

    @property
    def is_chained(self) -> bool:
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
        """Yield conditions on the job that loads this."""
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
        kinds = {split_name(name)[0] for name in self.tensors}
        return sorted(kinds - {PARAM, MAIN, STEP})

    def is_trained(self, name: str) -> bool:
        """Whether the optimizer has a parameter.

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


def _target_degrees(old: Mapping[str, int], requested: Mapping[str, int]) -> dict[str, int]:
    """Return all degrees of the target. Experts keep the cut of the rest if they had it."""
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
    layer, expert = layer_of(name), expert_of(name)
    if layer is not None:
        return layer in layers and (expert is None or expert in experts)
    return is_first if name.startswith("embedding.") else is_last


def naming_of(source: Checkpoint, arguments: Mapping[str, Any] | None, notes: list[str]) -> Naming:
    """Return how the target's ranks call their modules: as its arguments say, else the source."""
    extra, given = source.values.extra, arguments or {}
    is_latent = has_latent(parameters_of(source))
    if "is_local" in extra:
        return Naming(bool(extra["is_local"]), bool(extra["is_grouped"]), is_latent)
    if "transformer_impl" not in given:
        notes.append("modules are named as those of --transformer-impl transformer_engine")
    is_local = given.get("transformer_impl", "transformer_engine") == "local"
    is_grouped = bool(given.get("moe_grouped_gemm"))
    if is_local and is_grouped:
        raise RefusedError(
            "the experts of --moe-grouped-gemm with --transformer-impl local are one transposed "
            "tensor for all, which is not written. Use --to torch_dist."
        )
    return Naming(is_local, is_grouped, is_latent)


@dataclass(frozen=True, slots=True)
class Fill:
    """A box of a tensor for a file's tensor, from its byte ``offset`` on."""

    tensor: Tensor
    box: Box
    into: NewTensor
    offset: int = 0


def filled(local: Local, tensor: Tensor, fills: list[Fill]) -> NewTensor:
    """Return a new tensor of a rank's shape, to be filled with the tensor's boxes."""
    into = NewTensor(tensor.dtype, local.shape)
    offset = 0
    for part in local.parts:
        fills.append(Fill(tensor, part.box, into, offset))
        offset += NewTensor(tensor.dtype, part.box.shape).size_bytes
    return into


def groups_of(job: LegacyJob, number: int) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer: of dense parameters, or of experts."""
    mine = [group for group in job.groups if bool(group.get("is_expert_parallel")) == bool(number)]
    mine = mine or list(job.groups)
    return [{**_counted(group, job.step), "is_expert_parallel": bool(number)} for group in mine]


def _counted(group: Mapping[str, Any], step: float | None) -> dict[str, Any]:
    """Return a parameter group with the optimizer's step, a whole number if it was one."""
    if step is None:
        return dict(group)
    return {**group, "step": int(step) if isinstance(group.get("step"), int) else step}


def link_of(
    job: LegacyJob, locals_: Sequence[Local], groups: list[dict[str, Any]], fills: list[Fill]
) -> dict[str, Any]:
    scaler = job.source.values.grad_scaler
    scalers = {} if scaler is None else {"grad_scaler": scaler}
    if job.is_split:
        return {"optimizer": {"param_groups": groups}, **scalers}
    members: list[list[Local]] = [[] for _ in groups]
    for local in locals_:
        dims = len(job.tensors[f"{PARAM}/{local.name}"].shape)
        members[group_of(local.name, dims, groups)].append(local)
    state: dict[int, Any] = {}
    counted = []
    for group, of_group in zip(groups, members, strict=True):
        first = len(state)
        for local in of_group:
            state[len(state)] = _moments(job, local, fills)
        # Apex's FusedAdam counts in the group, as a whole number; torch's Adam at each parameter.
        if not isinstance(group.get("step"), int):
            group.pop("step", None)
        counted.append({**group, "params": list(range(first, len(state)))})
    inner = {"state": state, "param_groups": counted}
    if not any(name.startswith(f"{MAIN}/") for name in job.tensors) and scaler is None:
        return inner
    masters = [
        [filled(local, job.tensors[f"{MAIN}/{local.name}"], fills)
         for local in of_group if f"{MAIN}/{local.name}" in job.tensors]
        for of_group in members
    ]  # fmt: skip
    return {"optimizer": inner, **scalers, "fp32_from_fp16_params": masters}


def _moments(job: LegacyJob, local: Local, fills: list[Fill]) -> dict[str, Any]:
    """Return the state of one parameter of a whole optimizer, as torch's Adam keeps it."""
    state: dict[str, Any] = {}
    if f"{STEP}/{local.name}" in job.tensors:
        state[STEP] = NewTensor("F32", ())
        fills.append(Fill(job.tensors[f"{STEP}/{local.name}"], whole(()), state[STEP]))
    for kind in job.kinds:
        state[kind] = filled(local, job.tensors[f"{kind}/{local.name}"], fills)
    return state


def buffers_of(
    job: LegacyJob,
    coordinate: Coordinate,
    locals_: Sequence[Local],
    numel: int,
    fills: list[Fill],
) -> dict[Any, Any]:
    """Return the state of the distributed optimizer, as its first rank gathers it.

    Args:
        numel: Elements of all parameters of the rank.
    """
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for chunk in range(job.degrees["vpp"]):
        of_chunk = [local for local in locals_ if local.chunk == chunk]
        dtypes = {local.name: job.tensors[f"{PARAM}/{local.name}"].dtype for local in of_chunk}
        size = bucket_numel(
            job.arguments or {}, dp=job.ranks, pp_rank=coordinate[1], chunk=chunk, numel=numel
        )
        for dtype in dict.fromkeys(dtypes.values()):
            mine = [local for local in of_chunk if dtypes[local.name] == dtype]
            members = [BufferMember(local.numel, local.is_shared) for local in mine]
            starts, total = lay_buffer(members, size)
            buffer: dict[str, Any] = {}
            for kind in ("param", *job.kinds):
                buffer[kind] = NewTensor("F32", (total,))
                for local, start in zip(mine, starts, strict=True):
                    _fill_flat(job, kind, local, buffer[kind], start, fills)
            buffer["numel_unpadded"] = total
            key = foreign("torch", TORCH_NAMES[dtype]), _grad_dtype(job, dtype)
            state[len(state) - 1] = {key: buffer}
    return state


def _fill_flat(
    job: LegacyJob, kind: str, local: Local, into: NewTensor, start: int, fills: list[Fill]
) -> None:
    if kind == "param":
        weight, main = (job.tensors.get(f"{k}/{local.name}") for k in (PARAM, MAIN))
        tensor = main or weight
        assert tensor is not None
    else:
        tensor = job.tensors[f"{kind}/{local.name}"]
    if tensor.dtype != into.dtype:
        raise RefusedError(
            f"there is no fp32 {kind} of {local.name}, but {tensor.dtype}. Use a checkpoint that "
            "was saved with its optimizer, or --to torch_dist."
        )
    offset = start * 4
    for part in local.parts:
        fills.append(Fill(tensor, part.box, into, offset))
        offset += 4 * part.box.numel


def _grad_dtype(job: LegacyJob, dtype: str) -> Any:
    """Return the dtype of gradients, Megatron's key of a buffer."""
    given = job.arguments or {}
    is_wide = given.get("accumulate_allreduce_grads_in_fp32", dtype == "BF16")
    return foreign("torch", TORCH_NAMES["F32" if is_wide else dtype])


MODEL, OPTIMIZER = "model_optim_rng.pt", "distrib_optim.pt"


def lay_out(source: Checkpoint, options: WriteOptions) -> CheckpointTarget:
    """Lay out a checkpoint of ``source``'s state at other degrees.

    Raises:
        RefusedError: The model cannot be cut so, has modules of unknown order, or lacks masters or
            hyperparameters.
    """
    job = LegacyJob.of(source, options)
    files: list[CheckpointFile] = []
    pieces: list[FilePiece] = []
    fixed: dict[int, Sequence[tuple[int, bytes]]] = {}
    for coordinate in job.coordinates():
        for path, value, fills in _rank_files(job, coordinate):
            archive = lay_out_archive(value, Path(path).stem)
            fixed[len(files)] = archive.fixed
            files.append(CheckpointFile(path, archive.size_bytes))
            begins = {id(t): at for t, at in zip(archive.tensors, archive.begin, strict=True)}
            pieces += [
                FilePiece(fill.tensor, fill.box, path, begins[id(fill.into)] + fill.offset)
                for fill in fills
            ]

    def finish(directory: Path, _: npt.NDArray[np.uint64]) -> None:
        for file in files:
            sync_directory((directory / file.path).parent)
        sync_directory(directory / job.folder)
        replace_file(directory / TRACKER, str(source.values.step).encode())

    return CheckpointTarget("torch", place(pieces, files), fixed, finish, tuple(job.notes))


def _rank_files(
    job: LegacyJob, coordinate: Coordinate
) -> Iterator[tuple[str, Any, Sequence[Fill]]]:
    """Yield path, content and fills of each file of a rank."""
    folder = f"{job.folder}/{folder_name(coordinate, job.degrees)}"
    locals_ = job.locals(coordinate)
    fills: list[Fill] = []
    tree: dict[str, Any] = {}
    if job.arguments is not None:
        tree["args"] = argparse.Namespace(**job.arguments)
    extra = job.source.values.extra
    tree["checkpoint_version"] = extra.get("checkpoint_version", 3.0)
    tree["iteration"] = job.source.values.step
    for chunk in range(job.degrees["vpp"]):
        name = "model" if job.degrees["vpp"] == 1 else f"model{chunk}"
        of_chunk = [local for local in locals_ if local.chunk == chunk]
        is_last = (coordinate[1], chunk) == (job.degrees["pp"] - 1, job.degrees["vpp"] - 1)
        tree[name] = _model(job, of_chunk, fills, is_last=is_last)
    trained = [local for local in locals_ if job.is_trained(local.name)]
    links = [trained]
    if job.is_chained:
        links = [[local for local in trained if local.is_expert == flag] for flag in (False, True)]
    if job.is_split is not None:
        states = [
            link_of(job, link, groups_of(job, number), fills) for number, link in enumerate(links)
        ]
        tree["optimizer"] = states if job.is_chained else states[0]
    if job.source.values.scheduler is not None:
        tree["opt_param_scheduler"] = job.source.values.scheduler
    tree["rng_state"] = rng_states_of(job.source, job.degrees, coordinate, job.notes)
    flops = "num_floating_point_operations_so_far"
    tree[flops] = extra.get(flops, 0)
    yield f"{folder}/{MODEL}", tree, fills
    if job.is_split:
        flat: list[Fill] = []
        numel = sum(local.numel for local in trained)
        # The first of the sharing ranks has the dense parameters' state.
        buffers = [
            buffers_of(job, coordinate, link, numel, flat) if number or not coordinate[2] else None
            for number, link in enumerate(links)
        ]
        yield f"{folder}/{OPTIMIZER}", buffers if job.is_chained else buffers[0], flat


def _model(
    job: LegacyJob, locals_: Sequence[Local], fills: list[Fill], *, is_last: bool
) -> dict[str, Any]:
    state: OrderedDict[str, Any] = OrderedDict()
    extra: dict[str, None] = {"output_layer._extra_state": None} if is_last else {}
    for local in locals_:
        state[local.key] = filled(local, job.tensors[f"{PARAM}/{local.name}"], fills)
        module = local.key.rpartition(".")[0]
        if has_extra_state(local.key):
            extra[f"{module}._extra_state"] = None
        if not job.naming.is_local and local.key.endswith("linear_proj.weight"):
            attention = module.removesuffix(".linear_proj")
            extra[f"{attention}.core_attention._extra_state"] = None
    state.update(extra)
    return state
