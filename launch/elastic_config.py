"""The elastic configuration: one frozen tree, read from TOML, JSON and flags, checked when built.

Precedence: flag > file > default. In a DeepSpeed configuration the same sections are objects in its
block ``"scalai"``. What a person writes::

    [degrees]                # what to take on how many ranks; wins over every rule
    default = "tp2 pp1"      # first start, where no entry speaks and the script's flags say nothing
    4 = "tp2 pp1"            # on 4 ranks
    "2->4" = "tp2 pp2"       # on 4 ranks, coming from 2 in use: more specific than "4"
    8 = ["tp2 pp2", "tp4"]   # candidates: the next one after an out-of-memory in the first step
    6 = { tp = 3, pp = 1, micro_batch_size = 1 }

    [model]                  # limits that cannot be read from the script's flags; all optional
    [store]                  # where generations lie
    [resize]                 # when and to what
    [probe]                  # how many devices of this host work
    [deepspeed]              # what DeepSpeed's own configuration cannot say of an elastic job

A key names the change where the world alone does not decide. Entries taken in order of use would
need a memory that a restarted coordinator has lost, and would mean another thing after each
failure.
"""

import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from scalai.core.choice import DegreePolicy, Rule
from scalai.core.degrees import ModelLimits, Wish, parse_wish
from scalai.core.errors import UsageError

BUILD_AHEAD = ("auto", "always", "never")
PROBE_KINDS = ("nvidia-smi", "command", "file", "none")
DATA_ORDERS = ("loader", "own")


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The Tensor Store of a host.

    Attributes:
        dir: Folder of the stores in memory; None: below /dev/shm.
        budget_gb: Upper bound of what generations may take, in 10^9 bytes; None: what is free
        there. snapshot_every: Steps between generations without a change; 0: only at the start and
        at changes. durable_dir: Folder on disk for the generation that the last host leaves; None:
        none.
    """

    dir: str | None = None
    budget_gb: float | None = None
    snapshot_every: int = 0
    durable_dir: str | None = None

    def __post_init__(self) -> None:
        _expect(self.budget_gb is None or self.budget_gb > 0, "budget_gb", self.budget_gb, "> 0")
        _expect(self.snapshot_every >= 0, "snapshot_every", self.snapshot_every, "0 or more steps")


@dataclass(frozen=True, slots=True)
class ResizeConfig:
    """When a change becomes a resize.

    Attributes:
        settle_s: Joins within this time are one change.
        drain_timeout_s: How long a leaving host serves its shards at most.
        allowed_sizes: World sizes that may be used, ascending; empty: any.
        min_model_parallel: Smallest TP·PP that memory is known to hold; None: the present one.
        build_ahead: Whether the next round's workers build their models while the present ones
        train on: ``auto`` where host memory holds both, ``always``, ``never``.
        build_timeout_s: How long the training goes on for that, at most, before the change.
    """

    settle_s: float = 2.0
    drain_timeout_s: float = 120.0
    allowed_sizes: tuple[int, ...] = ()
    min_model_parallel: int | None = None
    build_ahead: str = "auto"
    build_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        policies = "one of " + ", ".join(BUILD_AHEAD)
        _expect(self.build_ahead in BUILD_AHEAD, "build_ahead", self.build_ahead, policies)
        _expect(self.build_timeout_s > 0, "build_timeout_s", self.build_timeout_s, "> 0 seconds")
        _expect(self.settle_s >= 0, "settle_s", self.settle_s, "0 or more seconds")
        _expect(self.drain_timeout_s > 0, "drain_timeout_s", self.drain_timeout_s, "> 0 seconds")
        sizes = self.allowed_sizes
        is_ascending = all(1 <= size for size in sizes) and list(sizes) == sorted(set(sizes))
        _expect(is_ascending, "allowed_sizes", list(sizes), "world sizes of 1 or more, ascending")
        least = self.min_model_parallel
        _expect(least is None or least >= 1, "min_model_parallel", least, "1 or more")


@dataclass(frozen=True, slots=True)
class ProbeConfig:
    """How the number of working devices of a host is asked for.

    Attributes:
        kind: ``nvidia-smi``, ``command`` (prints a number), ``file`` (holds one) or ``none``.
        command: The command line of kind ``command``.
        file: The path of kind ``file``.
        interval_s: Seconds between two questions.
    """

    kind: str = "nvidia-smi"
    command: str | None = None
    file: str | None = None
    interval_s: float = 5.0

    def __post_init__(self) -> None:
        _expect(self.kind in PROBE_KINDS, "kind", self.kind, "one of " + ", ".join(PROBE_KINDS))
        _expect(self.interval_s > 0, "interval_s", self.interval_s, "> 0 seconds")
        for kind, value in (("command", self.command), ("file", self.file)):
            if (self.kind == kind) != (value is not None):
                raise UsageError(
                    f"kind = {self.kind!r} with {kind} = {value!r}: "
                    f"{kind} belongs to kind = {kind!r}, which needs it."
                )


@dataclass(frozen=True, slots=True)
class DeepSpeedConfig:
    """What DeepSpeed's own configuration cannot say of an elastic job.

    Attributes:
        zero_stage: ZeRO stage by world size, as text, or by ``default``; where neither is there,
        the stage of DeepSpeed's own configuration.
        data_order: Who keeps the order of samples over a change: ``loader``, torch's or DeepSpeed's
        under our hooks; ``own``: the script, by ``scalai.elastic().consumed_samples``.
    """

    zero_stage: Mapping[str, int] = field(default_factory=dict)
    data_order: str = "loader"

    def __post_init__(self) -> None:
        for key, stage in self.zero_stage.items():
            is_world = key == "default" or (key.isdecimal() and int(key) > 0)
            _expect(is_world, "zero_stage", key, "a number of ranks or default")
            _expect(0 <= stage <= 3, f"zero_stage.{key}", stage, "0, 1, 2 or 3")
        orders = "one of " + ", ".join(DATA_ORDERS)
        _expect(self.data_order in DATA_ORDERS, "data_order", self.data_order, orders)

    def stage_on(self, world_size: int) -> int | None:
        """Return the ZeRO stage on so many ranks; None: that of DeepSpeed's configuration."""
        return self.zero_stage.get(str(world_size), self.zero_stage.get("default"))


@dataclass(frozen=True, slots=True)
class ElasticConfig:
    """Everything that a person can say about an elastic job beside the launcher's own flags."""

    degrees: tuple[Rule, ...] = ()
    default_degrees: Wish | None = None
    model: ModelLimits = field(default_factory=ModelLimits)
    store: StoreConfig = field(default_factory=StoreConfig)
    resize: ResizeConfig = field(default_factory=ResizeConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    origin: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Where a value comes from, by its dotted name: ``flag`` or ``file``; absent: the default."""

    def policy(self, initial: Wish | None = None) -> DegreePolicy:
        """Return what the planner of degrees asks for.

        Args:
            initial: Degrees of the script's command line; they win over ``default``.
        """
        return DegreePolicy(
            self.degrees,
            initial or self.default_degrees,
            self.resize.allowed_sizes,
            self.resize.min_model_parallel,
        )

    def describe(self) -> str:
        """Return what the launcher prints: one ``name = value  (origin)`` a line."""
        lines = [
            (f'degrees."{rule.key}"', ", then ".join(map(str, rule.wishes)))
            for rule in self.degrees
        ]
        if self.default_degrees is not None:
            lines.append(("degrees.default", str(self.default_degrees)))
        for section in ("model", "store", "resize", "probe", "deepspeed"):
            part = getattr(self, section)
            for item in fields(part):
                value = getattr(part, item.name)
                # What nobody stated here says nothing; the other sections are shown whole.
                is_quiet = section in ("model", "deepspeed")
                if not is_quiet or f"{section}.{item.name}" in self.origin:
                    shown = list(value) if isinstance(value, tuple) else value
                    lines.append(
                        (f"{section}.{item.name}", "none" if shown is None else str(shown))
                    )
        return "\n".join(
            f"{name} = {value}  ({self.origin.get(name, 'default')})" for name, value in lines
        )


SECTIONS = ("degrees", "model", "store", "resize", "probe", "deepspeed")


DERIVED_LIMITS = ("fixed", "min_pp_with_vpp", "min_tp", "min_tp_reason")
"""Limits that follow from a script's flags and that nobody states in a file."""


def load_config(path: str | None, overrides: Mapping[str, object] | None = None) -> ElasticConfig:
    """Return what the TOML file at ``path`` (None: only defaults) and the flags say."""
    return parse_config(None if path is None else read_text(path), path or "flags", overrides)


def read_text(path: str) -> str:
    """Return the file that ``--elastic`` names, else raise ``UsageError``."""
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(
            f"--elastic {path}: {why}. Examples lie in the folder configs/."
        ) from error


def parse_config(
    text: str | None, name: str, overrides: Mapping[str, object] | None = None
) -> ElasticConfig:
    """Read a configuration and lay ``overrides`` over it.

    Args:
        text: TOML, or a JSON object; None: only defaults.
        name: What errors call it.
        overrides: Values of flags by dotted name, such as ``{"store.dir": "/dev/shm/mine"}``.

    Raises:
        UsageError: A key is unknown or a value is not what it should be. The message names the
            file, the key and what was expected.
    """
    is_json = (text or "").lstrip().startswith("{")  # no TOML document begins so
    try:
        document = json.loads(text or "") if is_json else tomllib.loads(text or "")
    except ValueError as error:
        raise UsageError(f"{name} is not {'JSON' if is_json else 'TOML'}: {error}.") from error
    try:
        return _build(document, overrides or {})
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from error


def _build(document: Mapping[str, object], overrides: Mapping[str, object]) -> ElasticConfig:
    tables: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    origin: dict[str, str] = {}
    for section, table in document.items():
        _known(section, SECTIONS, "the file")
        if not isinstance(table, dict):
            raise UsageError(f"{section} = {table!r} is not a section; write [{section}].")
        tables[section].update(table)
        for key in table:
            origin[f'degrees."{key}"' if _is_world(section, key) else f"{section}.{key}"] = "file"
    for dotted, value in overrides.items():
        section, key = dotted.split(".", 1)
        tables[section][key] = value
        origin[dotted] = "flag"
    _drop_other_probe_values(tables["probe"], overrides)
    rules, default = _read_degrees(tables["degrees"])
    return ElasticConfig(
        rules,
        default,
        _read_section(ModelLimits, tables["model"], "model"),
        _read_section(StoreConfig, tables["store"], "store"),
        _read_section(ResizeConfig, tables["resize"], "resize"),
        _read_section(ProbeConfig, tables["probe"], "probe"),
        _read_section(DeepSpeedConfig, tables["deepspeed"], "deepspeed"),
        origin,
    )


def _is_world(section: str, key: str) -> bool:
    return section == "degrees" and key != "default"


def _drop_other_probe_values(table: dict[str, Any], overrides: Mapping[str, object]) -> None:
    """A flag that chooses another probe also puts aside what the file's probe needs."""
    if "probe.kind" in overrides:
        for key in ("command", "file"):
            if f"probe.{key}" not in overrides:
                table.pop(key, None)


def _read_degrees(table: Mapping[str, object]) -> tuple[tuple[Rule, ...], Wish | None]:
    rules, default = [], None
    for key, value in table.items():
        try:
            if key == "default":
                default = parse_wish(value)
                continue
            came, arrow, world = (part.strip() for part in key.rpartition("->"))
            sizes = (came, world) if arrow else (world,)
            if not all(size.isdecimal() and int(size) > 0 for size in sizes):
                raise UsageError(
                    'the key is neither a number of ranks (4), a change ("2->4") nor default'
                )
            wishes = tuple(map(parse_wish, value if isinstance(value, list) else [value]))
            if not wishes:
                raise UsageError("the list of candidates is empty")
        except UsageError as error:
            raise UsageError(f"[degrees] {key} = {value!r}: {error}") from error
        rules.append(Rule(int(world), wishes, int(came) if arrow else None))
    return tuple(rules), default


Section = TypeVar("Section")


def _read_section(cls: type[Section], table: Mapping[str, Any], name: str) -> Section:
    hints = {key: hint for key, hint in get_type_hints(cls).items() if key not in DERIVED_LIMITS}
    values: dict[str, Any] = {}
    for key, value in table.items():
        _known(key, tuple(hints), f"[{name}]")
        values[key] = _typed(value, hints[key], f"[{name}] {key}")
    try:
        return cls(**values)
    except UsageError as error:
        raise UsageError(f"[{name}] {error}") from error


def _typed(value: Any, hint: Any, where: str) -> Any:
    """Return ``value`` as the annotated type, where TOML has no such type."""
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    for option in options:
        if get_origin(option) is tuple and isinstance(value, list | tuple):
            return tuple(_typed(item, get_args(option)[0], where) for item in value)
        if get_origin(option) is Mapping and isinstance(value, dict):
            of = get_args(option)[1]
            return {key: _typed(item, of, f"{where}.{key}") for key, item in value.items()}
        if option is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(option, type) and type(value) is option:
            return value
    names = " or ".join(_type_name(option) for option in options if option is not type(None))
    raise UsageError(f"{where} = {value!r} is not {names}.")


def _type_name(option: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return names.get(option, "a list")


def _known(key: str, known: tuple[str, ...], where: str) -> None:
    if key in known:
        return
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
    raise UsageError(f"{where} has an unknown key {key!r}; {hint}")


def _expect(is_met: bool, name: str, found: object, expected: str) -> None:
    if not is_met:
        raise UsageError(f"{name} = {found!r}; expected {expected}.")
