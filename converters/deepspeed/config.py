"""DeepSpeed's JSON configuration: finding it on a command line, its batches, stage and limits.

Source: ``DeepSpeedConfig`` of deepspeed/runtime/config.py and ``_add_core_arguments`` of
deepspeed/__init__.py, 0.19.8. Imports nothing of DeepSpeed.
"""

import base64
import binascii
import importlib
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalai.core.errors import RefusedError, UsageError

BLOCK = "scalai"
"""Top-level key of the elastic configuration. DeepSpeed keeps unknown keys."""
FLAGS = ("--deepspeed_config", "--deepspeed-config", "--deepspeed", "--deepscale_config")
"""Script flags with a DeepSpeed configuration as value; ``--deepspeed`` is Trainer's."""
STAGE_FLAGS = ("pipeline-parallel-size", "pipe-parallel-size", "num-stages")
"""Script flags for the number of pipeline stages; no configuration has it."""
TRAIN, MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
AUTOTP, AUTOTP_SIZE = "tensor_parallel", "autotp_size"
ZERO, STAGE, STAGE_COUNT = "zero_optimization", "stage", 4
SEQUENCE_PARALLEL = "sequence_parallel_size"


@dataclass(frozen=True, slots=True)
class Sum:
    """A key that makes a step depend on ranks, on micro-batches, or on progress not carried over.

    ``value``: the one value with this effect; empty: ``enabled`` anywhere below the key, or any set
    value.
    """

    key: str
    why: str
    source: str
    value: str = ""

    @property
    def named(self) -> str:
        """The key, with its ``value`` if it has one."""
        return f"{self.key} = {self.value}" if self.value else self.key

    def is_in(self, config: Mapping[str, Any]) -> bool:
        """Whether a configuration turns it on."""
        found: Any = config
        for name in self.key.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        if self.value:
            return str(found).lower() == self.value
        return any(_enabled(found)) if isinstance(found, Mapping) else bool(found)


def _enabled(section: Mapping[str, Any]) -> Iterator[bool]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _enabled(value)
        elif name == "enabled":
            yield bool(value)


SUMS = (
    Sum(
        "gradient_allreduce_op",
        "gradients are summed over data-parallel ranks, not averaged, and grow with their number",
        "runtime/engine.py:DeepSpeedEngine.allreduce_bucket", "sum",
    ),
    Sum(
        "data_efficiency.data_sampling.curriculum_learning",
        "how far its sampler is is not carried", "runtime/data_pipeline/data_sampling",
    ),
    Sum(
        "data_efficiency.data_routing.random_ltd",
        "the schedule of dropped tokens is not carried", "runtime/data_pipeline/data_routing",
    ),
    Sum(
        "eigenvalue",
        "eigenvalues are of one rank's micro-batches", "runtime/eigenvalue.py, up to 0.18",
    ),
    Sum(
        "compression_training",
        "its schedule counts the steps of a round, and activations are scaled by one rank's tokens",
        "compression/scheduler.py, up to 0.18",
    ),
    Sum(
        "progressive_layer_drop",
        "the first step behind a change would keep all layers",
        "runtime/progressive_layer_drop.py, up to 0.18",
    ),
)  # fmt: skip
"""Checked: sums over the tokens of a rank, micro-batch or group, releases 0.16 to 0.19.8.
docs/deepspeed.md has the same rows."""


@dataclass(frozen=True, slots=True)
class FoundConfig:
    """A DeepSpeed configuration from a command line; ``name`` is for errors."""

    name: str
    content: Mapping[str, Any]

    @property
    def block(self) -> Mapping[str, Any] | None:
        """The elastic configuration; None: absent. ``UsageError``: it is not an object."""
        block = self.content.get(BLOCK)
        if block is not None and not isinstance(block, dict):
            raise UsageError(
                f'{self.name}: "{BLOCK}" = {block!r} is not an object of sections; write '
                f'"{BLOCK}": {{}} for the defaults.'
            )
        return block


@dataclass(frozen=True, slots=True)
class StatedBatch:
    """Batch sizes of a configuration, in samples, and accumulation in steps; None: not stated.

    ``train`` is the global batch; ``micro`` is per forward pass and replica. ``"auto"``, for
    Trainer to fill in, counts as not stated.
    """

    train: int | None
    micro: int | None
    accumulation: int | None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "StatedBatch":
        """Read a configuration. ``UsageError``: a size is no whole number of 1 or more."""
        return cls(*(_size(config, key) for key in (TRAIN, MICRO, ACCUMULATION)))

    def resolved(self, dp: int) -> tuple[int, int] | None:
        """Return global batch and micro-batch as DeepSpeed takes them on ``dp`` replicas.

        A stated global batch has priority over the product of the others. None: neither is stated.
        """
        if self.train is None and self.micro is None:
            return None
        steps = self.accumulation or 1
        if self.train is None:
            assert self.micro is not None
            return self.micro * steps * dp, self.micro
        return self.train, self.micro or max(1, self.train // (dp * steps))


def stage_of(config: Mapping[str, Any]) -> int:
    """Return the ZeRO stage of a configuration; the old form ``true`` is stage 1.

    Source: ``get_zero_config`` of deepspeed/runtime/config.py.

    Raises:
        UsageError: Unknown stage.
    """
    section = config.get(ZERO)
    if section is None or isinstance(section, bool):
        return int(bool(section))
    if not isinstance(section, Mapping):
        raise UsageError(f"{ZERO} = {section!r}; expected an object such as {{{STAGE!r}: 1}}.")
    stage = section.get(STAGE, 0)
    if stage == "auto":  # as if not stated
        return 0
    if isinstance(stage, bool) or stage not in range(STAGE_COUNT):
        raise UsageError(f"{ZERO}.{STAGE} = {stage!r}; expected 0, 1, 2 or 3.")
    return int(stage)


def autotp_size(config: Mapping[str, Any]) -> int:
    """Return the configured AutoTP size; 1: none.

    Raises:
        UsageError: No number.
    """
    section = config.get(AUTOTP) or {}
    size = (section.get(AUTOTP_SIZE) or 1) if isinstance(section, Mapping) else section
    if isinstance(size, bool) or not isinstance(size, int):
        raise UsageError(f"{AUTOTP}.{AUTOTP_SIZE} = {size!r}; expected a number of ranks.")
    return size


def refuse_fixed(config: Mapping[str, Any]) -> None:
    """Check that a configuration lets the job change its ranks and train the same there (``SUMS``).

    Raises:
        RefusedError: Names all faults.
    """
    faults = []
    size = config.get(SEQUENCE_PARALLEL) or 1
    if size != 1:
        faults.append(
            f"{SEQUENCE_PARALLEL} = {size} (Ulysses): the ranks that share a sequence would change "
            "with the others. Leave it out"
        )
    faults += [f"{each.named}: {each.why}. Leave it out" for each in SUMS if each.is_in(config)]
    if faults:
        raise RefusedError(
            f"DeepSpeed's configuration cannot be elastic: {'; '.join(faults)}, or run without "
            "--elastic."
        )


def step_samples(config: Mapping[str, Any]) -> int | None:
    """Return the samples of an optimizer step by the stated global batch; None: not stated.

    With AutoTP, without an ``mpu``, DeepSpeed counts tensor-parallel ranks as replicas, though they
    train on the same samples (``DeepSpeedConfig.__init__``).

    Raises:
        UsageError: The size is no multiple of the AutoTP size.
    """
    train, tp = StatedBatch.of(config).train, autotp_size(config)
    if train is not None and train % tp:
        raise UsageError(f"{TRAIN} = {train} is not a multiple of {AUTOTP_SIZE} = {tp}.")
    return None if train is None else train // tp


def find_config(script_args: Sequence[str]) -> FoundConfig | None:
    """Return the DeepSpeed configuration among a script's arguments; None: there is none.

    Candidates: the value of a DeepSpeed flag, a path or base64; any ``.json`` file with the block.
    One with the block comes first.

    Raises:
        UsageError: Two have a block; or a file with a block, or behind a DeepSpeed flag, is
            unreadable.
    """
    found = {config.name: config for config in _candidates(script_args)}
    blocks = [config for config in found.values() if BLOCK in config.content]
    if len(blocks) > 1:
        raise UsageError(
            f'{blocks[0].name} and {blocks[1].name} both have a "{BLOCK}" block; keep one.'
        )
    return next(iter([*blocks, *found.values()]), None)


def json_config(text: str, name: str) -> FoundConfig | None:
    """Return the configuration of a JSON text, with or without comments; None: other text.

    Raises:
        UsageError: It is no object, or has no block.
    """
    if not text.lstrip().startswith(("{", "//", "/*")):
        return None
    content = _parsed(text, name)
    if BLOCK not in content:
        raise UsageError(f'{name} is JSON without a "{BLOCK}" block; add one, or name a TOML file.')
    return FoundConfig(name, content)


def stated_stages(script_args: Sequence[str]) -> int | None:
    """Return the pipeline stages by a script's own flags; None: not stated."""
    values = [*script_args, ""]
    for place, argument in enumerate(script_args):
        name, equals, value = argument.partition("=")
        value = value if equals else values[place + 1]
        if name.lstrip("-").replace("_", "-") in STAGE_FLAGS and value.isdecimal():
            return int(value) or None
    return None


def read_config(source: str) -> dict[str, Any] | None:
    """Read a configuration from a path or base64, as DeepSpeed does; None: neither.

    Raises:
        UsageError: It is no JSON object.
    """
    try:
        text = Path(source).read_text() if Path(source).is_file() else _decoded(source)
    except (OSError, UnicodeDecodeError, ValueError, binascii.Error):
        return None
    return _parsed(text, source)


def _candidates(script_args: Sequence[str]) -> Iterator[FoundConfig]:
    flag = ""
    for argument in script_args:
        name, equals, value = argument.partition("=")
        is_flag = argument.startswith("--")
        if is_flag and not equals:
            flag = argument
            continue
        source, given = (value, name) if is_flag else (argument, flag)
        flag = ""
        if given in FLAGS:
            config = read_config(source)
            # ``--deepspeed`` is a switch in some scripts, so any argument may follow it.
            if config is None and given.endswith("config") and source.endswith(".json"):
                raise UsageError(f"{given} {source}: there is no file of that name to be read.")
        elif source.endswith(".json") and Path(source).is_file():
            config = _of_any_json(source)
        else:
            continue
        if config is not None:
            yield FoundConfig(source if len(source) < 200 else f"{given} (base64)", config)


def _of_any_json(path: str) -> dict[str, Any] | None:
    try:
        text = Path(path).read_text()
        return config if BLOCK in (config := _parsed(text, path)) else None
    except (OSError, UnicodeDecodeError, UsageError):
        return None


def _decoded(source: str) -> str:
    return base64.urlsafe_b64decode(source).decode()


def _parsed(text: str, name: str) -> dict[str, Any]:
    """Return a text's object, in JSON or, as in DeepSpeed, Hjson."""
    parsers = [json.loads]
    if importlib.util.find_spec("hjson") is not None:
        parsers.append(importlib.import_module("hjson").loads)
    for parse in parsers:
        try:
            content = parse(text)
        except ValueError:
            continue
        if isinstance(content, dict):
            # Hjson returns ordered dictionaries; plain ones can be sent to other processes.
            plain: dict[str, Any] = json.loads(json.dumps(content))
            return plain
    raise UsageError(f"{name} is not a JSON object; DeepSpeed needs one.")


def _size(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is None or value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{key} = {value!r} is not a whole number of 1 or more.")
    return value
