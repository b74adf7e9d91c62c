"""A DeepSpeed job's values as Megatron's, for its layouts to write.

The tensors already have our names (``between.translation``). Values DeepSpeed lacks, arguments and
schedule, come from ``--args-from``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from scalai.converters.between.hyperparameters import with_rates
from scalai.converters.between.loss_scales import to_megatron_scale
from scalai.converters.between.megatron_described import shape_arguments
from scalai.converters.between.to_deepspeed import client_state
from scalai.converters.between.translation import INVENTED, LEFT_OUT, Links
from scalai.converters.checkpoint import Checkpoint, Values, parameters_of
from scalai.converters.deepspeed.job import STATE, DeepSpeedJob
from scalai.converters.megatron.beside_tensors import counters_of
from scalai.converters.megatron.common_state import FORM
from scalai.converters.megatron.modules import group_of
from scalai.converters.source_files import made_steps
from scalai.core.errors import RefusedError

_KEPT = ("keys", "is_local", "is_grouped", "checkpoint_version", "content_metadata", FORM)
"""Extra values of a Megatron checkpoint for its job's names."""


_COMPARED = (
    "num_layers", "hidden_size", "ffn_hidden_size", "padded_vocab_size", "max_position_embeddings",
    "num_experts", "swiglu", "untie_embeddings_and_output_weights",
)  # fmt: skip
"""Arguments to compare with the tensors' shapes."""


def to_megatron(source: Checkpoint, links: Links, reference: Values) -> Checkpoint:
    """Return a DeepSpeed job's state as Megatron's.

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
    notes += [f"{LEFT_OUT}{what}" for what in _left_out(values)]
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


def _left_out(values: Values) -> Iterator[str]:
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
    job, theirs = source.values.extra.get(STATE), source.values.param_groups
    if not isinstance(job, DeepSpeedJob) or not theirs:
        return reference.param_groups
    numbers = {name: number for number, names in enumerate(job.groups) for name in names}
    members: list[list[Mapping[str, Any]]] = [[] for _ in reference.param_groups]
    for name, of in links.items():
        for link in of:
            if name in numbers:
                dims = len(link.their_shape)
                group = group_of(link.theirs, dims, reference.param_groups)
                members[group].append(theirs[numbers[name]])
    return with_rates(reference.param_groups, members, notes)
