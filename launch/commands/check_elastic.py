"""``scalai-run --check-elastic``: possible changes, fixed settings with reasons, and the degrees of
every possible world.

It has no rules of its own: ``converters/megatron/rules.py`` refuses and fixes settings,
``core/degrees/choice.py`` chooses degrees, as in a job.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby, pairwise
from typing import Any

from scalai.converters.megatron.arguments import evaluates_by_replicas, underived_notes
from scalai.core.degrees.choice import check_rules, choose, replicated, splits
from scalai.core.degrees.degrees import AXES, Degrees, ModelLimits
from scalai.core.degrees.passes import PARTS
from scalai.core.degrees.policy import Case, Choice, DegreePolicy
from scalai.core.errors import RefusedError
from scalai.core.jsonable import Json
from scalai.core.planner.preference import KNOWN_LAYOUTS
from scalai.launch.config.elastic_config import ElasticConfig
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.config.options import Options
from scalai.launch.config.script_facts import ScriptFacts, read_script

_WIDEST_WORLD = 1024
"""Largest world with parts of a host to report; larger ones are whole hosts."""
_FOLDED = 3
"""Fewest lines that differ in DP alone to be one."""


@dataclass(frozen=True, slots=True)
class WorldLine:
    """Worlds of the report, from ``least`` to ``most`` ranks, with equal degrees or with DP growing
    from ``least_dp``; ``change``: the line is of this change. ``choice`` None: nothing is valid;
    ``reason`` explains."""

    least: int
    most: int
    choice: Choice | None
    reason: str
    idle: tuple[int, int] | None
    """Fewest and most idle ranks; None: all are."""
    change: str = ""
    least_dp: int | None = None

    def cells(self) -> tuple[str, str, str, str]:
        degrees = "none"
        if self.choice is not None:
            degrees, dp = str(self.choice.degrees), self.choice.degrees.dp
            if self.least_dp is not None:
                degrees = degrees.replace(f"DP{dp}", f"DP{self.least_dp}-{dp}")
        idle = "all" if self.idle is None else _span(*self.idle)
        return self.change or _span(self.least, self.most), degrees, idle, self.reason

    def to_json(self) -> dict[str, Json]:
        chosen = self.choice
        return {
            "ranks": [self.least, self.most], "change": self.change or None,
            "degrees": chosen.degrees.to_json() if chosen else None, "least_dp": self.least_dp,
            "idle": list(self.idle) if self.idle else None, "reason": self.reason,
        }  # fmt: skip


def _span(least: int, most: int) -> str:
    return str(least) if least == most else f"{least}-{most}"


@dataclass(frozen=True, slots=True)
class ElasticReport:
    """Lines about the settings and about what may change, and one for each world."""

    about: Sequence[str]
    changes: Sequence[str]
    worlds: Sequence[WorldLine]

    def __str__(self) -> str:
        return "\n".join([*self.about, *self.changes, "", *_table(self.worlds)])

    def to_json(self) -> dict[str, Json]:
        """Plain values for ``json``."""
        return {
            "notes": [line for text in self.about for line in text.splitlines() if line],
            "changes": list(self.changes),
            "worlds": [each.to_json() for each in self.worlds],
        }


def check_elastic(
    options: Options,
    config: ElasticConfig,
    slots: int,
    deepspeed: Mapping[str, Any] | None = None,
) -> ElasticReport:
    """Return the whole report.

    Args:
        slots: Workers of one host (``--nproc-per-node`` as a number).
        deepspeed: The DeepSpeed configuration named by the script's arguments; None: none.

    Raises:
        RefusedError: An entry of [degrees] cannot be used, or no world has valid degrees.
    """
    facts = read_script(options, config, deepspeed)
    if (planner := facts.policy.preference) is not None:
        policy = replace(facts.policy, preference=planner.on_hosts(slots))
        facts = replace(facts, policy=policy)
    _check_start(options, config, facts, options.max_nodes * slots)
    worlds = worlds_of(facts.policy, options.max_nodes * slots, slots)
    gap = 1 if facts.policy.allowed_sizes else slots
    lines = folded(report(facts.limits, facts.policy, worlds), gap)
    if all(line.choice is None for line in lines):
        raise RefusedError(f"no world has valid degrees; the last one: {lines[-1].reason}")
    offered = offered_degrees(facts.limits, facts.policy, worlds)
    changes = (*_changes(facts.limits, offered), *_passes(facts.policy))
    return ElasticReport(tuple(_header(facts, config)), changes, lines)


def check_start(spec: JobSpec, most: int | None) -> None:
    """Check a job before it starts.

    Args:
        most: Most workers it can have; None: unknown.

    Raises:
        RefusedError: Its flags or an entry of [degrees] cannot be used, or it would never have an
            allowed size or its replicas.
    """
    _check_start(spec.options, spec.config, spec.script, most)


def _check_start(
    options: Options, config: ElasticConfig, facts: ScriptFacts, most: int | None
) -> None:
    check_rules(facts.limits, facts.policy)
    sizes, replicas = facts.policy.allowed_sizes, config.store.replicas
    if most is not None and sizes and min(sizes) > most:
        raise RefusedError(
            f"--allowed-sizes {', '.join(map(str, sizes))}: {options.max_nodes} hosts of "
            f"{most // options.max_nodes} workers are {most} at most, so that the job would never "
            "begin."
        )
    if "store.replicas" in config.origin and replicas >= options.max_nodes:
        raise RefusedError(
            f"--replicas {replicas}: other hosts keep them, and --nnodes has {options.max_nodes} "
            f"at most. Use {options.max_nodes - 1}."
        )


def offered_degrees(
    limits: ModelLimits, policy: DegreePolicy, worlds: Sequence[int]
) -> frozenset[Degrees]:
    """Return all degrees possible for a job on these worlds, after any change."""
    case = Case(max(worlds), limits, policy, None, ())
    least = case.floor if policy.preference is None else policy.min_model_parallel or 1
    asked = (request for rule in policy.rules for request in rule.requests)
    return frozenset(
        degrees
        for split in (*splits(case, case.world, least), *asked)
        for degrees in replicated(case, split)
        if not policy.allowed_sizes or degrees.world_size in policy.allowed_sizes
    )


def worlds_of(policy: DegreePolicy, most: int, slots: int = 1) -> tuple[int, ...]:
    """Return the worlds to report: the allowed ones, else all up to ``most`` and the table's."""
    if policy.allowed_sizes:
        return policy.allowed_sizes
    largest = max([most, *(rule.world_size for rule in policy.rules)])
    whole = (_WIDEST_WORLD // slots + 1) * slots
    return (*range(1, min(largest, _WIDEST_WORLD) + 1), *range(whole, largest + 1, slots))


def report(limits: ModelLimits, policy: DegreePolicy, worlds: Sequence[int]) -> list[WorldLine]:
    """Return a line for each world, as at the first start, then one for each change with a rule."""
    lines = [_line("", world, limits, policy, None) for world in worlds]
    for rule in policy.rules:
        if rule.from_world_size is not None:
            before = _line("", rule.from_world_size, limits, policy, None).choice
            # Only the size of the world before matters to a rule.
            present = before.degrees if before else Degrees(1, 1, rule.from_world_size)
            lines.append(_line(rule.key, rule.world_size, limits, policy, present))
    return lines


def _line(
    change: str, world: int, limits: ModelLimits, policy: DegreePolicy, present: Degrees | None
) -> WorldLine:
    try:
        choice = choose(world, limits, policy, present)
    except RefusedError as error:
        return WorldLine(world, world, None, str(error).partition(": ")[2], None, change)
    idle = len(choice.idle_ranks)
    reason = choice.reason.partition(", ")[2]
    return WorldLine(world, world, choice, reason, (idle, idle), change)


def folded(lines: Sequence[WorldLine], gap: int = 1) -> list[WorldLine]:
    """Return the report with one line for consecutive worlds of equal degrees, and for lines of
    which each has as many replicas more; the last one's reason includes idle ranks.

    Args:
        gap: Ranks between consecutive worlds beyond the widest with parts of a host.
    """
    equal: list[list[WorldLine]] = []
    for line in lines:
        if equal and _is_next(equal[-1][-1], line, gap) and _key(equal[-1][-1]) == _key(line):
            equal[-1].append(line)
        else:
            equal.append([line])
    growing: list[list[WorldLine]] = []
    for line in map(_as_one, equal):
        if growing and _is_next(growing[-1][-1], line, gap) and _grows([*growing[-1][-2:], line]):
            growing[-1].append(line)
        else:
            growing.append([line])
    return [each for run in growing for each in ([_as_one(run)] if len(run) >= _FOLDED else run)]


def _key(line: WorldLine) -> object:
    return line.choice and line.choice.key


def _is_next(before: WorldLine, line: WorldLine, gap: int) -> bool:
    between = line.least - before.most
    is_next = between == 1 or (line.least > _WIDEST_WORLD and 1 < between <= gap)
    return is_next and not before.change and not line.change


def _grows(run: Sequence[WorldLine]) -> bool:
    """Whether each line has as many replicas more than the one before, on as many ranks more, and
    nothing else differs but numbers in the reason."""
    likes, dps = set(), []
    for line in run:
        if line.choice is None:
            return False
        kind = re.sub(r"\branks? \d+( to \d+)?|[\d.]+", "", line.reason)
        degrees, passes = line.choice.key
        likes.add((replace(degrees, dp=1), passes, line.most - line.least, kind))
        dps.append((degrees.dp, line.least))
    steps = {(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(dps)}
    return len(likes) == len(steps) == 1


def _as_one(same: Sequence[WorldLine]) -> WorldLine:
    begin, end = same[0], same[-1]
    if begin is end:
        return begin
    spans = [line.idle for line in same if line.idle is not None]
    idle = (min(span[0] for span in spans), max(span[1] for span in spans)) if spans else None
    shown = end if end.choice else begin
    if begin.choice and end.choice and begin.choice.degrees.dp < end.choice.degrees.dp:
        shown = replace(shown, least_dp=begin.choice.degrees.dp)
    return replace(shown, least=begin.least, most=end.most, idle=idle)


def _header(facts: ScriptFacts, config: ElasticConfig) -> Iterator[str]:
    yield from (config.describe(), *config.ignored)
    yield f"limits: {_stated(facts.limits)}"
    yield f"planner: {_planner(facts, config)}"
    if facts.arguments is not None:
        yield from (f"as given: {note}" for note in underived_notes(facts.arguments))
        if evaluates_by_replicas(facts.arguments):
            yield (
                "an evaluation's step has micro-batch times DP samples of the job's first start, "
                "which are kept from then on; --eval-global-batch-size states them."
            )
    if facts.arguments is not None and facts.limits.padded_vocab_size is None:
        yield (
            "the padded vocabulary is known once the tokenizer is loaded; a TP that does not "
            "divide it will not be chosen. --padded-vocab-size states it now."
        )
    yield ""


def _planner(facts: ScriptFacts, config: ElasticConfig) -> str:
    if facts.policy.preference is None:
        return f"degrees are kept, or those of [degrees]: {facts.why_no_planner}"
    if config.planner.kind == "cost":
        return f"degrees are computed for {config.planner.gpu}, where no entry of [degrees] speaks"
    return (
        f"degrees are kept until the job has measured steps at {KNOWN_LAYOUTS} of them, then "
        f"computed for {config.planner.gpu}; --planner cost: from the start"
    )


def _changes(limits: ModelLimits, offered: frozenset[Degrees]) -> Iterator[str]:
    """Yield the possible changes, and each fixed axis with the reason."""
    sizes = {axis: sorted({getattr(degrees, axis) for degrees in offered}) for axis in AXES}
    kept = {axis for axis, _, _ in limits.fixed}
    free = [axis for axis in AXES if len(sizes[axis]) > 1 and axis not in kept]
    shown = (f"{axis} {_in_runs(sizes[axis])}" for axis in free)
    yield f"may change: {'; '.join(shown) or 'nothing, on these worlds'}"
    of_first = "of the first start"
    reasons = {axis: f"{size or of_first} ({why})" for axis, size, why in limits.fixed}
    for axis in AXES:
        if axis in reasons:
            yield f"stays: {axis} {reasons[axis]}"
        elif axis not in free and (axis in ("tp", "pp", "dp") or sizes[axis] != [1]):
            why = "no other is valid on these worlds"
            if axis in ("ep", "vpp"):
                why = "until [degrees] or scalai scale asks for another"
            yield f"stays: {axis} {sizes[axis][0]} ({why})"


def _in_runs(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, four and more consecutive ones by their ends."""
    words: list[str] = []
    for _, group in groupby(enumerate(numbers), lambda each: each[1] - each[0]):
        run = [number for _, number in group]
        words += map(str, run) if len(run) < 4 else [f"{run[0]} to {run[-1]}"]
    return ", ".join(words)


def _passes(policy: DegreePolicy) -> Iterator[str]:
    """Yield the possible changes of passes with their conditions, and fixed ones with the
    reason."""
    freedom, fixed = policy.freedom, dict(policy.freedom.fixed)
    for part in PARTS:
        if part in fixed:
            if part in (*freedom.for_speed, *freedom.for_memory):
                yield f"stays: {part} ({fixed[part]})"
        elif part in freedom.for_speed:
            yield f"may change: {part}, wherever that is computed to be faster"
        elif part == "recompute" and not freedom.more:
            if part in freedom.for_memory:
                yield f"stays: {part} {freedom.own} (nothing else keeps less in memory)"
        elif part == "offload" and part in freedom.for_memory:
            kinds = " or ".join(freedom.offloads)
            yield f"may change: offload to {kinds}, where nothing fits into memory without"
        elif part in freedom.for_memory:
            yield f"may change: {part}, where nothing fits into memory as the flags have it"


def _stated(limits: ModelLimits) -> str:
    known = {item.name: getattr(limits, item.name) for item in fields(limits)}
    stated = [
        f"{item.name}={known[item.name]}"
        for item in fields(limits)
        if known[item.name] != item.default and item.name != "fixed"
    ]
    return ", ".join(stated) or "none are known"


def _table(lines: Sequence[WorldLine]) -> Iterator[str]:
    rows = [("ranks", "degrees", "idle", "why"), *(line.cells() for line in lines)]
    wide = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, degrees, idle, why in rows:
        yield f"{name:>{wide[0]}}  {degrees:<{wide[1]}}  {idle:>{wide[2]}}  {why}"
