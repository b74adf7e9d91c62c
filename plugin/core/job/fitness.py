"""Records of hosts' fitness: health checks, and pairs without a connection."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations

Pair = frozenset[str]
Slots = tuple[tuple[str, int], ...]
"""Hosts and their slots in rank order."""

MOST_EXACT = 12
"""Most hosts with broken links for an exact choice; of more, the host with the most broken links
goes first."""


@dataclass(frozen=True, slots=True)
class Knocking:
    """A probe of connections between ``hosts``.

    Attributes:
        order: Number of the command.
        at: Its time, in seconds of the job's clock.
        awaited: Hosts without an answer.
        unheard: Unconnected pairs reported so far.
    """

    order: int
    at: float
    hosts: frozenset[str]
    awaited: frozenset[str]
    unheard: frozenset[Pair] = frozenset()


@dataclass(frozen=True, slots=True)
class Links:
    """Unconnected pairs of hosts at the last probe; the next one is ``again_at``, later with each
    of ``tries``."""

    unheard: frozenset[Pair] = frozenset()
    knocking: Knocking | None = None
    last_order: int = 0
    again_at: float = 0.0
    tries: int = 0


NOTHING_KNOWN = Links()


def all_hear(hosts: Iterable[str], unheard: Iterable[Pair]) -> bool:
    """Whether no two of these hosts are known to be unconnected."""
    names = frozenset(hosts)
    return not any(pair <= names for pair in unheard)


def hearing_with(ran: Iterable[str], hosts: Slots, unheard: frozenset[Pair]) -> Slots:
    """The largest connected set of hosts (``largest_hearing``). If the hosts that ``ran`` are
    connected, all of them stay: others could not fetch their state."""
    kept = frozenset(ran) & {name for name, _ in hosts}
    if all_hear(kept, unheard):
        hosts = tuple(entry for entry in hosts if all_hear(kept | {entry[0]}, unheard))
    return largest_hearing(hosts, unheard)


def largest_hearing(hosts: Slots, unheard: frozenset[Pair]) -> Slots:
    """The connected set with the most slots, then the most hosts, then the earlier ones. With more
    than ``MOST_EXACT`` hosts with broken links it may not be the largest."""
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
        order: Number of the command.
        since: Time of the command, in seconds of the job's clock.
        is_asked: The answer is awaited.
        failures: Consecutive failures.
        again_at: Time of the next check.
        reason: Last failure; empty before the first answer.
    """

    order: int
    since: float
    is_asked: bool = True
    failures: int = 0
    again_at: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Fitness:
    """Known fitness of a job's hosts.

    Attributes:
        joined: Number of joins so far.
        checks: Unfinished or failed checks of hosts without workers.
        last_check: Highest number of a check's command.
        links: Unconnected pairs of hosts.
        strikes: Times of a host's losses and failed joins to a round.
        hangs: Hangs with this host behind since its join.
        barred: Hosts that must wait, with the end of the wait.
    """

    joined: int = 0
    checks: Mapping[str, Check] = field(default_factory=dict)
    last_check: int = 0
    links: Links = NOTHING_KNOWN
    strikes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    hangs: Mapping[str, int] = field(default_factory=dict)
    barred: Mapping[str, float] = field(default_factory=dict)
