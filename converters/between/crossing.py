"""The values beside the tensors of one framework's job as the other's, for its layouts to write.

The tensors already have the target's names (``between.translation``). Values the source lacks come
from ``--args-from``. Rates of parameter groups are matched by their parameters.

The fp16 loss scale: both double it after a number of steps without an overflow, and halve it at an
overflow without hysteresis left. Megatron counts good steps; DeepSpeed keeps the last bad step, and
grows one step later.

Source: ``DynamicGradScaler`` of megatron/core/optimizer/grad_scaler.py (0.16.1) and
``DynamicLossScaler`` of deepspeed/runtime/fp16/loss_scaler.py (0.19.8).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from scalai.converters.between.megatron_described import shape_arguments
from scalai.converters.between.translation import INVENTED, LEFT_OUT, Links
from scalai.converters.checkpoint import (
    MAIN,
    PARAM,
    Checkpoint,
    CheckpointFile,
    FilePiece,
    Values,
    parameters_of,
    place,
    unite,
)
from scalai.converters.dcp_described import RATES, described_groups
from scalai.converters.dcp_job import DCP, DcpJob
from scalai.converters.deepspeed.job import STATE, DeepSpeedJob
from scalai.converters.deepspeed.loss_scale import to_zero
from scalai.converters.megatron.beside_tensors import counters_of
from scalai.converters.megatron.common_state import FORM
from scalai.converters.megatron.modules import group_of
from scalai.converters.pickles import Foreign
from scalai.converters.source_files import SourceFiles, made_steps
from scalai.converters.torch_archive import NewTensor
from scalai.core.errors import RefusedError
from scalai.core.tensors.collection import split_name
from scalai.store.files import number_of

Group = Mapping[str, Any]


def with_rates(
    bases: Sequence[Group], sources: Sequence[Sequence[Group]], notes: list[str]
) -> tuple[dict[str, Any], ...]:
    """Return the target's groups with the source's rates.

    Args:
        bases: The target's groups from its job.
        sources: For each of them, the source's groups of its parameters.
        notes: Gets a line for each rate not the source's.
    """
    return tuple(
        {**base, **_rates(base, groups, number, notes)}
        for number, (base, groups) in enumerate(zip(bases, sources, strict=True))
    )


def _rates(base: Group, groups: Sequence[Group], number: int, notes: list[str]) -> dict[str, Any]:
    found = {}
    for rate in RATES:
        known: list[Any] = []
        for group in groups:
            value = group.get(rate)
            value = tuple(value) if isinstance(value, list) else value
            if value is not None and value not in known:
                known.append(value)
        if len(known) == 1:
            found[rate] = known[0]
        elif known:
            notes.append(
                f"{LEFT_OUT}{rate} of parameter group {number}, for its parameters had {known}: it "
                f"stays {base.get(rate)} as in --args-from"
            )
        else:
            notes.append(f"{INVENTED}{rate} {base.get(rate)} of parameter group {number}")
    return found


_WINDOW = 1000
"""Good steps before growth, by default in both."""


def to_deepspeed_scale(
    scaler: Mapping[str, Any], config: Mapping[str, Any], step: int
) -> dict[str, Any] | None:
    """Return ZeRO's entries for Megatron's scale; None: the job has no dynamic one.

    Args:
        scaler: State of Megatron's scaler, possibly empty.
    """
    section = config.get("fp16") or {}
    if not section.get("enabled") or section.get("loss_scale") or "scale" not in scaler:
        return None
    tree = {
        "dynamic_loss_scale": True,
        "cur_scale": number_of(scaler["scale"].content or b"", "F32"),
        "cur_iter": step,
        "last_overflow_iter": step - int(scaler["growth_tracker"]) - 2,
        "scale_factor": 2.0,
        "scale_window": section.get("loss_scale_window", _WINDOW),
    }
    entries = to_zero(tree, config)
    entries["loss_scaler"].state["cur_hysteresis"] = max(int(scaler["hysteresis_tracker"]), 1)
    return entries


def to_megatron_scale(job: DeepSpeedJob) -> dict[str, Any] | None:
    """Return Megatron's state for DeepSpeed's scale; None: it is not dynamic."""
    scaler = job.optimizer.get("loss_scaler")
    state = scaler.state if isinstance(scaler, Foreign) and isinstance(scaler.state, dict) else {}
    if not state.get("dynamic"):
        return None
    good = max(int(state["cur_iter"]) - int(state["last_overflow_iter"]) - 2, 0)
    return {
        "scale": NewTensor("F32", (1,), np.float32(state["cur_scale"]).tobytes()),
        "growth_tracker": good % int(state["scale_window"]),
        "hysteresis_tracker": int(state["cur_hysteresis"]),
    }


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
    """Return Megatron's or torch's state as a DeepSpeed job's.

    Args:
        source: The state under their names, with Megatron's values.
        links: Links by our names.
        job: The job to read it.
        reference: The job's own checkpoint, of any step, for its buffers; None: there is none.

    Raises:
        RefusedError: The job's module is another.
    """
    values, notes = source.values, list(source.notes)
    _check_names(source, job, parameters_of(source))
    if reference is not None:
        _check_shapes(source, reference)
        job = _at_step(job, source, notes)
        source = _with_buffers(source, job, reference, notes)
    notes += [*_left_by_megatron(source), *_left_by_torch(source)]
    if values.grad_scaler is not None:
        scale = to_deepspeed_scale(
            values.grad_scaler, job.model.get("ds_config") or {}, values.step
        )
        if scale is None:
            notes.append(f"{LEFT_OUT}the fp16 loss scale: the job has no dynamic one")
        job = replace(job, optimizer={**job.optimizer, **(scale or {})})
    if values.param_groups:
        of_name = _groups_of(source, links)
        members = [[of_name[name] for name in names if name in of_name] for names in job.groups]
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


def _groups_of(source: Checkpoint, links: Links) -> dict[str, Mapping[str, Any]]:
    """Return the source's parameter groups by their names of the parameters.

    Args:
        links: Links by our names; empty: the source's job knows theirs.
    """
    groups, extra = source.values.param_groups, source.values.extra
    jobs = [job for job in (extra.get(DCP), extra.get(STATE)) if job is not None]
    if jobs:
        numbered = zip(jobs[0].groups, groups, strict=True)
        return {name: group for names, group in numbered for name in names}
    return {
        link.theirs: groups[group_of(link.name, len(link.shape), groups)]
        for of in links.values()
        for link in of
    }


def to_torch(source: Checkpoint, links: Links, reference: Checkpoint | None) -> Checkpoint:
    """Return Megatron's state as one of a training with FSDP2.

    Args:
        source: The state under their names, with Megatron's values.
        links: Links by our names.
        reference: A checkpoint of the training, of any step: its tree and its groups; None: the
            tree of ``get_state_dict``, and Megatron's groups.
    """
    values, notes = source.values, list(source.notes)
    source = _with_masters(source, notes)
    kinds = {split_name(tensor.name) for tensor in source.placed.collection.tensors}
    trained = list(dict.fromkeys(name for kind, name in sorted(kinds) if kind != PARAM))
    order = [name for name in parameters_of(source) if name in set(trained)]
    of_name = _groups_of(source, links) if order and values.param_groups else {}
    known = None if reference is None else reference.values.extra.get(DCP)
    groups: tuple[Mapping[str, Any], ...]
    if isinstance(known, DcpJob):
        _check_trained(source, known, order)
        members = [[of_name[name] for name in names if name in of_name] for names in known.groups]
        groups = with_rates(reference.values.param_groups, members, notes) if reference else ()
        left = sorted({str(known.paths.get(key, (key,))[0]) for key in known.objects})
        notes += [f"{LEFT_OUT}{name} of --args-from" for name in left]
        job = replace(known, objects={}, steps={}, masters={})
    else:
        job, groups = described_groups(order, of_name, values.step, notes)
    notes += _left_by_megatron(source)
    return replace(
        source,
        values=Values(
            step=values.step,
            degrees=_only(values.degrees, "dp"),
            framework="torch",
            is_split=True if order else None,
            param_groups=groups,
            extra={DCP: job},
        ),
        notes=tuple(notes),
    )


def _with_masters(source: Checkpoint, notes: list[str]) -> Checkpoint:
    """Return a state whose 16-bit weights are their fp32 masters, as FSDP2 keeps them."""
    placed = source.placed
    tensors = {tensor.name for tensor in placed.collection.tensors}
    masters = {name for kind, name in map(split_name, tensors) if kind == MAIN}
    if not masters:
        return source
    pieces = []
    for row in range(len(placed.collection)):
        piece = placed.piece(row)
        kind, name = split_name(piece.tensor.name)
        if kind == MAIN:
            renamed = replace(piece.tensor, name=f"{PARAM}/{name}")
            pieces.append(replace(piece, tensor=renamed))
        elif kind != PARAM or name not in masters:
            pieces.append(piece)
    notes.append(
        f"{len(masters)} weights are their fp32 masters: FSDP2's mixed precision keeps those, and "
        "casts them itself"
    )
    return replace(source, placed=place(pieces, placed.files), duplicates=None)


def _check_trained(source: Checkpoint, job: DcpJob, names: Sequence[str]) -> None:
    theirs, mine = {name for group in job.groups for name in group}, set(names)
    if theirs != mine:
        raise RefusedError(
            f"{source.directory} trains {len(mine - theirs)} parameters that --args-from does not, "
            f"and lacks {len(theirs - mine)} of its: {', '.join(sorted(theirs ^ mine)[:5])}. Name "
            "a checkpoint of the same model (are its embeddings tied?)."
        )


def _left_by_torch(source: Checkpoint) -> Iterator[str]:
    job = source.values.extra.get(DCP)
    if isinstance(job, DcpJob):
        for name in sorted({str(job.paths.get(key, (key,))[0]) for key in job.objects}):
            yield f"{LEFT_OUT}{name} of the training in torch"


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


def _left_by_megatron(source: Checkpoint) -> list[str]:
    values = source.values
    present = {
        "Megatron's arguments": values.arguments,
        "Megatron's schedule of learning rate and weight decay": values.scheduler,
        "RNG states": values.rank_state or values.extra.get("rng_state"),
        "extra state of layers": values.extra.get("objects"),
    }
    return [f"{LEFT_OUT}{what}" for what, value in present.items() if value]


_KEPT = ("keys", "is_local", "is_grouped", "checkpoint_version", "content_metadata", FORM)
"""Extra values of a Megatron checkpoint for its job's names."""


_COMPARED = (
    "num_layers", "hidden_size", "ffn_hidden_size", "padded_vocab_size", "max_position_embeddings",
    "num_experts", "moe_ffn_hidden_size", "swiglu", "untie_embeddings_and_output_weights",
    "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim",
    "v_head_dim",
)  # fmt: skip
"""Arguments to compare with the tensors' shapes."""


def to_megatron(source: Checkpoint, links: Links, reference: Values) -> Checkpoint:
    """Return a DeepSpeed job's or torch's state as Megatron's.

    Args:
        source: The state under our names, with DeepSpeed's values.
        links: Links by their names.
        reference: Source of Megatron's arguments, schedule and parameter groups.

    Raises:
        RefusedError: The reference is of another model.
    """
    values, notes = source.values, list(source.notes)
    samples = values.counters.get("consumed_train_samples")
    counted: dict[str, Any] = {"iteration": values.step}
    batch = _batch(reference) if values.framework == "torch" else 0
    if samples is None and batch:
        samples = values.step * batch
        notes.append(f"{INVENTED}consumed_train_samples {samples}: {values.step} steps of {batch}")
    if samples is None:
        notes.append(f"{INVENTED}consumed_train_samples 0")
    counted["consumed_train_samples"] = samples or 0
    arguments = {**(reference.arguments or {}), **counted}
    _check(source, arguments)
    scheduler = reference.scheduler
    if scheduler is None:
        notes.append(
            f"{LEFT_OUT}the schedule, which Megatron-LM asks for beside an optimizer: give lr, "
            "global_batch_size and train_iters under [megatron], or a checkpoint"
        )
    else:
        # It counts the samples of the optimizer's steps, without the skipped ones.
        made = counted["consumed_train_samples"] * made_steps(source) // max(values.step, 1)
        scheduler = {**scheduler, "num_steps": made}
        notes.append(f"{INVENTED}schedule of --args-from, at {made} samples")
    job = values.extra.get(STATE)
    scale = to_megatron_scale(job) if isinstance(job, DeepSpeedJob) else None
    notes += [f"{LEFT_OUT}{what}" for what in _left_by_deepspeed(values)]
    notes += _left_by_torch(source)
    return replace(
        source,
        values=Values(
            step=values.step,
            degrees={"tp": 1, "pp": 1, **{a: n for a, n in values.degrees.items() if a == "dp"}},
            framework="megatron",
            is_split=values.is_split,
            scheduler=scheduler,
            grad_scaler=scale,
            param_groups=_groups(source, links, reference, notes),
            arguments=arguments,
            counters=counters_of(arguments),
            extra={key: reference.extra[key] for key in _KEPT if key in reference.extra},
        ),
        notes=tuple(notes),
    )


def _batch(reference: Values) -> int:
    """Return the global batch of a Megatron job; 0: unknown, or it grew."""
    batch = (reference.arguments or {}).get("global_batch_size")
    if isinstance(batch, int):
        return batch
    samples = reference.counters.get("consumed_train_samples") or 0
    return 0 if samples % max(reference.step, 1) else int(samples) // max(reference.step, 1)


def _left_by_deepspeed(values: Values) -> Iterator[str]:
    if values.scheduler:
        yield "DeepSpeed's lr_scheduler"
    if values.arguments:
        yield "ds_config"
    job = values.extra.get(STATE)
    if isinstance(job, DeepSpeedJob):
        yield from (f"client_state {key!r}" for key in client_state(job.model))


def _check(source: Checkpoint, arguments: Mapping[str, Any]) -> None:
    shaped = shape_arguments(parameters_of(source), arguments.get("num_attention_heads"))
    names = [*_COMPARED, *(["num_query_groups"] * bool(arguments.get("group_query_attention")))]
    for name in names:
        value = shaped.get(name)
        if value is not None and arguments.get(name) not in (None, value):
            way = "Give --repad ROWS" if name == "padded_vocab_size" else "Name another --args-from"
            raise RefusedError(
                f"{name} is {arguments[name]} in --args-from, and {value} by the tensors of "
                f"{source.directory}. {way}."
            )


def _groups(
    source: Checkpoint, links: Links, reference: Values, notes: list[str]
) -> tuple[Mapping[str, Any], ...]:
    extra = source.values.extra
    if not source.values.param_groups or not (STATE in extra or DCP in extra):
        return reference.param_groups
    of_name = _groups_of(source, {})
    members: list[list[Mapping[str, Any]]] = [[] for _ in reference.param_groups]
    for name, of in links.items():
        for link in of:
            if name in of_name:
                dims = len(link.their_shape)
                group = group_of(link.theirs, dims, reference.param_groups)
                members[group].append(of_name[name])
    return with_rates(reference.param_groups, members, notes)
