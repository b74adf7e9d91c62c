"""``scalai-run --check-elastic``: the degrees for every world that may come."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from scalai.core.choice import Choice, DegreePolicy, check_rules, choose
from scalai.core.degrees import Degrees, ModelLimits
from scalai.core.errors import RefusedError
from scalai.launch.elastic_config import ElasticConfig
from scalai.launch.options import Options
from scalai.launch.script import ScriptFacts, read_script

_WIDEST_WORLD = 1024
"""More lines than this nobody reads."""


@dataclass(frozen=True, slots=True)
class Line:
    """One world of the report. ``choice`` is None where nothing is valid; ``reason`` says why."""

    world: str
    choice: Choice | None
    reason: str


def check_elastic(
    options: Options,
    config: ElasticConfig,
    slots: int,
    deepspeed: Mapping[str, Any] | None = None,
) -> str:
    """Return the whole report as text.

    Args:
        slots: Workers of one host (``--nproc-per-node`` as a number).
        deepspeed: The DeepSpeed configuration that the script's arguments name; None: none.

    Raises:
        RefusedError: An entry of [degrees] cannot be used, or no world has valid degrees.
    """
    facts = read_script(options, config, deepspeed)
    check_rules(facts.limits, facts.policy)
    lines = report(facts.limits, facts.policy, worlds_of(facts.policy, options.max_nodes * slots))
    if all(line.choice is None for line in lines):
        raise RefusedError(f"no world has valid degrees; the last one: {lines[-1].reason}")
    return "\n".join([*_header(facts, config), *_table(lines)])


def worlds_of(policy: DegreePolicy, most: int) -> tuple[int, ...]:
    """Return the worlds to report: the allowed ones, else all up to ``most`` and the table's."""
    if policy.allowed_sizes:
        return policy.allowed_sizes
    largest = max([most, *(rule.world_size for rule in policy.rules)])
    return tuple(range(1, min(largest, _WIDEST_WORLD) + 1))


def report(limits: ModelLimits, policy: DegreePolicy, worlds: Sequence[int]) -> list[Line]:
    """Return a line for each world, as at the first start, then one for each change with a rule."""
    lines = [_line(str(world), world, limits, policy, None) for world in worlds]
    for rule in policy.rules:
        if rule.from_world_size is not None:
            before = _line("", rule.from_world_size, limits, policy, None).choice
            # Only the size of the world before matters to a rule.
            present = before.degrees if before else Degrees(1, 1, rule.from_world_size)
            lines.append(_line(rule.key, rule.world_size, limits, policy, present))
    return lines


def _line(
    name: str, world: int, limits: ModelLimits, policy: DegreePolicy, present: Degrees | None
) -> Line:
    try:
        choice = choose(world, limits, policy, present)
    except RefusedError as error:
        return Line(name, None, str(error).partition(": ")[2])
    return Line(name, choice, choice.reason.partition(", ")[2])


def _header(facts: ScriptFacts, config: ElasticConfig) -> Iterator[str]:
    yield config.describe()
    yield f"limits: {_stated(facts.limits)}"
    if facts.arguments is not None and facts.limits.padded_vocab_size is None:
        yield (
            "the padded vocabulary is known once the tokenizer is loaded; a TP that does not "
            "divide it will not be chosen. --padded-vocab-size states it now."
        )
    yield ""


def _stated(limits: ModelLimits) -> str:
    known = {item.name: getattr(limits, item.name) for item in fields(limits)}
    stated = [
        f"{item.name}={known[item.name]}"
        for item in fields(limits)
        if known[item.name] != item.default and item.name != "fixed"
    ]
    fixed = [f"{axis} stays {size} ({why})" for axis, size, why in limits.fixed]
    return ", ".join([*stated, *fixed]) or "none are known"


def _table(lines: Sequence[Line]) -> Iterator[str]:
    rows = [("ranks", "degrees", "idle", "why")]
    for line in lines:
        if line.choice is None:
            rows.append((line.world, "none", "all", line.reason))
        else:
            degrees, idle = str(line.choice.degrees), str(len(line.choice.idle_ranks))
            rows.append((line.world, degrees, idle, line.reason))
    wide = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, degrees, idle, why in rows:
        yield f"{name:>{wide[0]}}  {degrees:<{wide[1]}}  {idle:>{wide[2]}}  {why}"
