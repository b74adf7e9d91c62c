"""The samples that a training has consumed, pass by pass over each data set, since its first step;
and the proof that none was skipped or seen twice.

The ledger is part of the state: a generation carries the ledger of its step, and a job that goes
back to it goes back to its ledger too. The steps done since then are recorded as lost.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from scalai.core import fields
from scalai.core.dataset.drawn import COUNTED, Draw, DrawnPass, Intervals, Number, joined, maybe
from scalai.core.jsonable import Json


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """Facts that determine the order of a data set, from a step on; a data set with other facts is
    noticed before a step draws from it.

    Attributes:
        data_set: Name.
        step: Last step before these facts hold.
        facts: Values by name, such as size, seed, and weights of a blend.
    """

    data_set: str
    step: int
    facts: Mapping[str, Json]

    def to_json(self) -> list[Json]:
        return [self.data_set, self.step, dict(self.facts)]

    @classmethod
    def from_json(cls, value: Json) -> "SourceFacts":
        data_set, step, facts = fields.listed(value, "a source")
        return cls(
            fields.text(data_set, "data_set"), fields.whole_number(step, "step"),
            dict(fields.mapped(facts, "facts")),
        )  # fmt: skip


def known_of(sources: Iterable[SourceFacts], data_set: str) -> Mapping[str, Json]:
    """Latest known facts of a data set."""
    found: Mapping[str, Json] = {}
    for source in sources:
        found = source.facts if source.data_set == data_set else found
    return found


def difference(before: Mapping[str, Json], now: Mapping[str, Json]) -> str:
    """Differences in the facts that both have, as text; empty: none."""
    return ", ".join(
        f"{name}={now[name]!r} (it was {before[name]!r})"
        for name in sorted(before.keys() & now.keys())
        if before[name] != now[name]
    )


def changes(sources: Iterable[SourceFacts]) -> tuple[tuple[SourceFacts, str], ...]:
    """Changes of data sets, each with its differences as text."""
    known: dict[str, Mapping[str, Json]] = {}
    found = []
    for source in sources:
        if text := difference(known.get(source.data_set, {}), source.facts):
            found.append((source, text))
        known[source.data_set] = source.facts
    return tuple(found)


VERSION = 1
MOST_STRETCHES = 512
"""Rounds with steps of their own in a ledger; earlier ones are folded into one."""
EARLIER = "earlier rounds"
MOST_LOST = 256
"""Entries of lost steps in a ledger, the newest ones."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """The steps of one round: from ``step``, with ``samples`` consumed, to the begin of the next
    round or the end of the ledger.

    Attributes:
        round: ``<run>-<round>``.
        degrees: Sizes of its parallel axes by their short names.
    """

    round: str
    step: int
    samples: int | None
    degrees: Mapping[str, int]

    def to_json(self) -> list[Json]:
        return [self.round, self.step, self.samples, dict(self.degrees)]

    @classmethod
    def from_json(cls, value: Json) -> "Stretch":
        round, step, samples, degrees = fields.listed(value, "a stretch")
        sizes = fields.mapped(degrees, "degrees")
        return cls(
            fields.text(round, "round"), fields.whole_number(step, "step"),
            maybe(samples, "samples"),
            {axis: fields.whole_number(size, axis, 1) for axis, size in sizes.items()},
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Lost:
    """Steps of a round that count for nothing: the job went back behind them and does them again.

    Attributes:
        round: ``<run>-<round>``.
        after, until: The steps ``after < step <= until``.
    """

    round: str
    after: int
    until: int

    def to_json(self) -> list[Json]:
        return [self.round, self.after, self.until]

    @classmethod
    def from_json(cls, value: Json) -> "Lost":
        round, after, until = fields.listed(value, "lost steps")
        return cls(
            fields.text(round, "round"), fields.whole_number(after, "after"),
            fields.whole_number(until, "until"),
        )  # fmt: skip


def of_run(run: str, lost: Lost) -> Lost:
    """Lost steps with the run in the round's name; ``run``, if there is only a number."""
    return lost if "-" in lost.round else replace(lost, round=f"{run}-{lost.round}")


@dataclass(frozen=True, slots=True)
class Ledger:
    """Samples that a training has consumed.

    Attributes:
        since: Step and consumed samples at the begin of the ledger; nothing before is proven.
            Samples are None where the script does not count them.
        at: Newest step, and the samples consumed by then.
        passes: Passes in the order of their begin.
        stretches: Rounds of the job, oldest first.
        lost: Lost steps, oldest first.
        sources: Facts of the data sets, oldest first.
    """

    since: tuple[int, int | None]
    at: tuple[int, int | None]
    passes: tuple[DrawnPass, ...] = ()
    stretches: tuple[Stretch, ...] = ()
    lost: tuple[Lost, ...] = ()
    sources: tuple[SourceFacts, ...] = ()

    @classmethod
    def begun(cls, step: int, samples: int | None) -> "Ledger":
        """Ledger of a training that has reached this step without one."""
        return cls((step, samples), (step, samples))

    def with_round(
        self, round: str, degrees: Mapping[str, int], lost: Iterable[Lost] = ()
    ) -> "Ledger":
        """Ledger with a further round.

        Args:
            lost: Steps of earlier rounds in no generation, as far as the job knows. Those in this
                ledger, which may be of a later step, are not lost.
        """
        ends = {stretch.round: step for stretch, step, _ in self.rounds()}
        found = dict.fromkeys(self.lost)
        for each in lost:
            after = max(each.after, ends.get(each.round, 0))
            if after < each.until:
                found.setdefault(replace(each, after=after))
        begun = Stretch(round, *self.at, dict(degrees))
        stretches = _folded([*self.stretches, begun])
        return replace(self, stretches=stretches, lost=tuple(found)[-MOST_LOST:])

    def with_source(self, data_set: str, facts: Mapping[str, Json]) -> "Ledger":
        """Ledger with facts of a data set, from the present step on."""
        if known_of(self.sources, data_set) == facts:
            return self
        return replace(
            self, sources=(*self.sources, SourceFacts(data_set, self.at[0], dict(facts)))
        )

    def stepped(self, step: int, samples: int | None, draws: Sequence[Draw] = ()) -> "Ledger":
        """Ledger after a step and its draws; without draws the step's samples are only counted."""
        ledger, draws = self, draws or self._counted(samples)
        for draw in draws:
            ledger = ledger._with(ledger._with_draw(draw), (step, samples))
        return ledger if draws else self._with(self.passes, (step, samples))

    def objections(self, draws: Sequence[Draw], samples: int | None = None) -> Iterator[str]:
        """Yield how these draws, made now, would break the order: samples consumed before, skipped,
        or more or fewer than the script counts (``samples``, as of ``stepped``)."""
        for draw in draws:
            expected = self._expected(draw)
            is_beyond = draw.length is not None and draw.stop > draw.length
            if draw.start == expected and not is_beyond:
                continue
            where = f"{draw.data_set}, pass {draw.number}"
            if draw.start < expected:
                yield f"{where}: samples {draw.start}:{min(draw.stop, expected)} a second time"
            elif draw.start > expected:
                yield f"{where}: samples {expected}:{draw.start} are passed over"
            if is_beyond:
                yield f"{where}: samples to {draw.stop} of a pass of {draw.length}"
        if draws and samples is not None and self.at[1] is not None:
            yield from _miscounted(draws, samples - self.at[1])

    def _counted(self, samples: int | None) -> Sequence[Draw]:
        before = self.at[1]
        if samples is None or before is None or samples <= before:
            return ()
        return (Draw(COUNTED, Number(0), before, samples),)

    def _expected(self, draw: Draw) -> int:
        """First place of a draw from this pass that keeps the order."""
        known = self._find(draw)
        if known is None:
            return self._next(draw)
        end = max(known.taken.end, known.unproven)
        return known.length or end if draw.number < known.last else end

    def _find(self, draw: Draw) -> DrawnPass | None:
        """Pass of a draw."""
        for each in reversed(self.passes):
            if each.data_set == draw.data_set and each.first <= draw.number <= each.last:
                return each
        return None

    def _next(self, draw: Draw) -> int:
        """First place of a new pass: above 0 only in a ledger that began within the training."""
        is_first = not any(each.data_set == draw.data_set for each in self.passes)
        return draw.start if is_first and self.since[0] else 0

    def _with(self, passes: tuple[DrawnPass, ...], at: tuple[int, int | None]) -> "Ledger":
        """Ledger after a step; ``replace`` would take as long as the rest of a step."""
        return Ledger(self.since, at, passes, self.stretches, self.lost, self.sources)

    def _with_draw(self, draw: Draw) -> tuple[DrawnPass, ...]:
        known = self._find(draw)
        if known is not None and known.first == known.last:
            grown = known.with_draw(draw)
            return tuple([grown if each is known else each for each in self.passes])
        entry = DrawnPass(
            draw.data_set, draw.number, draw.number, draw.length, draw.size, self._next(draw),
            Intervals(), Intervals(), draw.is_dealt,
        )  # fmt: skip
        if known is not None:  # one of several passes is drawn from again
            entry = replace(entry, taken=known.taken)
        return (*joined(self.passes, draw.data_set), entry.with_draw(draw))

    def _ends(self) -> Iterator[tuple[int, int | None]]:
        """Yield step and samples at the end of each stretch."""
        yield from ((each.step, each.samples) for each in self.stretches[1:])
        if self.stretches:
            yield self.at

    def rounds(self) -> Iterator[tuple[Stretch, int, int | None]]:
        """Yield each stretch, and step and samples at its end."""
        for stretch, (step, samples) in zip(self.stretches, self._ends(), strict=True):
            yield stretch, step, samples

    def to_json(self) -> dict[str, Json]:
        """Plain values and a digest of them; ``from_json`` reads them."""
        content: dict[str, Json] = {
            "version": VERSION, "since": list(self.since), "at": list(self.at),
            "passes": [each.to_json() for each in self.passes],
            "stretches": [each.to_json() for each in self.stretches],
            "lost": [each.to_json() for each in self.lost],
        }  # fmt: skip
        if self.sources:
            content["sources"] = [each.to_json() for each in self.sources]
        return {**content, "digest": fields.digest_of(content)}

    @classmethod
    def from_json(cls, value: Json) -> "Ledger":
        """Read the values of ``to_json``. Raises ``ValueError`` for damage, another version, or a
        mixture of two ranks' states: it has no digest of its own."""
        table = fields.mapped(value, "ledger")
        content = {name: each for name, each in table.items() if name != "digest"}
        if (found := table.get("version")) != VERSION:
            raise ValueError(f"it is of version {found!r}, this release reads {VERSION}")
        if table.get("digest") != fields.digest_of(content):
            raise ValueError("its digest is not that of its content")
        try:
            return cls(
                _mark(table["since"], "since"), _mark(table["at"], "at"),
                tuple(map(DrawnPass.from_json, fields.listed(table["passes"], "passes"))),
                tuple(map(Stretch.from_json, fields.listed(table["stretches"], "stretches"))),
                tuple(map(Lost.from_json, fields.listed(table["lost"], "lost"))),
                tuple(
                    SourceFacts.from_json(each)
                    for each in fields.listed(table.get("sources", []), "sources")
                ),
            )  # fmt: skip
        except (KeyError, TypeError) as error:
            raise ValueError(f"it lacks {error}, or has it in another form") from error


def _miscounted(draws: Iterable[Draw], counted: int) -> Iterator[str]:
    """Yield the data sets, or blends, with another number of drawn samples than counted."""
    drawn: dict[str, int] = {}
    for draw in draws:
        name = draw.blend or draw.data_set
        drawn[name] = drawn.get(name, 0) + draw.stop - draw.start
    for name, count in drawn.items():
        if count != counted:
            yield f"{name}: the step drew {count} samples and counts {counted}"


def _folded(stretches: Sequence[Stretch]) -> tuple[Stretch, ...]:
    """Fold the two oldest of too many stretches into one."""
    if len(stretches) <= MOST_STRETCHES:
        return tuple(stretches)
    return (replace(stretches[0], round=EARLIER, degrees={}), *stretches[2:])


def _mark(value: Json, name: str) -> tuple[int, int | None]:
    step, samples = fields.listed(value, name)
    return fields.whole_number(step, name), maybe(samples, name)


@dataclass(frozen=True, slots=True)
class LedgerVerdict:
    """Result of the proof of a ledger.

    Attributes:
        breaks: Samples skipped or seen twice, and contradictions; empty: the promise is kept.
        notes: Unproven steps, rests of passes, steps lost and done again.
    """

    breaks: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def is_kept(self) -> bool:
        return not self.breaks

    def to_json(self) -> dict[str, Json]:
        return {"is_kept": self.is_kept, "breaks": list(self.breaks), "notes": list(self.notes)}


def judge(ledger: Ledger, step: int, samples: int | None) -> LedgerVerdict:
    """Judge the ledger of a training at this step, by whose state so many samples are consumed."""
    return LedgerVerdict(tuple(_breaks(ledger, step, samples)), tuple(_notes(ledger)))


def _breaks(ledger: Ledger, step: int, samples: int | None) -> Iterator[str]:
    if ledger.at[0] != step:
        yield f"the state is of step {step}, its ledger of step {ledger.at[0]}"
    elif None not in (samples, ledger.at[1]) and samples != ledger.at[1]:
        yield f"the state counts {samples} samples, its ledger {ledger.at[1]}"
    for each in ledger.passes:
        if each.skipped:
            yield f"{name_of(each)}: samples {each.skipped} were skipped"
        if each.twice:
            yield f"{name_of(each)}: samples {each.twice} were seen twice"
        if each.length is not None and each.taken.end > each.length:
            beyond = f"{each.length}:{each.taken.end}"
            yield f"{name_of(each)}: samples {beyond} are beyond its end"
    for source, text in changes(ledger.sources):
        yield f"{source.data_set}: another one from step {source.step + 1} on: {text}"
    yield from _drawn_otherwise(ledger)
    yield from _disordered(ledger)


def _drawn_otherwise(ledger: Ledger) -> Iterator[str]:
    """Compare counted and drawn samples of a training on one data set."""
    before, now = ledger.since[1], ledger.at[1]
    if before is None or now is None or len({each.data_set for each in ledger.passes}) > 1:
        return
    drawn, counted = sum(each.samples for each in ledger.passes), now - before
    if drawn != counted:
        yield f"{counted} samples were counted since step {ledger.since[0]}, {drawn} were drawn"


def _disordered(ledger: Ledger) -> Iterator[str]:
    """Rounds must follow each other, from the begin of the ledger on."""
    begins = [each.step for each in ledger.stretches]
    if begins and (begins != sorted(begins) or begins[0] < ledger.since[0]):
        yield f"rounds begin at steps {begins}, which do not follow each other"
    if begins and begins[-1] > ledger.at[0]:
        yield f"the last round begins at step {begins[-1]}, behind the ledger's step {ledger.at[0]}"


def _notes(ledger: Ledger) -> Iterator[str]:
    step, samples = ledger.since
    if step:
        counted = "" if samples is None else f" ({samples} samples)"
        yield f"steps 1 to {step}{counted} are unproven: the ledger begins behind them"
    for place, each in enumerate(ledger.passes):
        if not each.is_dealt:
            yield f"{name_of(each)}: counted, not seen at a sampler"
        if each.size is not None and each.length is not None and each.length > each.size:
            filled = each.length - each.size
            yield f"{name_of(each)}: its last batch is filled with the first {filled} samples"
        if (left := left_of(ledger, place)) is not None:
            yield f"{name_of(each)}: samples {left} were left when the next pass began"
    for lost in ledger.lost:
        yield text_of(lost, ledger)


def left_of(ledger: Ledger, place: int) -> Intervals | None:
    """Rest of a pass, by its index, at the begin of a later one; None: nothing."""
    each = ledger.passes[place]
    is_over = any(other.data_set == each.data_set for other in ledger.passes[place + 1 :])
    if not is_over or each.length is None or each.taken.end >= each.length:
        return None
    return Intervals.of((max(each.taken.end, each.unproven), each.length)) or None


def text_of(lost: Lost, ledger: Ledger) -> str:
    """Lost steps, and how far they were done again, as text."""
    again = min(ledger.at[0], lost.until)
    steps = f"steps {lost.after + 1} to {lost.until} of round {lost.round} were lost"
    if again >= lost.until:
        return f"{steps} and done again"
    done = f"{again - lost.after} of them" if again > lost.after else "none of them"
    return f"{steps}, {done} done again so far"


def name_of(entry: DrawnPass) -> str:
    """Name of a pass for people."""
    numbers = str(entry.first) if entry.count == 1 else f"{entry.first} to {entry.last}"
    return f"{entry.data_set}, pass {numbers}"
