"""A host as the rules of membership see it, and what is known and true of all hosts of a job."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from scalai.core.job import membership as m
from scalai.core.job.function_proof import Numbers
from scalai.core.job.membership import active
from scalai.core.messages import actions, commands, events

PIECES = range(4)
"""A state is whole when each of these pieces is somewhere."""


@dataclass(slots=True)
class SimulatedHost:
    """An agent, its workers and its store. ``parts``: pieces of committed generations; ``built``:
    the round whose workers wait beside the present ones; ``stop``: where they must stop, ``stands``
    once they do. Workers that are ``hung`` do nothing; an agent that is ``silent`` does nothing."""

    name: str
    slots: int
    round: int | None = None
    parts: dict[int, frozenset[int]] = field(default_factory=dict)
    step: int = 0
    built: int | None = None
    stop: int | None = None
    stands: bool = False
    todo: Callable[[], events.Event | None] | None = None
    """What of a start its workers do once they hang no more."""
    is_hung: bool = False
    differing: str = ""
    """What its workers hold as replicas and is not the same on all."""
    is_silent: bool = False
    is_done: bool = False
    """Its workers have come to the end of their script."""
    held: int | None = None
    """The proposed stop that waits for the save in flight."""
    written: tuple[int, int] | None = None
    """Round and step of the stop at which it wrote last."""


class Known:
    """The state of a job, its hosts, and what a coordinator knows beside."""

    def __init__(self, job: m.Job) -> None:
        self.job = job
        self.now = 0.0
        self.hosts: dict[str, SimulatedHost] = {}
        self.commands: dict[str, list[Callable[[], events.Event | None]]] = {}
        self.logged: list[actions.Action | commands.Command] = []
        """All actions so far; of an order its command."""
        self.numbers = 0
        self.snapshots: dict[str, tuple[int, int, frozenset[int]]] = {}
        self.marked = (0, 0)
        """Round and step of the snapshot on the way that was begun last."""
        self.skipped: set[tuple[str, int, int]] = set()
        """Hosts that have nothing of a snapshot on the way, with its round and step."""
        self.steps: dict[int, int] = {}
        self.known: dict[int, dict[str, frozenset[int]]] = {}
        self.abandoned: set[int] = set()
        self.is_replicated = True
        self.exits: list[actions.EndJob] = []
        self.cannot_build: set[str] = set()
        self.is_saving = False
        """A save of the training's own is in flight: on all hosts, or on none."""
        self.spoilt: set[str] = set()
        """Hosts of which the next fetch brings something else than was committed."""
        self.damaged: dict[tuple[str, int], bool] = {}
        """Hosts and generations of which their part is damaged; whether that shows in a proof, or
        their workers fail by it before."""
        self.doubted: set[int] = set()
        self.begun: actions.StartRound | None = None
        self.still_since: float | None = None
        """Since when no worker makes a step, because some hang."""
        self.hangers: set[str] = set()
        """Hosts whose workers hang in every round behind their first step."""
        self.has_check: set[str] = set()
        """Hosts with a health check."""
        self.cut: set[frozenset[str]] = set()
        """Pairs of hosts that do not hear each other."""
        self.cannot_meet: set[int] = set()
        """Worlds whose workers wait for each other for ever, and nobody knows why."""
        self.sick: set[str] = set()
        """Those that fail it."""
        self.cannot_run: set[int] = set()
        """Worlds in which every script raises before its first step."""
        self.computed: dict[int, Numbers] = {}
        """What the first step computes, by how many workers there are."""

    def covered(self) -> tuple[m.Generation, ...]:
        """Return the generations that are whole by what the coordinator knows, oldest first: a part
        counts from the moment that its snapshot was judged, before its host has renamed it."""
        found = [
            m.Generation(number, self.steps[number], frozenset(parts))
            for number, parts in self.known.items()
            if {piece for pieces in parts.values() for piece in pieces} == set(PIECES)
        ]
        return tuple(sorted(found, key=lambda generation: (generation.step, generation.number)))

    def is_on_disk(self, number: int) -> bool:
        """Whether the hosts present have renamed parts that make this generation whole."""
        pieces = {p for host in self.hosts.values() for p in host.parts.get(number, ())}
        return pieces == set(PIECES)

    def waiting(self) -> list[str]:
        """Return the hosts that have a command to carry out, and can."""
        return sorted(
            n for n, queue in self.commands.items() if queue and not self.hosts[n].is_silent
        )

    def blocked(self) -> set[str]:
        """Return the hosts of which no answer can come."""
        return {
            name
            for name, host in self.hosts.items()
            if host.is_silent
            or host.is_hung
            or host.is_done
            or host.held is not None
            or self.are_cut(self.hosts)
        }

    def are_cut(self, names: Iterable[str]) -> bool:
        """Whether workers of these hosts cannot meet."""
        present = frozenset(names)
        return any(pair <= present for pair in self.cut)

    def forget(self, name: str) -> None:
        for parts in self.known.values():
            parts.pop(name, None)

    def pieces(self, name: str) -> frozenset[int]:
        """Return what the workers of a host hold in the present round."""
        names = sorted(active(self.job))
        own = (p for p in PIECES if names and names[p % len(names)] == name)
        return frozenset(PIECES) if self.is_replicated else frozenset(own)
