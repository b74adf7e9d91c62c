"""A DeepSpeed job from its configuration and the rules of a mapping, for its first checkpoint.

    [deepspeed]
    config = "ds_config.json"            # or a table [deepspeed.config]
    [[deepspeed.group]]                  # in the optimizer's order; none: one of all parameters
    parameters = ["*.bias", "*.ln_?.weight"]
    [[deepspeed.group]]                  # without parameters: the rest

A module's parameters have the order of the mapping's rules, in each group too; a group with a list
of names without wildcards has the list's order.

Source: ``_common_checkpoint_state`` and ``_load_checkpoint`` of deepspeed/runtime/engine.py
(0.19.8).
"""

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from scalai.converters.between.mapping import NameMapping
from scalai.converters.checkpoint import Checkpoint, parameters_of
from scalai.converters.deepspeed.job import DeepSpeedJob
from scalai.converters.deepspeed.stored_config import check_config
from scalai.converters.source_files import made_steps
from scalai.core.errors import RefusedError, UsageError

VERSION = "0.19.8"
"""DeepSpeed release of the written layout."""

ADAMW: Mapping[str, Any] = {
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False,
    "differentiable": False, "fused": None, "decoupled_weight_decay": True, "bias_correction": True,
}  # fmt: skip
"""Entries of an AdamW group beside its rates, for torch's and DeepSpeed's."""


def described_job(
    table: Mapping[str, Any], where: Path, source: Checkpoint, mapping: NameMapping
) -> tuple[DeepSpeedJob, tuple[dict[str, Any], ...]]:
    """Return a job, and the stated values of its parameter groups.

    Args:
        table: ``[deepspeed]`` of the file.
        source: The state, under their names.

    Raises:
        UsageError: The file cannot be understood.
        RefusedError: A parameter is in no group.
    """
    weights = parameters_of(source)
    names = mapping.in_order(weights)
    aliases = {alias: of for alias, of in mapping.tied.items() if alias not in weights}
    dtypes = {name: weights[aliases.get(name, name)].dtype for name in (*names, *aliases)}
    entries = table.get("group", [{}])
    step, made = source.values.step, made_steps(source)
    job = DeepSpeedJob(
        tag=f"global_step{step}",
        groups=members(entries, names, where),
        module=(*names, *aliases),
        module_values={},
        module_metadata=None,
        dtypes=dtypes,
        aliases=aliases,
        buffers=(),
        frozen=(),
        model={
            "lr_scheduler": {
                "last_epoch": made, "_step_count": made + 1, "last_batch_iteration": made - 1,
            },
            "data_sampler": None,
            "random_ltd": None,
            "sparse_tensor_module_names": set(),
            "skipped_steps": step - made,
            "global_steps": step,
            "global_samples": source.values.counters.get("consumed_train_samples", 0),
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": _config(table, where),
            "ds_version": VERSION,
        },
        optimizer={},
        has_number_steps=bool(table.get("number_steps", False)),
        is_bf16="BF16" in dtypes.values(),
    )  # fmt: skip
    groups = tuple({**ADAMW, **_without(entry, "parameters")} for entry in entries)
    return job, groups


def members(
    entries: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    where: Path,
    *,
    are_some: bool = False,
) -> tuple[tuple[str, ...], ...]:
    """Return each group's parameters: to the first group with a matching pattern, else to the group
    without patterns.

    Args:
        are_some: Allow parameters outside all groups, such as frozen ones, and empty groups.

    Raises:
        RefusedError: A parameter is in no group. UsageError: A group has none.
    """
    found: list[list[str]] = [[] for _ in entries]
    rest = [number for number, entry in enumerate(entries) if "parameters" not in entry]
    for name in names:
        named = (
            number
            for number, entry in enumerate(entries)
            if any(fnmatchcase(name, pattern) for pattern in entry.get("parameters", ()))
        )
        number = next(named, rest[0] if rest else None)
        if number is None and are_some:
            continue
        if number is None:
            raise RefusedError(f"{name} is in no [[deepspeed.group]] of {where}. Add it to one.")
        found[number].append(name)
    if not all(found) and not are_some:
        raise UsageError(f"a [[deepspeed.group]] of {where} has no parameters. Remove it.")
    for entry, group in zip(entries, found, strict=True):
        listed = entry.get("parameters", ())
        if not any(set(pattern) & set("*?[") for pattern in listed):
            group.sort(key=lambda name: listed.index(name) if listed else 0)
    return tuple(map(tuple, found))


def _config(table: Mapping[str, Any], where: Path) -> dict[str, Any]:
    config = table.get("config", {})
    if isinstance(config, str):
        path = where.parent / config
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{where} names {path} as DeepSpeed's config ({error}).") from error
    if not isinstance(config, dict):
        raise UsageError(f"config under [deepspeed] of {where} is neither a table nor a path.")
    check_config(config, str(where))
    return config


def _without(entry: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != key}
