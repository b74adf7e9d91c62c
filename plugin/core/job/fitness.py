"""Records of the fitness of a job's hosts: their health checks, and pairs that do not hear each
other."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations

Pair = frozenset[str]
Slots = tuple[tuple[str, int], ...]
"""Hosts and their slots in rank order."""

MOST_EXACT = 12
"""Of so many hosts with broken links every choice is compared; of more, who has the most broken
links is left out first."""


@dataclass(frozen=True, slots=True)
class Knocking:
    """These ``hosts`` were asked by ``order`` to knock at each other, at this time; some are
    awaited. ``unheard``: the pairs that they have named so far."""

    order: int
    at: float
    hosts: frozenset[str]
    awaited: frozenset[str]
    unheard: frozenset[Pair] = frozenset()


@dataclass(frozen=True, slots=True)
class Links:
    """``unheard``: pairs of hosts that did not hear each other when they knocked last; they knock
    again ``again_at``, later with each of ``tries``."""

    unheard: frozenset[Pair] = frozenset()
    knocking: Knocking | None = None
    last_order: int = 0
    again_at: float = 0.0
    tries: int = 0


NOTHING_KNOWN = Links()


def all_hear(hosts: Iterable[str], unheard: Iterable[Pair]) -> bool:
    """Whether each of these hosts hears each other one, as far as is known."""
    names = frozenset(hosts)
    return not any(pair <= names for pair in unheard)


def hearing_with(ran: Iterable[str], hosts: Slots, unheard: frozenset[Pair]) -> Slots:
    """Return those of the hosts that all hear each other, as of ``largest_hearing``. Where those
    that ``ran`` do, none of them makes way for others: these could not fetch its state."""
    kept = frozenset(ran) & {name for name, _ in hosts}
    if all_hear(kept, unheard):
        hosts = tuple(entry for entry in hosts if all_hear(kept | {entry[0]}, unheard))
    return largest_hearing(hosts, unheard)


def largest_hearing(hosts: Slots, unheard: frozenset[Pair]) -> Slots:
    """Return those of the hosts that all hear each other: with the most slots, then the most hosts,
    then the earlier ones. Among more than ``MOST_EXACT`` hosts with broken links it may not be the
    largest set."""
    names = [name for name, _ in hosts]
    pairs = [pair for pair in unheard if pair <= frozenset(names)]
    touched = [name for name in names if any(name in pair for pair in pairs)]
    slots, place = dict(hosts), {name: number for number, name in enumerate(names)}
    left_out = set[str]()
    if len(touched) <= MOST_EXACT:
        left_out = min(
            (
                set(touched).difference(kept)
                for count in range(len(touched) + 1)
                for kept in combinations(touched, count)
                if all_hear(kept, pairs)
            ),
            key=lambda left: (
                sum(slots[name] for name in left), len(left), sorted(-place[name] for name in left)
            ),
        )  # fmt: skip
    else:
        while broken := [pair for pair in pairs if not pair & left_out]:
            counts = {name: sum(name in pair for pair in broken) for name in touched}
            left_out.add(max(touched, key=lambda n: (counts[n], -slots[n], place[n])))
    return tuple(entry for entry in hosts if entry[0] not in left_out)


@dataclass(frozen=True, slots=True)
class Check:
    """A health check of one host.

    Attributes:
        order: Tells its answer from those to earlier ones.
        since: When the host was asked, in seconds of the job's clock.
        is_asked: Whether the answer is awaited.
        failures: How often it has failed on end.
        again_at: When the host is asked again.
        reason: Why it failed last; empty before the first answer.
    """

    order: int
    since: float
    is_asked: bool = True
    failures: int = 0
    again_at: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Fitness:
    """What is known of the fitness of a job's hosts.

    Attributes:
        joined: Agents that have joined so far.
        checks: Of hosts that run no workers: their check is under way, or has failed.
        last_check: The highest number of an order for a check.
        links: Which hosts do not hear each other.
        strikes: When hosts were lost, or joined a round that failed.
        hangs: Hangs at which a host was behind since it joined.
        barred: Hosts that wait before they run workers again, and until when.
    """

    joined: int = 0
    checks: Mapping[str, Check] = field(default_factory=dict)
    last_check: int = 0
    links: Links = NOTHING_KNOWN
    strikes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    hangs: Mapping[str, int] = field(default_factory=dict)
    barred: Mapping[str, float] = field(default_factory=dict)
