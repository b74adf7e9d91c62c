"""A host by its law alone: what is fed in, what is to be done, without processes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from scalai.core.host import actions, events
from scalai.core.host.actions import Action
from scalai.core.host.law import advance
from scalai.core.host.state import HostState, Settings
from scalai.core.messages import commands
from scalai.core.messages.reports import Report
from scalai.core.messages.shared import JsonText
from scalai.core.messages.worker_messages import Publish, RankStepped, WorkerRequest, WriteOrder
from scalai.core.tensors.collection import Collection
from support.wire_words import start, word_of

A = TypeVar("A", bound=Action)


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
    """A host whose law is the real one. ``done`` are all actions so far."""

    def __init__(
        self, *, is_elastic: bool = True, drain_timeout_s: float = 9.0, hang_s: float = 0.0
    ) -> None:
        settings = Settings("a", is_elastic, drain_timeout_s, hang_s=hang_s)
        self.state = HostState(settings, 2, now=100.0)
        self.done: list[Action] = []
        self._calls = 0

    def feed(self, event: events.Event) -> tuple[Action, ...]:
        """Return what is to be done about an event."""
        self.state, due = advance(self.state, event)
        self.done += due
        return due

    def obey(
        self, command: commands.Command, seen: events.GroupSeen | None = None
    ) -> tuple[Action, ...]:
        return self.feed(events.Commanded(command, seen))

    def ask(self, request: WorkerRequest) -> int:
        """Let a worker call; return the number of the call."""
        self._calls += 1
        self.feed(events.Called(self._calls, request))
        return self._calls

    def tick(
        self, seconds: float = 0.1, seen: events.GroupSeen | None = None
    ) -> tuple[Action, ...]:
        return self.feed(events.TimePassed(self.state.now + seconds, seen))

    # ------------------------------------------------------------------ what was done

    def all(self, kind: type[A]) -> list[A]:
        """Return the actions of a kind so far."""
        return [action for action in self.done if isinstance(action, kind)]

    def reported(self) -> list[str]:
        """Return what was reported, by words, in order."""
        return [word_of(type(report)) for report in self.reports()]

    def reports(self) -> list[Report]:
        return [action.report for action in self.all(actions.Tell)]

    def answers(self) -> dict[int, object]:
        """Return the answers so far, by call."""
        return {action.call: action.value for action in self.all(actions.AnswerCall)}

    def discarded(self) -> list[object]:
        """Return the files that are used again."""
        return [action.slot for action in self.all(actions.ReuseFiles)]

    def refused(self) -> dict[int, str]:
        return {action.call: action.reason for action in self.all(actions.RefuseCall)}

    def log(self) -> str:
        return "\n".join(action.text for action in self.all(actions.Log))

    # ------------------------------------------------------------------ ways to a state

    def begin(
        self, number: int = 1, ranks: int = 2, held: Mapping[int, Collection] | None = None,
        **facts: Any,
    ) -> None:  # fmt: skip
        """Begin a round whose workers run."""
        self.obey(start(number, 0, ranks, **facts))
        self.feed(events.GroupStarted(number))

    def publish(
        self, number: int = 1, ranks: int = 2, *, is_restoring: bool = False,
        held: Mapping[int, Collection] | None = None,
    ) -> list[int]:  # fmt: skip
        """All workers publish; return their calls."""
        none = Collection.of([])
        facts = JsonText.of({})
        found = [(held or {}).get(rank, none) for rank in range(ranks)]
        return [
            self.ask(Publish(rank, number, is_restoring, pieces, pieces, f"r{rank}", facts, False))
            for rank, pieces in enumerate(found)
        ]

    def train(self, number: int = 1, ranks: int = 2, *, slot: MadeSlot | None = None) -> MadeSlot:
        """Have a round train, with files for the next snapshot."""
        slot = slot or MadeSlot(range(ranks))
        self.begin(number, ranks)
        self.publish(number, ranks)
        self.feed(events.Reserved(number, slot))
        self.obey(commands.Expect(number, 5))
        for rank in range(ranks):
            self.ask(RankStepped(rank, number, 1, None))
        return slot

    def agree(self, stop: int, number: int = 1) -> None:
        """Agree on a stop, as far as a page that a worker reads."""
        self.obey(commands.Agree(number, stop))
        self.feed(events.Agreed(number, stop))
