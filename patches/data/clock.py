"""Position of a job in its data: passes over each sampler's data set, and samples within a pass.

A script of a later round runs from its beginning, through its passes again: consumed ones yield
nothing, the current one yields its rest. So an epoch's number, and with it ``set_epoch``, come out
as they were.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from scalai.core.dataset.drawn import Draw, Number
from scalai.core.degrees.batches import Batches
from scalai.core.jsonable import Json

START = Number(0)
"""Without ``set_epoch`` all passes are of epoch 0."""
REMEMBERED = 64
"""Kept runs of passes with known ends."""


class Glances:
    """Passes a script has only looked into, in bounded memory.

    Attributes:
        runs: Passes at equal distances: the first, the distance, the number of passes.
        has_forgotten: True once runs beyond ``REMEMBERED`` were dropped, oldest first.
    """

    def __init__(self, runs: Sequence[tuple[Number, Number, int]] = ()) -> None:
        self.runs, self.has_forgotten = list(runs), False

    def append(self, number: Number) -> None:
        if self.runs:
            first, apart, count = self.runs[-1]
            far = Number(number.epoch - first.epoch, number.repeat - first.repeat)
            if count == 1 or far == Number(apart.epoch * count, apart.repeat * count):
                self.runs[-1] = first, far if count == 1 else apart, count + 1
                return
        self.runs.append((number, START, 1))
        self.has_forgotten |= len(self.runs) > REMEMBERED
        del self.runs[:-REMEMBERED]

    def __contains__(self, number: Number) -> bool:
        return any(_is_of(number, *run) for run in self.runs)


def _is_of(number: Number, first: Number, apart: Number, count: int) -> bool:
    epochs, repeats = number.epoch - first.epoch, number.repeat - first.repeat
    far, each = (epochs, apart.epoch) if apart.epoch else (repeats, apart.repeat)
    place = far // each if each else 0
    is_within = 0 <= place < count
    return is_within and (epochs, repeats) == (apart.epoch * place, apart.repeat * place)


@dataclass(slots=True)
class Clock:
    """The passes over one sampler.

    Attributes:
        name: Name of the data set in the ledger.
        current: Pass of the newest step.
        consumed: Samples of it in past steps.
        drawn: Passes of drawn micro-batches before their step, oldest first: a script may draw
            ahead.
        over: Last pass this process went through to its end; None: none yet.
        glanced: Passes the script has only looked into, as for the shape of a batch.
        size, length: Samples of the data set, and places of a pass with a filled last batch; None:
            no pass was begun yet.
        has_begun: True once this process has begun a pass.
        is_trained_on: True once a step of this process used a draw.
        ends: Ends of trained passes, as runs, newest last: samples (None: all of the pass), and the
            number of passes.
        until: Samples at the end of the newest pass, taken up within if all before it were broken
            off there; None: its own end.
        looked_at: Micro-batches of a pass in evaluation so far; None: not in evaluation.
        jumped: The pass, and its consumed samples, left out by a script that began a later one;
            None: nothing was left out.
    """

    name: str = ""
    current: Number = START
    consumed: int = 0
    drawn: deque[Number] = field(default_factory=deque)
    over: Number | None = None
    glanced: Glances = field(default_factory=Glances)
    size: int | None = None
    length: int | None = None
    has_begun: bool = False
    is_trained_on: bool = False
    ends: list[tuple[int | None, int]] = field(default_factory=list)
    until: int | None = None
    looked_at: list[Number] | None = None
    jumped: tuple[Number, int] | None = None
    _is_taken_up: bool = False
    _newest: Number | None = None
    """Newest pass of this process."""

    def next_pass(self, epoch: int) -> tuple[Number, int | None]:
        """Return the next pass, and its consumed samples; None: all."""
        is_repeated = self._newest is not None and self._newest.epoch == epoch
        repeat = self._newest.repeat + 1 if is_repeated and self._newest is not None else 0
        number = Number(epoch, repeat)
        if number < self.current:
            return number, 0 if number in self.glanced else None
        return number, self.consumed if number == self.current else 0

    def begin(self, epoch: int) -> tuple[Number, int | None]:
        """Begin the next pass. Returns as ``next_pass``."""
        number, consumed = self.next_pass(epoch)
        self.has_begun, self.looked_at = True, None
        self._note_end()
        self.jumped = (self.current, self.consumed) if self._leaves_out(number) else None
        usual = self._usual_end
        self.until = usual if usual is not None and 0 < (consumed or 0) <= usual else None
        if self._newest is not None and self._newest != self.over:
            self.drawn.clear()  # the script has broken off the pass before, and leaves its rest
            if (self._newest, 0) >= (self.current, self.consumed):
                self.glanced.append(self._newest)
        self._newest = number
        return number, consumed

    def draw(self, number: Number) -> None:
        (self.drawn if self.looked_at is None else self.looked_at).append(number)

    def use(self, *, is_trained: bool) -> None:
        """Note the engine's use of the newest draw. An untrained sampler may belong to an
        evaluation, and its samples to no step."""
        if is_trained and self.looked_at is not None and self._newest != self.over:
            self.drawn.extend(self.looked_at)
            self.looked_at = None
        elif not is_trained and self.looked_at is None and not self.is_known:
            self.looked_at = list(self.drawn)
            self.drawn.clear()

    def _note_end(self) -> None:
        """Note the end of the newest pass, if it was trained on."""
        if self._newest is None or self._newest != self.current or not self.consumed:
            return
        is_whole = self._newest == self.over and self.until is None
        end = None if is_whole else self.consumed
        last, count = self.ends.pop() if self.ends else (end, 0)
        self.ends += [(end, count + 1)] if last == end else [(last, count), (end, 1)]
        del self.ends[:-REMEMBERED]

    def _leaves_out(self, number: Number) -> bool:
        """True if a script leaves out the rest of the current pass by beginning this one."""
        is_behind_it = self._newest is None or self._newest < self.current
        end = self._usual_end or self.length
        is_left = end is not None and self.consumed < end
        return self.has_stepped and is_behind_it and number > self.current and is_left

    @property
    def _usual_end(self) -> int | None:
        """Samples at the common end of all broken-off passes; None: they ended whole, or differ."""
        return self.ends[0][0] if len(self.ends) == 1 else None

    @property
    def is_taken_up_within(self) -> bool:
        """True if this process has begun in the middle of a pass."""
        return self._is_taken_up

    @property
    def has_ended_otherwise(self) -> bool:
        """True if the newest pass has another end than those before, one taken up within."""
        return self._is_taken_up and len(self.ends) > 1 and self.ends[-1][1] == 1

    @property
    def ends_as_one(self) -> bool:
        """True if the newest pass will end at the end of a single earlier one, perhaps cut short
        for once."""
        return self.until is not None and self.ends[0][1] == 1

    @property
    def is_replaying(self) -> bool:
        """True while the script goes through passes of earlier rounds."""
        return self.has_stepped and (self._newest is None or self._newest < self.current)

    @property
    def may_yield_nothing(self) -> bool:
        """True if earlier rounds may have consumed the newest pass to its end."""
        return self.has_stepped and (self._newest is None or self._newest <= self.current)

    @property
    def is_known(self) -> bool:
        """True for a sampler of the training, in any mode of the model."""
        return self.has_stepped or self.is_trained_on

    @property
    def has_stepped(self) -> bool:
        """True once samples from here were trained on."""
        return self.current != START or self.consumed > 0

    def step(self, batches: Batches, passes: int) -> bool:
        """Count an optimizer step of so many passes of this process. Returns True if its samples
        were drawn from here."""
        if len(self.drawn) < passes:
            return False
        for _ in range(passes):
            number = self.drawn.popleft()
        if number != self.current:
            self.current, self.consumed = number, 0
        self.consumed += batches.global_batch_size
        return True

    def drawn_by_step(self, batches: Batches) -> Draw:
        """Return the newest step's draw. If a person has changed the global batch within a pass,
        its last batch may be filled further."""
        length = self.length if self.length is None else max(self.length, self.consumed)
        begin = self.consumed - batches.global_batch_size
        place = self.current, begin, self.consumed
        return Draw(self.name, *place, length, self.size, is_dealt=True)

    @property
    def place(self) -> tuple[Number, int]:
        """Start of a later round: a pass, and its consumed samples. It is the pass of the oldest
        draw ahead of the steps; without any, the next pass once the script has begun it: all work
        at the end of the pass before is done."""
        if self.drawn:
            return self.drawn[0], self.consumed if self.drawn[0] == self.current else 0
        if self._newest is not None and self._newest > self.current:
            return self._newest, 0
        return self.current, self.consumed

    def restart(self, current: Number, consumed: int, glanced: Glances | None = None) -> None:
        """Move to a position. Passes begun and draws made before do not count."""
        self.current, self.consumed, self.glanced = current, consumed, glanced or Glances()
        self._is_taken_up = consumed > 0
        self.begin_after(None)
        self.drawn.clear()

    def begin_after(self, over: Number | None) -> None:
        """Have the script go on behind a pass; None: from the first one on."""
        self._newest = self.over = over


class Clocks:
    """The clocks of all samplers of this process, in the script's order."""

    def __init__(self) -> None:
        self._clocks: list[Clock] = []
        self._to_come: list[Clock] = []
        """Restored clocks of samplers to be made by the script."""
        self.draws: tuple[Draw, ...] = ()
        """Draws of the newest step."""

    def add(self) -> Clock:
        clock = self._to_come.pop(0) if self._to_come else Clock()
        clock.name = f"loader-{len(self._clocks)}"
        self._clocks.append(clock)
        return clock

    def step(self, batches: Batches, passes: int) -> bool:
        """Count an optimizer step of so many passes. Returns True if any sampler gave its
        samples."""
        self.draws = tuple(
            clock.drawn_by_step(batches) for clock in self._clocks if clock.step(batches, passes)
        )
        return bool(self.draws)

    @property
    def is_replaying(self) -> bool:
        """True until the script has reached the training's position."""
        return any(clock.is_replaying for clock in (*self._clocks, *self._to_come))

    @property
    def have_begun(self) -> bool:
        """True once the script has begun a pass in this round."""
        return any(clock.has_begun for clock in self._clocks)

    @property
    def are_taken_up_within(self) -> bool:
        """True if this process has begun in the middle of a pass."""
        return any(clock.is_taken_up_within for clock in (*self._clocks, *self._to_come))

    @property
    def have_drawn(self) -> bool:
        return any(clock.drawn or clock.looked_at for clock in self._clocks)

    @property
    def may_yield_nothing(self) -> bool:
        """True if an empty pass may precede another one with data."""
        return any(clock.may_yield_nothing for clock in self._clocks)

    def over(self) -> Json:
        """Return each sampler's last pass gone through to its end, [samplers]."""
        return [clock.over and list(clock.over) for clock in (*self._clocks, *self._to_come)]

    def begin_after(self, over: list[Json]) -> None:
        """Let a script without its first passes go on behind those of ``over``."""
        for clock, state in zip((*self._clocks, *self._to_come), over, strict=False):
            clock.begin_after(state and Number(*state))

    def take(self) -> Json:
        """Return how far every sampler is, [samplers]."""
        return [
            {
                "pass": list(clock.place[0]), "consumed": clock.place[1],
                "glanced": [[*first, *apart, n] for first, apart, n in clock.glanced.runs],
                "ends": [list(run) for run in clock.ends], "length": clock.length,
            }
            for clock in (*self._clocks, *self._to_come)
        ]  # fmt: skip

    def put(self, saved: list[Mapping[str, Json]]) -> None:
        """Take up the result of ``take``; samplers missing in it begin anew."""
        self._to_come = []
        for clock, state in zip_longest(self._clocks, saved):
            if clock is None:
                self._to_come.append(clock := Clock())
            if state is None:
                clock.restart(START, 0)
            else:
                runs = [(Number(*r[:2]), Number(*r[2:4]), r[4]) for r in state["glanced"]]
                glances = Glances(runs)
                clock.restart(Number(*state["pass"]), int(state["consumed"]), glances)
                clock.ends = [(end, count) for end, count in state["ends"]]
                clock.length = state["length"]
