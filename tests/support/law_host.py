"""A host with the real law and no processes: events in, actions out."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from scalai.core.host import actions, events
from scalai.core.host.actions import Action
from scalai.core.host.events import GroupSeen
from scalai.core.host.law import advance
from scalai.core.host.standby import Standby
from scalai.core.host.state import HostSettings, HostState
from scalai.core.messages import commands
from scalai.core.messages.reports import Report, WorkersFailed
from scalai.core.messages.shared import JsonText
from scalai.core.messages.worker_messages import (
    AtBrink,
    AwaitFreeze,
    BeginSnapshot,
    Imports,
    Publish,
    RankFrozen,
    RankStepped,
    RankWritten,
    WorkerRequest,
    WriteOrder,
)
from scalai.core.tensors.collection import Collection
from support.wire_words import start, word_of, workers

A = TypeVar("A", bound=Action)
R = TypeVar("R", bound=Report)
NONE = JsonText.of(None)


class MadeSlot:
    """Files for a snapshot of these ranks: each writes one piece of its own, and ``shared`` ranks
    hold each other's."""

    def __init__(self, ranks: range, shared: bool = True) -> None:
        self.orders = {rank: WriteOrder(rank, f"rank-{rank}", (0,), (64,)) for rank in ranks}
        self._shared = shared

    def take_over(self, lost: int, alive: Any) -> dict[int, WriteOrder]:
        successors = sorted(set(alive) - {lost}) if self._shared else []
        return {successors[0]: replace(self.orders[lost], rank=successors[0])} if successors else {}


class LawHost:
    """A host of two workers, ``done`` are all its actions so far."""

    def __init__(
        self,
        *,
        is_elastic: bool = True,
        drain_timeout_s: float = 9.0,
        hang_s: float = 0.0,
        cores: int = 1,
    ) -> None:
        settings = HostSettings("a", is_elastic, drain_timeout_s, hang_s=hang_s, cores=cores)
        self.state = HostState(settings, 2, now=100.0)
        self.done: list[Action] = []
        self.ranks = range(2)
        self._calls = 0

    def feed(self, event: events.Event) -> tuple[Action, ...]:
        """Return the actions after an event."""
        self.state, due = advance(self.state, event)
        self.done += due
        return due

    def obey(self, command: commands.Command, seen: GroupSeen | None = None) -> tuple[Action, ...]:
        return self.feed(events.Commanded(command, seen))

    def ask(self, request: WorkerRequest) -> int:
        """Let a worker call; return the number of the call."""
        self._calls += 1
        self.feed(events.Called(self._calls, request))
        return self._calls

    def tick(self, seconds: float = 0.1, seen: GroupSeen | None = None) -> tuple[Action, ...]:
        return self.feed(events.TimePassed(self.state.now + seconds, seen))

    def succeed(self, kind: type[Action], result: events.Result = None) -> tuple[Action, ...]:
        """The last action of a kind is done, with this result."""
        return self.feed(events.Done(self.all(kind)[-1], result))

    def fail(self, kind: type[Action], reason: str) -> None:
        """The last action of a kind has failed."""
        self.feed(events.Failed(self.all(kind)[-1], reason))

    # ------------------------------------------------------------------ what was done

    def all(self, kind: type[A]) -> list[A]:
        """Return the actions of a kind so far."""
        return [action for action in self.done if isinstance(action, kind)]

    def reports(self) -> list[Report]:
        return [action.report for action in self.all(actions.SendReport)]

    def told(self, kind: type[R]) -> list[R]:
        """Return the reports of a kind so far."""
        return [report for report in self.reports() if isinstance(report, kind)]

    def reported(self) -> list[str]:
        """Return the reports by words, in order."""
        return [word_of(type(report)) for report in self.reports()]

    def failure(self) -> WorkersFailed | None:
        """Return the round's failure, which is reported once; None: it goes on."""
        failed = self.told(WorkersFailed)
        assert len(failed) < 2, failed
        return failed[0] if failed else None

    def answers(self) -> dict[int, object]:
        """Return the answers so far, by call."""
        return {it.call: it.value for it in self.all(actions.AnswerCall) if not it.error}

    def orders(self) -> list[int]:
        """Return the ranks that got an order to write."""
        values = self.answers().values()
        return [value.rank for value in values if isinstance(value, WriteOrder)]

    def discarded(self) -> list[object]:
        """Return the files that are used again."""
        return [action.slot for action in self.all(actions.ReuseFiles)]

    def refused(self) -> dict[int, str]:
        return {it.call: it.error for it in self.all(actions.AnswerCall) if it.error}

    def log(self) -> str:
        return "\n".join(action.text for action in self.all(actions.Log))

    # ------------------------------------------------------------------ workers and their files

    def begin(self, number: int = 1, **facts: Any) -> None:
        """Begin a round whose workers run."""
        self.obey(start(number, 0, len(self.ranks), **facts))
        self.succeed(actions.StartGroup)

    def build(self, number: int = 2, level: Standby = Standby.MODELS) -> None:
        """Start workers beside the present ones."""
        self.obey(commands.Build(workers(number, 0, len(self.ranks))))
        self.succeed(actions.StartGroup, level)

    def publish(
        self,
        number: int = 1,
        *,
        is_restoring: bool = False,
        held: Mapping[int, Collection] = {},
        brink: Iterable[int] = (),
    ) -> list[int]:
        """All workers publish; return their calls. ``brink``: ranks that can stop there."""
        none, facts = Collection.of([]), JsonText.of({})
        found = [held.get(rank, none) for rank in self.ranks]
        places = {rank: AtBrink(rank, 1) if rank in brink else None for rank in self.ranks}
        return [
            self.ask(
                Publish(rank, number, is_restoring, it, it, f"r{rank}", facts, False, places[rank])
            )
            for rank, it in enumerate(found)
        ]

    def step(self, number: int = 1) -> None:
        """All workers make their first step."""
        for rank in self.ranks:
            self.ask(RankStepped(rank, number, 1, None))

    def train_on(self, imports: Imports) -> None:
        """The workers of a round that runs publish and step; one tells its imports."""
        self.publish()
        self.make_files()
        self.obey(commands.Expect(1, 5))
        for rank in self.ranks:
            self.ask(RankStepped(rank, 1, 1, None if rank else imports))

    def train(self, ranks: int = 2, *, shared: bool = True, **begins: Any) -> MadeSlot:
        """Have a first round train, with files for the next snapshot."""
        self.ranks = range(ranks)
        self.begin(**begins)
        self.publish()
        slot = self.make_files(shared=shared)
        self.obey(commands.Expect(1, 5))
        self.step()
        return slot

    def make_files(self, *, shared: bool = True) -> MadeSlot:
        """Files for the next snapshot are there."""
        slot = MadeSlot(self.ranks, shared)
        self.succeed(actions.Reserve, slot)
        return slot

    def come(self, step: int, why: str = "snapshot", ranks: Iterable[int] = ()) -> list[int]:
        """Workers, by default all, come to a snapshot; return their calls."""
        return [self.ask(BeginSnapshot(r, 1, why, step)) for r in ranks or self.ranks]

    def write(self, step: int, *ranks: int) -> list[int]:
        """Workers have written; return their calls."""
        seconds = {"snapshot": 1.0}
        return [
            self.ask(RankWritten(rank, 1, step, (rank,), f"dp{rank}", NONE, NONE, 12, seconds))
            for rank in ranks or self.ranks
        ]

    def snapshot(self, step: int = 7) -> actions.Seal:
        """All workers write a snapshot on the way; return its seal."""
        self.come(step)
        self.write(step)
        return self.all(actions.Seal)[-1]

    def sealed(self, manifest: bytes = b"") -> None:
        """The last seal is done."""
        self.succeed(actions.Seal, manifest)

    def agree(self, stop: int, number: int = 1, *, proves: bool = False) -> None:
        """Agree on a stop, as far as a page that a worker reads."""
        self.obey(commands.Agree(number, stop, proves))
        self.succeed(commands.Agree)

    def stand(self, stop: int = 8, *, writes: bool = True) -> list[int]:
        """All workers stand at a stop, and may write there; return their calls."""
        self.agree(stop)
        calls = self.come(stop, "stop")
        if writes:
            self.obey(commands.TakeSnapshot(1))
        return calls

    def freeze(self, steps: Mapping[int, int | None], number: int = 1) -> None:
        """Workers are to stand still, and say at which steps they do."""
        for rank in self.ranks:
            self.ask(AwaitFreeze(rank, number))
        self.obey(commands.Freeze(number))
        for rank, step in steps.items():
            self.ask(RankFrozen(rank, number, step, "torn"))

    def lose(self, rank: int, *, at_stop: bool = True) -> None:
        """The connection of a worker ends, as far as the stop or before it."""
        seen = GroupSeen(reached=frozenset(self.ranks if at_stop else ()))
        self.feed(events.WorkerGone(1, rank, seen))

    def end(self, number: int = 1, newest: int = 9) -> None:
        """The workers of a round are gone."""
        (end,) = [action for action in self.all(actions.EndGroup) if action.round == number]
        self.feed(events.Done(end, newest))

    def over(self, number: int = 1, *failures: str, is_chance: bool = False) -> None:
        """The workers of a round have ended by themselves."""
        self.feed(events.GroupOver(number, failures, is_chance=is_chance))
