"""The elastic configuration: one frozen tree, read from TOML, JSON and flags, checked when built.

Precedence: flag > file > default. In a DeepSpeed configuration the same sections are objects in its
block ``"scalai"``::

    [degrees]                # degrees by number of ranks; they win over every rule
    default = "tp2 pp1"      # first start, without an entry of its own or flags of the script
    4 = "tp2 pp1"            # on 4 ranks
    "2->4" = "tp2 pp2"       # on 4 ranks, coming from 2 in use: more specific than "4"
    8 = ["tp2 pp2", "tp4"]   # candidates: the next one after an out-of-memory in the first step
    6 = { tp = 3, pp = 1, micro_batch_size = 1 }

    [model]                  # limits beside the script's flags; all optional
    [store]                  # generations: place, size, frequency
    [resize]                 # changes: when, and to what
    [probe]                  # devices of this host
    [preemption]             # sources of preemption notices
    [planner]                # choice of degrees without an entry of [degrees]
    [deepspeed]              # facts missing in DeepSpeed's own configuration
    [dataset]                # data sets that ``scalai mount`` shows beside the state

Entries of [degrees] are keyed by change, not by order of use: an order of use would need a memory
that a restarted coordinator has lost.
"""

import difflib
import json
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from scalai.core.dataset.table import DatasetTable, expect
from scalai.core.degrees.degrees import DegreeRequest, ModelLimits, parse_request
from scalai.core.degrees.passes import MEMORY_PARTS, RECOMPUTES, SPEED_PARTS
from scalai.core.degrees.policy import DegreePolicy, Preferring, Rule
from scalai.core.errors import UsageError
from scalai.core.host.standby import POLICIES as STANDBY
from scalai.core.job.function_proof import POLICIES
from scalai.core.job.spacing import MOST_STEPS
from scalai.launch.config.constants import CONSTANTS, ignored
from scalai.launch.config.removed import REMOVED, refusal

SECTIONS = (
    "degrees", "model", "store", "resize", "probe", "preemption", "planner", "deepspeed", "dataset",
)  # fmt: skip
DERIVED_LIMITS = (
    "fixed", "min_pp_with_vpp", "min_tp", "min_tp_reason",
    "sharding", "is_in_stages", "most_pp", "no_tp_in_stages",
    "has_uneven_shares", "has_uneven_stages", "own_stages",
)  # fmt: skip
"""Limits that follow from a script's flags; no file states them."""
PROBE_KINDS = ("nvidia-smi", "command", "file", "none")
DATA_ORDERS = ("loader", "own")
PLANNERS = ("auto", "keep", "cost")
EVEN, MEASURED = SHARES = ("even", "measured")
AUTO = "auto"
"""Value of ``snapshot_every``: the job chooses."""
METADATA = "http://169.254.169.254"
"""Address of the metadata server of AWS, GCP and Azure."""
CLOUDS = ("aws", "gcp", "azure")
_EXPECTED = (
    "signal, slurm, file:PATH, aws, gcp or azure (the last three also with @http://HOST:PORT)"
)


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The Tensor Store of a host.

    Attributes:
        dir: Folder of the stores in memory; None: below /dev/shm.
        budget_gb: Most bytes of all generations, in 10^9; None: the free space there.
        snapshot_every: Steps between generations without a change; 0: only at the start and at
            changes; ``auto``: the number that loses the least time, by the measured cost of one.
        replicas: Number of other hosts that keep a copy of a host's own share.
        emergency: Whether workers that outlive a failure write the state between two updates, so
            that the job loses no step.
        durable_dir: Folder on disk for generations that outlive all hosts; None: none.
        durable_every_s: Least seconds between generations there while the job trains; 0: only the
            generation of the last host.
    """

    dir: str | None = None
    budget_gb: float | None = None
    snapshot_every: int | str = AUTO
    replicas: int = 1
    emergency: bool = True
    durable_dir: str | None = None
    durable_every_s: float = 1800.0

    def __post_init__(self) -> None:
        expect(self.budget_gb is None or self.budget_gb > 0, "budget_gb", self.budget_gb, "> 0")
        every = self.snapshot_every
        is_every = every == AUTO if isinstance(every, str) else 0 <= every <= MOST_STEPS
        steps = f"0 to {MOST_STEPS} steps, or {AUTO!r}"
        expect(is_every, "snapshot_every", every, steps)
        expect(self.replicas >= 0, "replicas", self.replicas, "0 or more")
        every_s = self.durable_every_s
        expect(every_s >= 0, "durable_every_s", every_s, "0 or more seconds")


@dataclass(frozen=True, slots=True)
class ResizeConfig:
    """When a change becomes a resize.

    Attributes:
        settle_s: Seconds after a host joins before the change, so that several joins are one.
        drain_timeout_s: Most seconds between SIGTERM and exit of a leaving host; also until workers
            reach an agreed stop, else it is withdrawn, and until a hanging snapshot ends them.
        allowed_sizes: World sizes in use, ascending; empty: any.
        min_model_parallel: Smallest TP·PP known to fit into memory; None: the present one.
        standby: Whether the next round's workers build their models while the present ones train:
            ``auto`` where memory holds both, else up to the ``brink``; ``always``, ``brink``,
            ``never`` (``core.host.standby``).
        coordinator_timeout_s: Seconds that workers train on without the coordinator.
        start_timeout_s: Seconds without progress of a starting round before it is given up.
        hang_s: Seconds without a step of any worker before the round starts again, while the usual
            time of a step is unknown, and at most; three times the longest pause so far is always
            allowed. 0: no limit.
        silent_s: Seconds of silence before an agent's host counts as lost, if others can go on.
        prove_function: Whether the first step behind a change is compared with the old workers':
            ``auto`` at the first change to each layout, ``always``, ``never``.
    """

    settle_s: float = 2.0
    drain_timeout_s: float = 120.0
    allowed_sizes: tuple[int, ...] = ()
    min_model_parallel: int | None = None
    standby: str = "auto"
    coordinator_timeout_s: float = 600.0
    start_timeout_s: float = 1800.0
    hang_s: float = 1800.0
    silent_s: float = 15.0
    prove_function: str = "auto"

    def __post_init__(self) -> None:
        policies = "one of " + ", ".join(POLICIES)
        expect(self.prove_function in POLICIES, "prove_function", self.prove_function, policies)
        policies = "one of " + ", ".join(STANDBY)
        expect(self.standby in STANDBY, "standby", self.standby, policies)
        for name in ("coordinator_timeout_s", "start_timeout_s", "drain_timeout_s"):
            expect(getattr(self, name) > 0, name, getattr(self, name), "> 0 seconds")
        expect(self.hang_s >= 0, "hang_s", self.hang_s, "0 or more seconds")
        expect(self.silent_s >= 3, "silent_s", self.silent_s, "3 or more seconds")
        expect(self.settle_s >= 0, "settle_s", self.settle_s, "0 or more seconds")
        sizes = self.allowed_sizes
        is_ascending = all(1 <= size for size in sizes) and list(sizes) == sorted(set(sizes))
        expect(is_ascending, "allowed_sizes", list(sizes), "world sizes of 1 or more, ascending")
        least = self.min_model_parallel
        expect(least is None or least >= 1, "min_model_parallel", least, "1 or more")


@dataclass(frozen=True, slots=True)
class ProbeConfig:
    """How the number of working devices of a host is found.

    Attributes:
        kind: ``nvidia-smi``, ``command`` (prints a number), ``file`` (holds one) or ``none``.
        command: Command line of kind ``command``.
        file: Path of kind ``file``.
        interval_s: Seconds between two questions.
        health_check: Command, as words of a shell but run without one; exit code 0: the host may
            run workers. None: it may.
    """

    kind: str = "nvidia-smi"
    command: str | None = None
    file: str | None = None
    interval_s: float = 5.0
    health_check: str | None = None

    def __post_init__(self) -> None:
        expect(self.kind in PROBE_KINDS, "kind", self.kind, "one of " + ", ".join(PROBE_KINDS))
        expect(self.interval_s > 0, "interval_s", self.interval_s, "> 0 seconds")
        _check_words(self.health_check)
        for kind, value in (("command", self.command), ("file", self.file)):
            if (self.kind == kind) != (value is not None):
                raise UsageError(
                    f"kind = {self.kind!r} with {kind} = {value!r}: "
                    f"{kind} belongs to kind = {kind!r}, which needs it."
                )


@dataclass(frozen=True, slots=True)
class NoticeSource:
    """A source of preemption notices: ``kind`` signal, slurm, file, aws, gcp or azure; ``where``: a
    path, or the address of a metadata server."""

    kind: str
    where: str = ""

    def __str__(self) -> str:
        if self.kind == "file":
            return f"file:{self.where}"
        return self.kind if self.where in ("", METADATA) else f"{self.kind}@{self.where}"


def parse_source(text: str) -> NoticeSource:
    """Read a source as ``--preemption`` names it; raises ``UsageError`` for anything else."""
    if text in ("signal", "slurm"):
        return NoticeSource(text)
    kind, _, path = text.partition(":")
    if kind == "file" and path:
        return NoticeSource("file", path)
    kind, at, address = text.partition("@")
    if kind not in CLOUDS or (at and not _is_address(address)):
        raise UsageError(f"a preemption source {text!r} is none of {_EXPECTED}.")
    return NoticeSource(kind, address.rstrip("/") if at else METADATA)


def _is_address(text: str) -> bool:
    try:
        found = urlsplit(text)
        is_whole = found.scheme == "http" and bool(found.hostname) and (found.port or 80) > 0
    except ValueError:
        return False
    return is_whole and found.path in ("", "/") and not found.query and found.username is None


@dataclass(frozen=True, slots=True)
class PreemptionConfig:
    """Sources of preemption notices: ``signal`` (SIGUSR1), ``slurm``, ``file:PATH``, ``aws``,
    ``gcp``, ``azure``; the last three also with ``@`` and an address."""

    sources: tuple[str, ...] = ("signal",)

    def __post_init__(self) -> None:
        parsed = self.parsed()
        expect(len(set(parsed)) == len(parsed), "sources", list(self.sources), "each once")

    def parsed(self) -> tuple[NoticeSource, ...]:
        return tuple(map(parse_source, self.sources))


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Choice of degrees without an entry of [degrees].

    Attributes:
        kind: ``keep``: the degrees that run; ``cost``: the fastest by the cost model; ``auto``:
            as ``keep`` until steps at two degrees are measured, then as ``cost``.
        gpu: Device, by a name that ``scalai plan`` knows; None: the driver's name.
        model: Sizes of a DeepSpeed job's model, by the names of ``ModelShape``; Megatron-LM's
            flags state them.
        recompute: Recomputation of such a job in its backward pass.
        host_memory_gb: Memory of a host in GB, for state that leaves the devices; None: by the
            hosts of the running job.
        may_change: Choices of the planner for speed beside the degrees: ``micro-batch``,
            ``recompute``, ``virtual-stages``.
        memory_may_change: The same where nothing fits into memory with the script's flags:
            ``recompute``, ``micro-batch``, and where nothing fits with these ``offload``.
        shares: Micro-batches of the replicas: ``even``; ``measured``: slower ones have fewer from
            the next change on, where replicas may make other numbers of passes.
    """

    kind: str = AUTO
    gpu: str | None = None
    model: Mapping[str, int | bool] = field(default_factory=dict)
    recompute: str = "none"
    host_memory_gb: float | None = None
    may_change: tuple[str, ...] = ()
    memory_may_change: tuple[str, ...] = ("recompute", "offload")
    shares: str = EVEN

    def __post_init__(self) -> None:
        _expect_some("may_change", self.may_change, SPEED_PARTS)
        _expect_some("memory_may_change", self.memory_may_change, MEMORY_PARTS)
        expect(self.kind in PLANNERS, "kind", self.kind, "one of " + ", ".join(PLANNERS))
        is_size = self.host_memory_gb is None or self.host_memory_gb > 0
        expect(is_size, "host_memory_gb", self.host_memory_gb, "a number above 0")
        expect(self.shares in SHARES, "shares", self.shares, "one of " + ", ".join(SHARES))
        kinds = "one of " + ", ".join(RECOMPUTES)
        expect(self.recompute in RECOMPUTES, "recompute", self.recompute, kinds)


@dataclass(frozen=True, slots=True)
class DeepSpeedConfig:
    """Facts of an elastic job missing in DeepSpeed's own configuration.

    Attributes:
        zero_stage: ZeRO stage by world size, as text, or by ``default``; else the stage of
            DeepSpeed's own configuration.
        data_order: Owner of the order of samples over a change: ``loader``, torch's or DeepSpeed's
            under our hooks; ``own``: the script, by ``scalai.elastic().consumed_samples``.
        cuts: Name or path of a file with the tensor-parallel cuts of a checkpoint's parameters, as
            ``scalai reshard --cuts``; for ``load_checkpoint``.
    """

    zero_stage: Mapping[str, int] = field(default_factory=dict)
    data_order: str = "loader"
    cuts: str | None = None

    def __post_init__(self) -> None:
        for key, stage in self.zero_stage.items():
            is_world = key == "default" or (key.isdecimal() and int(key) > 0)
            expect(is_world, "zero_stage", key, "a number of ranks or default")
            expect(0 <= stage <= 3, f"zero_stage.{key}", stage, "0, 1, 2 or 3")
        orders = "one of " + ", ".join(DATA_ORDERS)
        expect(self.data_order in DATA_ORDERS, "data_order", self.data_order, orders)

    def stage_on(self, world_size: int) -> int | None:
        """ZeRO stage on so many ranks; None: the stage of DeepSpeed's configuration."""
        return self.zero_stage.get(str(world_size), self.zero_stage.get("default"))


@dataclass(frozen=True, slots=True)
class ElasticConfig:
    """The settings of an elastic job beside the launcher's own flags."""

    degrees: tuple[Rule, ...] = ()
    default_degrees: DegreeRequest | None = None
    model: ModelLimits = field(default_factory=ModelLimits)
    store: StoreConfig = field(default_factory=StoreConfig)
    resize: ResizeConfig = field(default_factory=ResizeConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    preemption: PreemptionConfig = field(default_factory=PreemptionConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    dataset: DatasetTable = field(default_factory=DatasetTable)
    origin: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Origin of a value, by its dotted name: ``flag`` or ``file``; absent: the default."""
    ignored: tuple[str, ...] = field(default=(), compare=False)
    """Warnings about removed keys of the file."""

    def policy(
        self, initial: DegreeRequest | None = None, preference: Preferring | None = None
    ) -> DegreePolicy:
        """The rules of the choice of degrees.

        Args:
            initial: Degrees of the script's command line; they win over ``default``.
            preference: The job's planner; None: the degrees that run are kept.
        """
        return DegreePolicy(
            self.degrees,
            initial or self.default_degrees,
            self.resize.allowed_sizes,
            self.resize.min_model_parallel,
            preference,
        )

    def describe(self) -> str:
        """The launcher's output: one ``name = value  (origin)`` a line."""
        lines = [
            (f'degrees."{rule.key}"', ", then ".join(map(str, rule.requests)))
            for rule in self.degrees
        ]
        if self.default_degrees is not None:
            lines.append(("degrees.default", str(self.default_degrees)))
        loud = ("store", "resize", "probe")
        for section in ("model", *loud, "preemption", "planner", "deepspeed", "dataset"):
            part = getattr(self, section)
            for item in fields(part):
                value = getattr(part, item.name)
                # Defaults of quiet sections say nothing; the other sections are shown whole.
                if section in loud or f"{section}.{item.name}" in self.origin:
                    shown = list(value) if isinstance(value, tuple) else value
                    lines.append(
                        (f"{section}.{item.name}", "none" if shown is None else str(shown))
                    )
        return "\n".join(
            f"{name} = {value}  ({self.origin.get(name, 'default')})" for name, value in lines
        )


def load_config(path: str | None, overrides: Mapping[str, object] | None = None) -> ElasticConfig:
    """Read the TOML file at ``path`` (None: only defaults) and the flags."""
    return parse_config(None if path is None else read_text(path), path or "flags", overrides)


def read_text(path: str) -> str:
    """The text of the file of ``--elastic``; raises ``UsageError``."""
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
        name: Name of the configuration in errors.
        overrides: Values of flags by dotted name, such as ``{"store.dir": "/dev/shm/mine"}``.

    Raises:
        UsageError: Unknown key, or wrong value. The message names the file, the key and the
            expected value.
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
    warnings = [
        ignored(f"{section}.{key}", table.pop(key))
        for section, table in tables.items()
        for key in list(table)
        if f"{section}.{key}" in CONSTANTS
    ]
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
        tuple(warnings),
    )


def _is_world(section: str, key: str) -> bool:
    return section == "degrees" and key != "default"


def _drop_other_probe_values(table: dict[str, Any], overrides: Mapping[str, object]) -> None:
    """Drop the file's command or file of a probe that a flag replaces by another one."""
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
    """``value`` as the annotated type; TOML has fewer types."""
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


def _check_words(command: str | None) -> None:
    """Raise ``UsageError`` unless a health check is a command."""
    try:
        is_command = command is None or bool(shlex.split(command))
    except ValueError:  # a quotation has no end
        is_command = False
    expect(is_command, "health_check", command, "a command, such as '/opt/check --quick'")


def _expect_some(name: str, found: tuple[str, ...], known: tuple[str, ...]) -> None:
    expect(set(found) <= set(known), name, list(found), f"some of {', '.join(known)}")
