"""``--args-from``: another checkpoint of the target's job, or a TOML file about it.

    [megatron]                    # arguments of Megatron-LM, under its checkpoints' names
    num_attention_heads = 12
    vocab_size = 50257            # of tokens: for --repad
    lr = 6e-4                     # with the next two: the schedule
    global_batch_size = 512
    train_iters = 100000
    [deepspeed]                          # the job's first checkpoint
    config = "ds_config.json"            # or a table [deepspeed.config]
    [[deepspeed.group]]                  # in the optimizer's order; none: one of all parameters
    parameters = ["*.bias", "*.ln_?.weight"]
    [[deepspeed.group]]                  # without parameters: the rest

Other values follow from the tensors' shapes and from Megatron's defaults, and are listed. A
module's parameters have the order of the mapping's rules, in each group too; a group with a list of
names without wildcards has the list's order.

Source: ``_common_checkpoint_state`` and ``_load_checkpoint`` of deepspeed/runtime/engine.py
(0.19.8).
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

from scalai.converters.between.mapping import NameMapping
from scalai.converters.between.megatron_described import (
    schedule_of,
    shape_arguments,
    standard_groups,
    whole_arguments,
)
from scalai.converters.between.model_config import config_arguments
from scalai.converters.between.translation import INVENTED, heads_of
from scalai.converters.checkpoint import (
    CONFIG,
    Checkpoint,
    Order,
    ReadOptions,
    Values,
    parameters_of,
)
from scalai.converters.dcp_described import ADAMW
from scalai.converters.dcp_job import DCP, DcpJob
from scalai.converters.deepspeed.job import STATE, DeepSpeedJob, check_config
from scalai.converters.layouts import open_checkpoint
from scalai.converters.megatron.model_limits import Heads, argument_heads
from scalai.converters.source_files import made_steps
from scalai.core.errors import RefusedError, UsageError

_TABLES = {"megatron", "deepspeed"}


@dataclass(frozen=True, slots=True)
class JobReference:
    """A checkpoint of the target's job, or a file about it.

    Attributes:
        where: Path of either.
        checkpoint: The checkpoint; None: it is a file.
    """

    where: Path
    checkpoint: Checkpoint | None
    given: Mapping[str, Mapping[str, Any]]

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Megatron's stated arguments."""
        if self.checkpoint is None:
            return self.given.get("megatron", {})
        is_megatron = self.checkpoint.values.framework == "megatron"
        return (self.checkpoint.values.arguments or {}) if is_megatron else {}

    @property
    def order(self) -> Order | None:
        """The order of parameters in an optimizer without their names; None: not stated."""
        if self.checkpoint is None:
            entries = self.given.get("deepspeed", {}).get("group")
            if entries is None:
                return None
            return lambda names: members(entries, names, self.where, are_some=True)
        extra = self.checkpoint.values.extra
        job, tree = extra.get(STATE), extra.get(DCP)
        if isinstance(tree, DcpJob):  # of a job with other names it says nothing
            return lambda names: tree.groups if {*chain(*tree.groups)} <= {*names} else None
        if not isinstance(job, DeepSpeedJob) or self.checkpoint.guessed:
            return None
        groups = job.groups
        return lambda names: groups

    @property
    def heads(self) -> Heads:
        """Attention heads and query groups."""
        known = argument_heads(self.arguments)
        if self.checkpoint is not None:
            return known
        return Heads(known.heads, self.arguments.get("num_query_groups"))

    def megatron(self, source: Checkpoint, notes: list[str]) -> Values:
        """Return values of a Megatron job.

        Args:
            source: The state, under our names: its shapes fill a file's gaps.
            notes: Gets a line for each value from elsewhere than the user.

        Raises:
            RefusedError: The checkpoint is not Megatron's.
        """
        if self.checkpoint is not None:
            if self.checkpoint.values.framework != "megatron":
                raise RefusedError(
                    f"{self.where} is of {self.checkpoint.values.framework or 'no framework'}, and "
                    "Megatron's arguments are needed. Name a Megatron checkpoint, or a TOML file."
                )
            notes.append(f"{INVENTED}Megatron's arguments and parameter groups as in --args-from")
            return self.checkpoint.values
        heads = self.heads.or_else(heads_of(source)).heads
        shaped = shape_arguments(parameters_of(source), heads)
        said, _ = config_arguments(source.values.extra.get(CONFIG, {}), shaped, source.directory)
        given = {**said, **self.arguments}
        consumed = source.values.counters.get("consumed_train_samples") or 0
        arguments = whole_arguments(shaped, given, source.values.step, consumed)
        for name in sorted(arguments.keys() - given.keys()):
            by = "by the tensors" if name in shaped else "by default"
            notes.append(f"{INVENTED}Megatron's argument {name} {_text(arguments[name])} ({by})")
        return Values(
            step=source.values.step,
            degrees={},
            framework="megatron",
            scheduler=schedule_of(arguments),
            param_groups=standard_groups(arguments),
            arguments=arguments,
        )

    def deepspeed(
        self, source: Checkpoint, mapping: NameMapping, notes: list[str]
    ) -> tuple[DeepSpeedJob, tuple[Mapping[str, Any], ...]]:
        """Return a DeepSpeed job and its parameter groups.

        Args:
            source: The state, under their names.
            mapping: The rules, for the order of parameters.
            notes: As for ``megatron``.

        Raises:
            RefusedError: The checkpoint is not DeepSpeed's.
        """
        if self.checkpoint is None:
            table = self.given.get("deepspeed", {})
            job, groups = described_job(table, self.where, source, mapping)
            notes += [f"{INVENTED}{name} of the engine {_text(v)}" for name, v in job.model.items()]
            notes.append(f"{INVENTED}order of the parameters as in {mapping.where}")
            return job, groups
        job_ = self.checkpoint.values.extra.get(STATE)
        if not isinstance(job_, DeepSpeedJob):
            raise RefusedError(
                f"{self.where} ({self.checkpoint.layout}) is not DeepSpeed's, and the order of its "
                "parameters is needed. Name a DeepSpeed checkpoint of the job, or a TOML file."
            )
        return job_, self.checkpoint.values.param_groups


def read_reference(path: Path, options: ReadOptions) -> JobReference:
    """Read the checkpoint or file of ``--args-from``.

    Raises:
        UsageError: The path is missing, or the file has unknown tables.
        RefusedError: The checkpoint cannot be read.
    """
    if not path.is_file():
        return JobReference(path, open_checkpoint(path, options), {})
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is neither a checkpoint nor TOML ({error}).") from error
    wrong = sorted(name for name in given if name not in _TABLES)
    if wrong:
        raise UsageError(f"{path}: {wrong} mean nothing. It may have the tables {sorted(_TABLES)}.")
    return JobReference(path, None, given)


def _text(value: Any) -> str:
    text = str(value)
    return text if len(text) < 60 else f"{text[:57]}..."


VERSION = "0.19.8"
"""DeepSpeed release of the written layout."""


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
    groups = tuple(
        {**ADAMW, "bias_correction": True, **_without(entry, "parameters")} for entry in entries
    )
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
