"""``--args-from``: another checkpoint of the target's job, or a TOML file about it.

    [megatron]                    # arguments of Megatron-LM, under its checkpoints' names
    num_attention_heads = 12
    vocab_size = 50257            # of tokens: for --repad
    lr = 6e-4                     # with the next two: the schedule
    global_batch_size = 512
    train_iters = 100000
    [deepspeed]                   # scalai.converters.between.deepspeed_described
    config = "ds_config.json"

Other values follow from the tensors' shapes and from Megatron's defaults, and are listed.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalai.converters.between.deepspeed_described import described_job, members
from scalai.converters.between.mapping import NameMapping
from scalai.converters.between.megatron_described import (
    schedule_of,
    shape_arguments,
    standard_groups,
    whole_arguments,
)
from scalai.converters.between.model_config import config_arguments
from scalai.converters.between.translation import INVENTED
from scalai.converters.checkpoint import (
    CONFIG,
    Checkpoint,
    Order,
    ReadOptions,
    Values,
    parameters_of,
)
from scalai.converters.deepspeed.job import STATE, DeepSpeedJob
from scalai.converters.layouts import open_checkpoint
from scalai.converters.megatron.model_limits import Heads, argument_heads
from scalai.core.errors import RefusedError, UsageError

_TABLES = {"megatron", "deepspeed"}


@dataclass(frozen=True, slots=True)
class Reference:
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
        """The order of parameters in a DeepSpeed engine's optimizer; None: not stated."""
        if self.checkpoint is None:
            entries = self.given.get("deepspeed", {}).get("group")
            if entries is None:
                return None
            return lambda names: members(entries, names, self.where, are_some=True)
        job = self.checkpoint.values.extra.get(STATE)
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
        shaped = shape_arguments(parameters_of(source), self.heads.heads)
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


def read_reference(path: Path, options: ReadOptions) -> Reference:
    """Read the checkpoint or file of ``--args-from``.

    Raises:
        UsageError: The path is missing, or the file has unknown tables.
        RefusedError: The checkpoint cannot be read.
    """
    if not path.is_file():
        return Reference(path, open_checkpoint(path, options), {})
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is neither a checkpoint nor TOML ({error}).") from error
    wrong = sorted(name for name in given if name not in _TABLES)
    if wrong:
        raise UsageError(f"{path}: {wrong} mean nothing. It may have the tables {sorted(_TABLES)}.")
    return Reference(path, None, given)


def _text(value: Any) -> str:
    text = str(value)
    return text if len(text) < 60 else f"{text[:57]}..."
