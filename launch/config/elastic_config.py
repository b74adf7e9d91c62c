"""The elastic configuration: one frozen tree, checked when built. ``elastic_file`` reads it."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf

from scalai.core.dataset.table import DatasetTable
from scalai.core.degrees.degrees import DegreeRequest, ModelLimits
from scalai.core.degrees.passes import MEMORY_PARTS, PARTS, RECOMPUTES
from scalai.core.degrees.policy import DegreePolicy, Preferring, Rule
from scalai.core.errors import UsageError
from scalai.core.job.function_proof import POLICIES
from scalai.core.job.spacing import MOST_STEPS, MTBF_HOURS
from scalai.core.planner.devices import FIGURES
from scalai.core.planner.weighing import RESIDENCE_S
from scalai.launch.config.notice_source import NoticeSource, parse_source

STANDBY = ("auto", "always", "never")
PROBE_KINDS = ("nvidia-smi", "command", "file", "none")
DATA_ORDERS = ("loader", "own")
PLANNERS = ("auto", "keep", "cost")
AUTO = "auto"
"""For ``snapshot_every``: the job chooses."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The Tensor Store of a host.

    Attributes:
        dir: Folder of the stores in memory; None: below /dev/shm.
        budget_gb: Upper bound of what generations may take, in 10^9 bytes; None: what is free
            there.
        snapshot_every: Steps between generations without a change; 0: only at the start and at
            changes; ``auto``: as many as lose the least time, by what one is measured to cost.
        mtbf_hours_per_worker: How long a worker is taken to train between two failures, for
            ``auto``.
        async_snapshots: Whether those are written while the training goes on; else it stands still.
        replicas: On how many other hosts to keep what would be lost with a host.
        replica_slowdown: By what part of its time a step may take longer while replicas are made;
            1: they are made as fast as they can.
        emergency: Whether workers that outlive a failure write the state that stands between two
            updates, so that the job goes on from there.
        durable_dir: Folder on disk for generations that outlive all hosts; None: none.
        durable_every_s: Seconds between generations that come there while the job trains, at least;
            0: only what the last host leaves.
        durable_keep: How many of them stay there.
    """

    dir: str | None = None
    budget_gb: float | None = None
    snapshot_every: int | str = AUTO
    mtbf_hours_per_worker: float = MTBF_HOURS
    async_snapshots: bool = True
    replicas: int = 1
    replica_slowdown: float = 0.01
    emergency: bool = True
    durable_dir: str | None = None
    durable_every_s: float = 1800.0
    durable_keep: int = 2

    def __post_init__(self) -> None:
        _expect(self.budget_gb is None or self.budget_gb > 0, "budget_gb", self.budget_gb, "> 0")
        every, hours = self.snapshot_every, self.mtbf_hours_per_worker
        is_every = every == AUTO if isinstance(every, str) else 0 <= every <= MOST_STEPS
        steps = f"0 to {MOST_STEPS} steps, or {AUTO!r}"
        _expect(is_every, "snapshot_every", every, steps)
        _expect(0 < hours < inf, "mtbf_hours_per_worker", hours, "> 0 hours")
        _expect(self.replicas >= 0, "replicas", self.replicas, "0 or more")
        slowdown = self.replica_slowdown
        _expect(0 < slowdown <= 1, "replica_slowdown", slowdown, "more than 0, at most 1")
        every_s = self.durable_every_s
        _expect(every_s >= 0, "durable_every_s", every_s, "0 or more seconds")
        _expect(self.durable_keep >= 1, "durable_keep", self.durable_keep, "1 or more")


@dataclass(frozen=True, slots=True)
class ResizeConfig:
    """When a change becomes a resize.

    Attributes:
        settle_s: Seconds to wait after a host joins, so that several joins are one change.
        drain_timeout_s: Most seconds between SIGTERM and exit of a leaving host; how long workers
            may take to reach an agreed stop before it is taken back, and how long they may hang in
            their snapshot before they are ended.
        start_timeout_s: How long a round may make no progress before every rank has stepped.
        stall_s: After how long without a step workers are reported, at the soonest.
        hang_s: For how long no worker may make a step before the round is started again, where it
            is not known how long one takes, and at most; but three times the longest pause so far
            may always pass. 0: for ever.
        quarantine_s: How long a host waits that was lost three times within an hour; twice as long
            each further time; 0: it does not.
        silent_s: After so much silence of its agent a host counts as lost, where others can go on.
        allowed_sizes: World sizes that may be used, ascending; empty: any.
        min_model_parallel: Smallest TP·PP that memory is known to hold; None: the present one.
        standby: Whether the next round's workers build their models while the present ones
            train on: ``auto`` where host memory holds both, ``always``, ``never``.
        build_timeout_s: How long the training goes on for that, at most, before the change.
        coordinator_timeout_s: How long workers train on while the coordinator is silent.
        prove_function: Whether the first step behind a change is compared with that of the old
            workers: ``auto`` at the first change to each layout, ``always``, ``never``.
    """

    settle_s: float = 2.0
    drain_timeout_s: float = 120.0
    allowed_sizes: tuple[int, ...] = ()
    min_model_parallel: int | None = None
    standby: str = "auto"
    build_timeout_s: float = 300.0
    coordinator_timeout_s: float = 600.0
    start_timeout_s: float = 1800.0
    stall_s: float = 60.0
    hang_s: float = 1800.0
    quarantine_s: float = 60.0
    silent_s: float = 15.0
    prove_function: str = "auto"

    def __post_init__(self) -> None:
        policies = "one of " + ", ".join(POLICIES)
        _expect(self.prove_function in POLICIES, "prove_function", self.prove_function, policies)
        policies = "one of " + ", ".join(STANDBY)
        _expect(self.standby in STANDBY, "standby", self.standby, policies)
        _expect(self.build_timeout_s > 0, "build_timeout_s", self.build_timeout_s, "> 0 seconds")
        timeout_s = self.coordinator_timeout_s
        _expect(timeout_s > 0, "coordinator_timeout_s", timeout_s, "> 0 seconds")
        _expect(self.start_timeout_s > 0, "start_timeout_s", self.start_timeout_s, "> 0 seconds")
        _expect(self.stall_s > 0, "stall_s", self.stall_s, "> 0 seconds")
        _expect(self.hang_s >= 0, "hang_s", self.hang_s, "0 or more seconds")
        _expect(self.quarantine_s >= 0, "quarantine_s", self.quarantine_s, "0 or more seconds")
        _expect(self.silent_s >= 3, "silent_s", self.silent_s, "3 or more seconds")
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
        health_check: A command, as words of a shell and run without one, that ends with 0 where
            the host may run workers; None: it may.
        health_timeout_s: How long the command may take.
    """

    kind: str = "nvidia-smi"
    command: str | None = None
    file: str | None = None
    interval_s: float = 5.0
    health_check: str | None = None
    health_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        _expect(self.kind in PROBE_KINDS, "kind", self.kind, "one of " + ", ".join(PROBE_KINDS))
        _expect(self.interval_s > 0, "interval_s", self.interval_s, "> 0 seconds")
        timeout_s = self.health_timeout_s
        _expect(timeout_s > 0, "health_timeout_s", timeout_s, "> 0 seconds")
        _check_words(self.health_check)
        for kind, value in (("command", self.command), ("file", self.file)):
            if (self.kind == kind) != (value is not None):
                raise UsageError(
                    f"kind = {self.kind!r} with {kind} = {value!r}: "
                    f"{kind} belongs to kind = {kind!r}, which needs it."
                )


@dataclass(frozen=True, slots=True)
class PreemptionConfig:
    """Who tells this host that it will be taken away.

    Attributes:
        sources: ``signal`` (SIGUSR1), ``file:PATH``, ``aws``, ``gcp``, ``azure``; the last three
            also with ``@`` and an address.
        interval_s: Seconds between two questions to one of them.
    """

    sources: tuple[str, ...] = ("signal",)
    interval_s: float = 2.0

    def __post_init__(self) -> None:
        _expect(self.interval_s > 0, "interval_s", self.interval_s, "> 0 seconds")
        parsed = self.parsed()
        _expect(len(set(parsed)) == len(parsed), "sources", list(self.sources), "each once")

    def parsed(self) -> tuple[NoticeSource, ...]:
        return tuple(map(parse_source, self.sources))


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Who chooses degrees where no person does.

    Attributes:
        kind: ``keep``: those that run are kept; ``cost``: the fastest by what is computed;
            ``auto``: as ``keep``, until the job has measured steps at two degrees, then as
            ``cost``.
        gpu: The device, by a name that ``scalai plan`` knows; None: the one that the driver names.
        figures: Of the device, instead of the table's: ``tflops``, ``memory-gb`` and the other
            flags of ``scalai plan``.
        residence_s: How long devices are taken to stay as they are.
        trial_steps: For so many steps each of the best degrees is tried where the prediction does
            not separate them; 0: none is.
        model: Of a DeepSpeed job, whose flags do not say it, the sizes of the model, by the names
            of ``plugin/core/planner/model.py``.
        recompute: What such a job computes again in its backward pass.
        may_change: What beside the degrees the planner also chooses for speed: ``micro-batch``,
            ``recompute``, ``virtual-stages``.
        memory_may_change: What is changed where nothing fits into memory as the script's flags have
            it: ``recompute``, ``micro-batch``.
    """

    kind: str = AUTO
    gpu: str | None = None
    model: Mapping[str, int | bool] = field(default_factory=dict)
    recompute: str = "none"
    figures: Mapping[str, float] = field(default_factory=dict)
    residence_s: float = RESIDENCE_S
    trial_steps: int = 0
    may_change: tuple[str, ...] = ()
    memory_may_change: tuple[str, ...] = ("recompute",)

    def __post_init__(self) -> None:
        _expect_some("may_change", self.may_change, PARTS)
        _expect_some("memory_may_change", self.memory_may_change, MEMORY_PARTS)
        _expect(self.kind in PLANNERS, "kind", self.kind, "one of " + ", ".join(PLANNERS))
        for name in self.figures:
            _expect(name in FIGURES, f"figures.{name}", name, f"one of {', '.join(FIGURES)}")
        _expect(0 < self.residence_s < inf, "residence_s", self.residence_s, "> 0 seconds")
        kinds = "one of " + ", ".join(RECOMPUTES)
        _expect(self.recompute in RECOMPUTES, "recompute", self.recompute, kinds)
        _expect(self.trial_steps >= 0, "trial_steps", self.trial_steps, "0 or more steps")


@dataclass(frozen=True, slots=True)
class DeepSpeedConfig:
    """What DeepSpeed's own configuration cannot say of an elastic job.

    Attributes:
        zero_stage: ZeRO stage by world size, as text, or by ``default``; where neither is there,
            the stage of DeepSpeed's own configuration.
        data_order: Who keeps the order of samples over a change: ``loader``, torch's or DeepSpeed's
            under our hooks; ``own``: the script, by ``scalai.elastic().consumed_samples``.
        cuts: Name or path of a file that says how tensor-parallel ranks cut the parameters of a
            checkpoint which does not say it, as ``scalai reshard --cuts``; for ``load_checkpoint``.
    """

    zero_stage: Mapping[str, int] = field(default_factory=dict)
    data_order: str = "loader"
    cuts: str | None = None

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
    """Where a value comes from, by its dotted name: ``flag`` or ``file``; absent: the default."""

    def policy(
        self, initial: DegreeRequest | None = None, preference: Preferring | None = None
    ) -> DegreePolicy:
        """Return what degrees are chosen by.

        Args:
            initial: Degrees of the script's command line; they win over ``default``.
            preference: The job's planner; None: what runs is kept.
        """
        return DegreePolicy(
            self.degrees,
            initial or self.default_degrees,
            self.resize.allowed_sizes,
            self.resize.min_model_parallel,
            preference,
        )

    def describe(self) -> str:
        """Return what the launcher prints: one ``name = value  (origin)`` a line."""
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
                # What nobody stated here says nothing; the other sections are shown whole.
                if section in loud or f"{section}.{item.name}" in self.origin:
                    shown = list(value) if isinstance(value, tuple) else value
                    lines.append(
                        (f"{section}.{item.name}", "none" if shown is None else str(shown))
                    )
        return "\n".join(
            f"{name} = {value}  ({self.origin.get(name, 'default')})" for name, value in lines
        )


def _check_words(command: str | None) -> None:
    """Check that a health check is a command."""
    try:
        is_command = command is None or bool(shlex.split(command))
    except ValueError:  # a quotation has no end
        is_command = False
    _expect(is_command, "health_check", command, "a command, such as '/opt/check --quick'")


def _expect_some(name: str, found: tuple[str, ...], known: tuple[str, ...]) -> None:
    _expect(set(found) <= set(known), name, list(found), f"some of {', '.join(known)}")


def _expect(is_met: bool, name: str, found: object, expected: str) -> None:
    if not is_met:
        raise UsageError(f"{name} = {found!r}; expected {expected}.")
