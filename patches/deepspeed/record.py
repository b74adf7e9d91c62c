"""A script's events over the rounds of a job. A later round runs the script again from its
beginning, and compares.

The record is a sequence of stretches. The first is the script's beginning; each other begins with a
trained pass over data, or with a step of a pipeline. A stretch has the events behind its newest
step alone: a finished pass gives no batch, and the body of its loop does not run again. Repetitions
are folded. The loaders' clocks keep the ends of passes.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from scalai.core.jsonable import Json

_BY_RANK = ("--local_rank", "--local-rank")
_MOST_ARGUMENTS = 4096
"""Bytes of verbatim arguments."""
MOST_BYTES = 48 << 10
"""Bytes of the stretches as JSON. With arguments and the current stretch it is less than 64 KiB."""
_MOST_EVENTS, _MOST_LETTERS = 80, 80
"""Of a stretch, and of an event."""
_LONGEST_PERIOD = 16
"""Longest repeated sequence of stretches or repetitions."""
BEGINNING = "its beginning"
_STEPS = "its first step"
LOADS = "a load of"
"""Begin of a load's event. A script resumes by it at its beginning, from the newest checkpoint."""
_MORE = "more"
"""Stands for events beyond the limit."""

Stretch = list[str]
"""How it begins, and the events in it."""
Node = Any
"""A stretch, or [number, repeated nodes]."""


class Stretches:
    """Stretches, folded at repetitions, in bounded memory.

    Attributes:
        nodes: The newest stretches.
        dropped: Number of older ones.
    """

    def __init__(self, nodes: Sequence[Node] = (), dropped: int = 0) -> None:
        self.nodes, self.dropped = list(nodes), dropped

    def add(self, stretch: Stretch) -> bool:
        """Add one. Returns True if older ones were dropped."""
        self.nodes.append(stretch)
        while self._fold():
            pass
        before = self.dropped
        if len(json.dumps(self.nodes)) > MOST_BYTES:
            while len(json.dumps(self.nodes)) > MOST_BYTES // 2:
                self.dropped += sum(1 for _ in _unfolded(self.nodes[:1]))
                del self.nodes[0]
        return self.dropped > before

    def __iter__(self) -> Iterator[Stretch | None]:
        """Yield all, oldest first; None for a dropped one."""
        yield from (None for _ in range(self.dropped))
        yield from _unfolded(self.nodes)

    def _fold(self) -> bool:
        nodes = self.nodes
        for period in range(1, min(_LONGEST_PERIOD, len(nodes) - 1) + 1):
            newest, before = nodes[-period:], nodes[-period - 1]
            if isinstance(before[0], int) and before[1] == newest:
                nodes[-period - 1 :] = [[before[0] + 1, newest]]
                return True
            if nodes[-2 * period : -period] == newest:
                nodes[-2 * period :] = [[2, newest]]
                return True
        return False


def _unfolded(nodes: Sequence[Node]) -> Iterator[Stretch]:
    for node in nodes:
        if isinstance(node[0], int):
            for _ in range(node[0]):
                yield from _unfolded(node[1])
        else:
            yield node


class ScriptRecord:
    """The record of one process.

    Args:
        differs: Called once a round, with the detail, at the first new action of the script; the
            training itself is compared elsewhere.
        forgets: Called with the detail if the record is too long.

    Attributes:
        uses_modes: True if the script turns ``train()`` on and off, so ``eval()`` means an
            evaluation. A model of ``from_pretrained`` is in ``eval()``, and may be trained so.
        other_arguments: Arguments of the script changed by a person since the last round.
    """

    def __init__(
        self, differs: Callable[[str, str], None], forgets: Callable[[str], None],
        place: Callable[[], str],
    ) -> None:  # fmt: skip
        self._differs, self._forgets, self._place = differs, forgets, place
        self.uses_modes = False
        self.other_arguments: tuple[str, ...] = ()
        self._over = Stretches()
        self._newest: Stretch = [BEGINNING]
        """The stretch under way."""
        self._beginning: list[tuple[str, str]] = []
        """This round's beginning: events and their lines in the script."""
        self._is_first = True
        """True in the script's beginning."""
        self._then: Iterator[Stretch | None] | None = None
        """The stretches to come of the rounds before; None: the script is compared no more."""
        self._expected: Sequence[str] = ()
        """Events to come in the script's current stretch."""
        self._number = 0
        """Number of this stretch."""
        self._is_recording = True
        self._process: int | None = None
        """The comparing process: a loader's workers are forked from it."""

    def note(self, event: str) -> None:
        """Note an action of the script. Equal ones in a row are one."""
        if self._process not in (None, os.getpid()):
            return
        event = event[-_MOST_LETTERS:]
        if self._is_first:
            if _has_room(self._begun(), event):
                self._beginning.append((_kept(event, len(self._beginning) + 1), self._place()))
        elif self._is_recording and _has_room(self._newest, event):
            self._newest.append(_kept(event, len(self._newest)))
        if not self._is_recording and self._then is not None:
            self._compare(event)

    def note_told(self, answer: str) -> None:
        """Note a number of the first round told in the script's beginning."""
        if self._is_first:
            self.note(answer)

    def begin(self, stretch: str, *, is_over: bool) -> None:
        """Note the begin of a pass over data, or of a step of a pipeline.

        Args:
            is_over: True if earlier rounds have made it.
        """
        self._leave_beginning()
        if self._is_recording:
            self._close(stretch)
        elif not is_over:
            self.resume()
        elif self._then is not None:
            self._number += 1
            then = next(self._then, [_STEPS])
            self._expected = [_MORE] if then is None else then[1:]
            if then is not None and then[0] != stretch:
                self._end(f"begins {stretch}, and began {then[0]} then")

    def stepped(self) -> None:
        """This round has made a step of its own."""
        self._leave_beginning()
        self._is_recording = True
        self.resume()
        if self._newest[0] == BEGINNING:
            self._close(_STEPS)
        del self._newest[1:]

    def resume(self) -> None:
        """End the comparison: the script is at the training, or begins at another pass."""
        self._then = None

    def restart(self) -> None:
        """Begin the record with this round: the script has loaded a newer checkpoint."""
        self._over, self._newest = Stretches(), self._begun()
        self._is_recording = True
        self.resume()

    def take(self) -> Json:
        return {
            "uses_modes": self.uses_modes, "arguments": _arguments(), "over": [*self._over.nodes],
            "dropped": self._over.dropped, "newest": [*self._under_way],
        }  # fmt: skip

    def put(self, saved: Mapping[str, Any]) -> None:
        self._process = os.getpid()
        self.uses_modes |= saved["uses_modes"]
        then, now = saved["arguments"], _arguments()
        if then != now:
            self.other_arguments = tuple(sorted({*then} ^ {*now})) or ("their order",)
        if not saved.get("over"):  # the script has not come to its first step yet, or did not say
            return
        self._over, self._newest = Stretches(saved["over"], saved["dropped"]), saved["newest"]
        self._is_recording, self._number = False, 0
        self._then = chain(self._over, [self._newest])
        first = next(self._then)
        self._expected = [_MORE] if first is None else first[1:]
        for event, place in self._beginning:
            if self._then is not None and event != _MORE:
                self._compare(event, place)

    @property
    def _under_way(self) -> Stretch:
        return self._begun() if self._is_first and self._is_recording else self._newest

    def _begun(self) -> Stretch:
        return [BEGINNING, *(event for event, _ in self._beginning)]

    def _leave_beginning(self) -> None:
        self._newest, self._is_first = self._under_way, False

    def _close(self, stretch: str) -> None:
        if self._over.add(self._newest):
            self._forgets(
                f"the record of what the script does has reached {MOST_BYTES >> 10} KiB: a later "
                f"round compares it from its pass {self._over.dropped} on alone"
            )
        self._newest = [stretch]

    def _compare(self, event: str, place: str = "") -> None:
        """Find an event among those to come in this stretch. Some may be left out, by
        ``is_replaying``."""
        if event in self._expected:
            self._expected = self._expected[self._expected.index(event) :]
        elif _MORE not in self._expected and not (self._number == 0 and event.startswith(LOADS)):
            then = ", ".join(self._expected) or "nothing more"
            self._end(f"has {event}, and had {then} then", place)

    def _end(self, detail: str, place: str = "") -> None:
        where = f"behind pass {self._number}" if self._number else "at its beginning"
        changed = ", ".join(self.other_arguments)
        because = f" Its arguments have changed: {changed}." if changed else ""
        way_out = (
            "`if not scalai.elastic().is_replaying:` leaves out what was done"
            if self._number
            else "have it follow from the script's arguments alone"
        )
        self._differs(
            f"{where} the script {detail}.{because} Nothing that was trained changes by it; what "
            f"follows from ranks, time or metrics of today's weights is another here: {way_out}",
            place or self._place(),
        )
        self.resume()


def _has_room(stretch: Stretch, event: str) -> bool:
    return event != stretch[-1] and len(stretch) <= _MOST_EVENTS


def _kept(event: str, place: int) -> str:
    return event if place < _MOST_EVENTS else _MORE


def _arguments() -> list[str]:
    given = [argument for argument in sys.argv[1:] if not argument.startswith(_BY_RANK)]
    text = json.dumps(given)
    return given if len(text) <= _MOST_ARGUMENTS else [hashlib.sha256(text.encode()).hexdigest()]
