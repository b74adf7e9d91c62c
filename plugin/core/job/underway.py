"""A round that is under way, as its hosts know it: what a new coordinator hears of it when it takes
the place of one that is gone."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from scalai.core.degrees.degrees import Degrees
from scalai.core.degrees.passes import Recompute


@dataclass(frozen=True, slots=True)
class Underway:
    """One host's part in the round that its workers are in.

    Attributes:
        run: Name of the run of the job.
        round: Its number.
        workers: All hosts of the round with how many workers each has, in rank order.
        degrees: As of ``Degrees.to_json``.
        micro_batch_size, recompute: None: the script's own.
        generation: What it began from; None: from the script's own initial state.
        newest: The furthest step of this host's workers.
        is_proven: Whether they may train: what they began from is proven.
        is_stepping: Whether each of them has made its first step.
        is_hooked: Whether the job knows of their steps.
        stop: The step at which all have agreed to stop; None: at none.
        has_arrived: Whether they stand there.
        is_writing: Whether they may write there, and leave.
        is_sealed: Whether they have, and it is sealed.
        is_failed: Whether the round has failed here, or its workers were told to stand still.
        is_finished: Whether all of them have come to the end of their script.
        every: How many steps lie between snapshots of these workers.
    """

    run: str
    round: int
    workers: tuple[tuple[str, int], ...]
    degrees: Mapping[str, int]
    micro_batch_size: int | None
    generation: int | None
    newest: int
    is_proven: bool
    is_stepping: bool
    is_hooked: bool
    stop: int | None
    has_arrived: bool
    is_writing: bool
    is_sealed: bool
    is_failed: bool
    is_finished: bool
    every: int
    recompute: Recompute | None = None

    @property
    def members(self) -> frozenset[str]:
        """Hosts with workers."""
        return frozenset(host for host, count in self.workers if count)

    @property
    def layout(self) -> Degrees:
        return Degrees.from_json(self.degrees)


@dataclass(frozen=True, slots=True)
class TakingOver:
    """A coordinator that has yet to learn which round is under way waits for that ``until`` this
    moment, and knows so much ``of`` each host."""

    until: float
    of: Mapping[str, Underway] = field(default_factory=dict)

    @property
    def newest(self) -> int | None:
        """The number of the newest round that a host has told of."""
        return max((each.round for each in self.of.values()), default=None)

    def of_newest(self, hosts: Iterable[str]) -> dict[str, Underway]:
        """Return what those of the hosts have told that are in the newest round."""
        newest, there = self.newest, frozenset(hosts)
        return {h: each for h, each in self.of.items() if each.round == newest and h in there}
