"""Megatron's values as a DeepSpeed job's, for its layouts to write.

The tensors already have their names (``between.translation``). Values Megatron lacks, above all the
order of parameters, come from ``--args-from``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from scalai.converters.between.hyperparameters import with_rates
from scalai.converters.between.loss_scales import to_deepspeed_scale
from scalai.converters.between.translation import INVENTED, LEFT_OUT, Links
from scalai.converters.checkpoint import (
    PARAM,
    Checkpoint,
    CheckpointFile,
    FilePiece,
    parameters_of,
    place,
    unite,
)
from scalai.converters.deepspeed.job import STATE, DeepSpeedJob
from scalai.converters.megatron.modules import group_of
from scalai.converters.source_files import SourceFiles, made_steps
from scalai.core.errors import RefusedError

_COUNTERS = ("last_epoch", "_step_count", "last_batch_iteration")
"""Step counters of torch's and DeepSpeed's schedules."""
_KNOWN = (
    "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps",
    "global_steps", "global_samples", "mp_world_size", "checkpoint_parallel_dimensions",
    "ds_config", "ds_version", "dp_world_size",
)  # fmt: skip
"""DeepSpeed's own entries of a model's file; others are the client's."""


def to_deepspeed(
    source: Checkpoint,
    links: Links,
    job: DeepSpeedJob,
    groups: Sequence[Mapping[str, Any]],
    reference: Checkpoint | None,
) -> Checkpoint:
    """Return Megatron's state as a DeepSpeed job's.

    Args:
        source: The state under their names, with Megatron's values.
        links: Links by our names.
        job: The job to read it.
        reference: The job's own checkpoint, of any step, for its buffers; None: there is none.

    Raises:
        RefusedError: The job's module is another.
    """
    values, notes = source.values, list(source.notes)
    ours = {link.theirs: link for of in links.values() for link in of}
    _check_names(source, job, ours)
    if reference is not None:
        _check_shapes(source, reference)
        job = _at_step(job, source, notes)
        source = _with_buffers(source, job, reference, notes)
    notes += _left_out(source)
    if values.grad_scaler is not None:
        scale = to_deepspeed_scale(
            values.grad_scaler, job.model.get("ds_config") or {}, values.step
        )
        if scale is None:
            notes.append(f"{LEFT_OUT}the fp16 loss scale: the job has no dynamic one")
        job = replace(job, optimizer={**job.optimizer, **(scale or {})})
    if values.param_groups:
        numbers = {
            name: group_of(link.name, len(link.shape), values.param_groups)
            for name, link in ours.items()
        }
        members = [[values.param_groups[numbers[name]] for name in names] for names in job.groups]
        groups = with_rates(groups, members, notes)
    return replace(
        source,
        values=replace(
            values,
            framework="deepspeed",
            degrees={"tp": 1, "pp": 1, **_only(values.degrees, "dp")},
            scheduler=job.model.get("lr_scheduler"),
            grad_scaler=None,
            param_groups=tuple(groups),
            arguments=job.model.get("ds_config"),
            rank_state={},
            extra={STATE: job},
        ),
        notes=tuple(notes),
    )


def client_state(model: Mapping[str, Any]) -> list[str]:
    """Return the client's entries of a model's file."""
    return sorted(model.keys() - set(_KNOWN))


def _only(values: Mapping[str, int], name: str) -> dict[str, int]:
    return {name: values[name]} if name in values else {}


def _check_names(source: Checkpoint, job: DeepSpeedJob, names: Iterable[str]) -> None:
    mine, theirs = set(names), {job.aliases.get(name, name) for name in job.module}
    trained = {name for group in job.groups for name in group}
    for what, wrong in (
        ("tensors without a place in the DeepSpeed job's module", mine - theirs),
        ("no tensors of parameters that the DeepSpeed job trains", trained - mine),
    ):
        if wrong:
            raise RefusedError(
                f"{source.directory} has {what}: {len(wrong)}, first {min(wrong)}. The job of "
                "--args-from is of another model (are its embeddings tied?): name another one."
            )


def _check_shapes(source: Checkpoint, reference: Checkpoint) -> None:
    mine, theirs = parameters_of(source), parameters_of(reference)
    for name in sorted(mine.keys() & theirs.keys()):
        if mine[name] != theirs[name]:
            raise RefusedError(
                f"{name} is {mine[name].dtype}{list(mine[name].shape)} in {source.directory} and "
                f"{theirs[name].dtype}{list(theirs[name].shape)} in {reference.directory}: they "
                "are of other models or precisions. Name another --args-from; if only the rows of "
                "the vocabulary differ, give --repad ROWS."
            )


def _at_step(job: DeepSpeedJob, source: Checkpoint, notes: list[str]) -> DeepSpeedJob:
    """Return the reference's job at the source's step; like the optimizer, its schedule skips
    overflows."""
    step, samples = source.values.step, source.values.counters.get("consumed_train_samples")
    made = made_steps(source)
    made_before = job.model["global_steps"] - (job.model.get("skipped_steps") or 0)
    model = {**job.model, "global_steps": step, "skipped_steps": step - made}
    if samples is None:
        notes.append(f"{INVENTED}global_samples {model.get('global_samples')} as in --args-from")
    else:
        model["global_samples"] = samples
    scheduler = model.get("lr_scheduler")
    if isinstance(scheduler, Mapping):
        counters = {n: scheduler[n] + made - made_before for n in _COUNTERS if n in scheduler}
        model["lr_scheduler"] = {**scheduler, **counters}
        text = ", ".join(f"{name} {value}" for name, value in counters.items())
        notes.append(f"{INVENTED}lr_scheduler, that of --args-from with {text}")
    notes += [f"{INVENTED}client_state {key!r} as in --args-from" for key in client_state(model)]
    notes.append(f"{INVENTED}ds_config and the order of parameters as in --args-from")
    return replace(job, tag=f"global_step{step}", model=model, of_ranks=())


def _with_buffers(
    source: Checkpoint, job: DeepSpeedJob, reference: Checkpoint, notes: list[str]
) -> Checkpoint:
    """Return a state with the reference's module buffers, small enough for memory."""
    placed, opened = reference.placed, SourceFiles(reference.directory)
    pieces, files = [], []
    for row in range(len(placed.collection)):
        tensor, box = placed.collection.box(row)
        if tensor.name.removeprefix(f"{PARAM}/") in job.buffers:
            bits = np.ascontiguousarray(opened.view(placed, row, box))
            content = bits.tobytes()
            files.append(CheckpointFile(f"(buffer {row})", len(content), content))
            pieces.append(FilePiece(tensor, box, files[-1].path, 0))
    if not pieces:
        return source
    names = sorted({piece.tensor.name.removeprefix(f"{PARAM}/") for piece in pieces})
    notes.append(f"{INVENTED}buffers as in --args-from: {', '.join(names)}")
    return replace(source, placed=unite([source.placed, place(pieces, files)]))


def _left_out(source: Checkpoint) -> list[str]:
    values = source.values
    present = {
        "Megatron's arguments": values.arguments,
        "Megatron's schedule of learning rate and weight decay": values.scheduler,
        "RNG states": values.rank_state or values.extra.get("rng_state"),
        "extra state of layers": values.extra.get("objects"),
    }
    return [f"{LEFT_OUT}{what}" for what, value in present.items() if value]
