"""An elastic configuration, read from TOML, JSON and flags.

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
    [preemption]             # who tells this host that it will be taken away
    [planner]                # who chooses degrees where no entry of [degrees] speaks
    [deepspeed]              # what DeepSpeed's own configuration cannot say of an elastic job
    [dataset]                # what ``scalai mount`` shows beside the state

A key names the change where the world alone does not decide. Entries taken in order of use would
need a memory that a restarted coordinator has lost, and would mean another thing after each
failure.
"""

import difflib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from scalai.core.dataset.table import DatasetTable
from scalai.core.degrees.degrees import DegreeRequest, ModelLimits, parse_request
from scalai.core.degrees.policy import Rule
from scalai.core.errors import UsageError
from scalai.launch.config.elastic_config import (
    DeepSpeedConfig,
    ElasticConfig,
    PlannerConfig,
    PreemptionConfig,
    ProbeConfig,
    ResizeConfig,
    StoreConfig,
)
from scalai.launch.config.removed import REMOVED, refusal

SECTIONS = (
    "degrees", "model", "store", "resize", "probe", "preemption", "planner", "deepspeed", "dataset",
)  # fmt: skip

DERIVED_LIMITS = (
    "fixed", "min_pp_with_vpp", "min_tp", "min_tp_reason",
    "sharding", "is_in_stages", "most_pp", "no_tp_in_stages",
)  # fmt: skip
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
        _read_section(PreemptionConfig, tables["preemption"], "preemption"),
        _read_section(PlannerConfig, tables["planner"], "planner"),
        _read_section(DeepSpeedConfig, tables["deepspeed"], "deepspeed"),
        _read_section(DatasetTable, tables["dataset"], "dataset").checked(),
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


def _read_degrees(table: Mapping[str, object]) -> tuple[tuple[Rule, ...], DegreeRequest | None]:
    rules, default = [], None
    for key, value in table.items():
        try:
            if key == "default":
                default = parse_request(value)
                continue
            came, arrow, world = (part.strip() for part in key.rpartition("->"))
            sizes = (came, world) if arrow else (world,)
            if not all(size.isdecimal() and int(size) > 0 for size in sizes):
                raise UsageError(
                    'the key is neither a number of ranks (4), a change ("2->4") nor default'
                )
            requests = tuple(map(parse_request, value if isinstance(value, list) else [value]))
            if not requests:
                raise UsageError("the list of candidates is empty")
        except UsageError as error:
            raise UsageError(f"[degrees] {key} = {value!r}: {error}") from error
        rules.append(Rule(int(world), requests, int(came) if arrow else None))
    return tuple(rules), default


Section = TypeVar("Section")


def _read_section(cls: type[Section], table: Mapping[str, Any], name: str) -> Section:
    hints = {key: hint for key, hint in get_type_hints(cls).items() if key not in DERIVED_LIMITS}
    values: dict[str, Any] = {}
    for key, value in table.items():
        if f"{name}.{key}" in REMOVED:
            raise refusal(f"{name}.{key}", f"[{name}] {key}")
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
    return names.get(option, "a table" if get_origin(option) is Mapping else "a list")


def _known(key: str, known: tuple[str, ...], where: str) -> None:
    if key in known:
        return
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
    raise UsageError(f"{where} has an unknown key {key!r}; {hint}")
