"""How far a job is in its data: passes over each sampler's data set, and samples within a pass.

A script of a later round runs from its beginning and knows nothing of the rounds before. It goes
through its passes again: those that were consumed yield nothing, the one under way yields what is
left, so that an epoch's number, and with it ``set_epoch``, come out as they were.
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
"""How many runs of passes it is known of where they ended."""


class Glances:
    """Passes that a script has only looked into, in bounded memory.

    Attributes:
        runs: Passes at equal distances: the first, how far they are apart, and how many they are.
        has_forgotten: Whether the oldest of more than ``REMEMBERED`` runs had to go.
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
        name: What the ledger calls its data set.
        current: The pass that the newest step drew from.
        consumed: Samples of it that were trained on.
        drawn: Passes of micro-batches that were drawn and not yet trained on, oldest first: a
            script may draw ahead.
        over: The pass that this process has gone through to its end last; None: none yet.
        glanced: Passes that the script has only looked into, as for the shape of a batch.
        size, length: Samples of the data set, and places of a pass over it with what fills its last
            batch; None: none was begun yet.
        has_begun: Whether this process has begun a pass.
        is_trained_on: Whether a step of this process was made of what was drawn.
        ends: Where passes that were trained on ended, as runs of passes, newest last: samples
            (None: all of the pass), and the number of passes.
        until: Samples at which the pass begun last ends, because it was taken up within and all
            before it were broken off there; None: at its end.
        looked_at: Micro-batches that were drawn of a pass that the engine has only evaluated yet;
            None: it has not.
        jumped: The pass, and the samples of it, that the script has left out by beginning a later
            one; None: it has left out nothing.
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
    """The pass that this process has begun last."""

    def next_pass(self, epoch: int) -> tuple[Number, int | None]:
        """Return which pass would begin now, and how many samples of it are consumed; None: all."""
        is_repeated = self._newest is not None and self._newest.epoch == epoch
        repeat = self._newest.repeat + 1 if is_repeated and self._newest is not None else 0
        number = Number(epoch, repeat)
        if number < self.current:
            return number, 0 if number in self.glanced else None
        return number, self.consumed if number == self.current else 0

    def begin(self, epoch: int) -> tuple[Number, int | None]:
        """Begin the next pass, and return what ``next_pass`` does."""
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
        """Count a micro-batch that was drawn of a pass."""
        (self.drawn if self.looked_at is None else self.looked_at).append(number)

    def use(self, *, is_trained: bool) -> None:
        """Say how the engine has used what was drawn last. A sampler that nothing was trained on
        yet may be that of an evaluation, whose samples are not those of a step."""
        if is_trained and self.looked_at is not None and self._newest != self.over:
            self.drawn.extend(self.looked_at)
            self.looked_at = None
        elif not is_trained and self.looked_at is None and not self.is_known:
            self.looked_at = list(self.drawn)
            self.drawn.clear()

    def _note_end(self) -> None:
        """Note where the pass begun last has ended, if it was trained on."""
        if self._newest is None or self._newest != self.current or not self.consumed:
            return
        is_whole = self._newest == self.over and self.until is None
        end = None if is_whole else self.consumed
        last, count = self.ends.pop() if self.ends else (end, 0)
        self.ends += [(end, count + 1)] if last == end else [(last, count), (end, 1)]
        del self.ends[:-REMEMBERED]

    def _leaves_out(self, number: Number) -> bool:
        """Whether a script that begins this pass leaves out some of the one that was under way."""
        is_behind_it = self._newest is None or self._newest < self.current
        end = self._usual_end or self.length
        is_left = end is not None and self.consumed < end
        return self.has_stepped and is_behind_it and number > self.current and is_left

    @property
    def _usual_end(self) -> int | None:
        """Samples at which all passes were broken off; None: they went to their ends, or differ."""
        return self.ends[0][0] if len(self.ends) == 1 else None

    @property
    def is_taken_up_within(self) -> bool:
        """Whether this process has begun in the middle of a pass."""
        return self._is_taken_up

    @property
    def has_ended_otherwise(self) -> bool:
        """Whether the newest pass has ended elsewhere than those before, and one of them was taken
        up within."""
        return self._is_taken_up and len(self.ends) > 1 and self.ends[-1][1] == 1

    @property
    def ends_as_one(self) -> bool:
        """Whether the pass begun last will end where one pass before it did, and no other says so:
        that one may have been cut short for once."""
        return self.until is not None and self.ends[0][1] == 1

    @property
    def is_replaying(self) -> bool:
        """Whether the script goes through passes that were consumed in earlier rounds."""
        return self.has_stepped and (self._newest is None or self._newest < self.current)

    @property
    def may_yield_nothing(self) -> bool:
        """Whether the pass begun last is one that earlier rounds may have consumed to its end."""
        return self.has_stepped and (self._newest is None or self._newest <= self.current)

    @property
    def is_known(self) -> bool:
        """Whether this is a sampler of the training, in whatever mode the model is."""
        return self.has_stepped or self.is_trained_on

    @property
    def has_stepped(self) -> bool:
        """Whether samples from here were trained on."""
        return self.current != START or self.consumed > 0

    def step(self, batches: Batches) -> bool:
        """Count an optimizer step. Returns whether its samples were drawn from here."""
        if len(self.drawn) < batches.num_micro_batches:
            return False
        for _ in range(batches.num_micro_batches):
            number = self.drawn.popleft()
        if number != self.current:
            self.current, self.consumed = number, 0
        self.consumed += batches.global_batch_size
        return True

    def drawn_by_step(self, batches: Batches) -> Draw:
        """Return what the newest step has drawn. Where a person has changed the global batch within
        a pass, its last batch may be filled further."""
        length = self.length if self.length is None else max(self.length, self.consumed)
        begin = self.consumed - batches.global_batch_size
        place = self.current, begin, self.consumed
        return Draw(self.name, *place, length, self.size, is_dealt=True)

    @property
    def place(self) -> tuple[Number, int]:
        """Where a later round goes on: a pass, and how many samples of it are consumed. Where the
        script has begun the next pass already, what it does at the end of one is done."""
        if self._newest is not None and self._newest > self.current:
            return self._newest, 0
        return self.current, self.consumed

    def restart(self, current: Number, consumed: int, glanced: Glances | None = None) -> None:
        """Be as far as told. What was begun and drawn before does not count."""
        self.current, self.consumed, self.glanced = current, consumed, glanced or Glances()
        self._is_taken_up = consumed > 0
        self.begin_after(None)
        self.drawn.clear()

    def begin_after(self, over: Number | None) -> None:
        """Have the script go on behind a pass; None: from the first one on."""
        self._newest = self.over = over


class Clocks:
    """The clocks of all samplers of this process, in the order in which the script makes them."""

    def __init__(self) -> None:
        self._clocks: list[Clock] = []
        self._to_come: list[Clock] = []
        """Restored clocks of samplers that the script has not made yet."""
        self.draws: tuple[Draw, ...] = ()
        """What the newest step has drawn."""

    def add(self) -> Clock:
        """Return the clock of one sampler more."""
        clock = self._to_come.pop(0) if self._to_come else Clock()
        clock.name = f"loader-{len(self._clocks)}"
        self._clocks.append(clock)
        return clock

    def step(self, batches: Batches) -> bool:
        """Count an optimizer step. Returns whether any sampler gave its samples."""
        self.draws = tuple(
            clock.drawn_by_step(batches) for clock in self._clocks if clock.step(batches)
        )
        return bool(self.draws)

    @property
    def is_replaying(self) -> bool:
        """Whether the script has not yet come to where the training is."""
        return any(clock.is_replaying for clock in (*self._clocks, *self._to_come))

    @property
    def have_begun(self) -> bool:
        """Whether the script has begun a pass in this round."""
        return any(clock.has_begun for clock in self._clocks)

    @property
    def are_taken_up_within(self) -> bool:
        """Whether this process has begun in the middle of a pass."""
        return any(clock.is_taken_up_within for clock in (*self._clocks, *self._to_come))

    @property
    def have_drawn(self) -> bool:
        """Whether a micro-batch was drawn that is not trained on yet."""
        return any(clock.drawn or clock.looked_at for clock in self._clocks)

    @property
    def may_yield_nothing(self) -> bool:
        """Whether a pass that is empty may be followed by one that is not."""
        return any(clock.may_yield_nothing for clock in self._clocks)

    def over(self) -> Json:
        """Return by sampler the pass that the script has gone through to its end last,
        [samplers]."""
        return [clock.over and list(clock.over) for clock in (*self._clocks, *self._to_come)]

    def begin_after(self, over: list[Json]) -> None:
        """Have a script that does not begin with its first pass go on behind what ``over``
        returned."""
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
        """Take up what ``take`` returned; samplers that were not told of begin anew."""
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
