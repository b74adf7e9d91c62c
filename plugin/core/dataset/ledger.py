"""The samples that a training has consumed, pass by pass over each data set, since its first step;
and the proof that none was skipped or seen twice.

The ledger is part of the state: a generation carries the ledger of its step, and a job that goes
back to it goes back to its ledger too. The steps done since then are recorded as lost.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from scalai.core import fields
from scalai.core.dataset.drawn import COUNTED, Draw, Number, Pass, joined, maybe
from scalai.core.dataset.intervals import Intervals
from scalai.core.jsonable import Json


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """What the order of a data set follows from.

    Attributes:
        data_set: Its name.
        step: Behind this one it is so.
        facts: Such as size, seed, and weights of a blend; of what is no fact nobody says anything.
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
    """Return the latest facts that are known of a data set."""
    found: Mapping[str, Json] = {}
    for source in sources:
        found = source.facts if source.data_set == data_set else found
    return found


def difference(before: Mapping[str, Json], now: Mapping[str, Json]) -> str:
    """Say in which facts a data set is another one; empty: in none that both know."""
    return ", ".join(
        f"{name}={now[name]!r} (it was {before[name]!r})"
        for name in sorted(before.keys() & now.keys())
        if before[name] != now[name]
    )


def changes(sources: Iterable[SourceFacts]) -> tuple[tuple[SourceFacts, str], ...]:
    """Return where data sets have become others, and in what."""
    known: dict[str, Mapping[str, Json]] = {}
    found = []
    for source in sources:
        if text := difference(known.get(source.data_set, {}), source.facts):
            found.append((source, text))
        known[source.data_set] = source.facts
    return tuple(found)


VERSION = 1
MOST_STRETCHES = 512
"""Of so many rounds the steps are kept, of earlier ones only what they did together."""
EARLIER = "earlier rounds"
MOST_LOST = 256
"""Of so many rounds it is kept what they did in vain."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """The steps of one round: from ``step``, at which ``samples`` were consumed, to where the next
    one begins, or the ledger ends.

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
    """Steps that a round did and that the job went back behind: they count for nothing, and are
    done again.

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
    """Return lost steps of which the round has the name of its run: this one where only its number
    is known."""
    return lost if "-" in lost.round else replace(lost, round=f"{run}-{lost.round}")


@dataclass(frozen=True, slots=True)
class Ledger:
    """What a training has consumed.

    Attributes:
        since: The step at which the ledger begins, and the samples consumed by then: what came
            before is not proven. Samples are None where the script does not count them.
        at: The newest step that it knows, and the samples consumed by then.
        passes: In the order in which they were begun.
        stretches: The rounds of the job, oldest first.
        lost: Steps that were done and lost, oldest first.
        sources: What is known of the data sets, oldest first.
    """

    since: tuple[int, int | None]
    at: tuple[int, int | None]
    passes: tuple[Pass, ...] = ()
    stretches: tuple[Stretch, ...] = ()
    lost: tuple[Lost, ...] = ()
    sources: tuple[SourceFacts, ...] = ()

    @classmethod
    def begun(cls, step: int, samples: int | None) -> "Ledger":
        """Return the ledger of a training that has come to this step without one."""
        return cls((step, samples), (step, samples))

    def with_round(
        self, round: str, degrees: Mapping[str, int], lost: Iterable[Lost] = ()
    ) -> "Ledger":
        """Return the ledger with a round that goes on from it.

        Args:
            lost: What earlier rounds did and is in no generation, as far as the job knows. What of
                it this ledger has, because it is of a later step, is not lost.
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
        """Return the ledger that knows this of a data set, from its step on."""
        if known_of(self.sources, data_set) == facts:
            return self
        return replace(
            self, sources=(*self.sources, SourceFacts(data_set, self.at[0], dict(facts)))
        )

    def stepped(self, step: int, samples: int | None, draws: Sequence[Draw] = ()) -> "Ledger":
        """Return the ledger after a step, which has drawn this; where nobody says what, it is
        counted how many samples it has."""
        ledger, draws = self, draws or self._counted(samples)
        for draw in draws:
            ledger = ledger._with(ledger._with_draw(draw), (step, samples))
        return ledger if draws else self._with(self.passes, (step, samples))

    def objections(self, draws: Sequence[Draw], samples: int | None = None) -> Iterator[str]:
        """Yield by what these draws, made now, would break the order: samples that were consumed
        before, or that are passed over, or others than the script counts; ``samples``: as of
        ``stepped``."""
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
        """Return where a draw of this pass has to begin."""
        known = self._find(draw)
        if known is None:
            return self._next(draw)
        end = max(known.taken.end, known.unproven)
        return known.length or end if draw.number < known.last else end

    def _find(self, draw: Draw) -> Pass | None:
        """Return the pass that a draw is of."""
        for each in reversed(self.passes):
            if each.data_set == draw.data_set and each.first <= draw.number <= each.last:
                return each
        return None

    def _next(self, draw: Draw) -> int:
        """Return where a pass begins of which nothing is known: in the middle only where the ledger
        itself does."""
        is_first = not any(each.data_set == draw.data_set for each in self.passes)
        return draw.start if is_first and self.since[0] else 0

    def _with(self, passes: tuple[Pass, ...], at: tuple[int, int | None]) -> "Ledger":
        """Return the ledger after a step; made so, because ``replace`` takes as long as the rest of
        a step."""
        return Ledger(self.since, at, passes, self.stretches, self.lost, self.sources)

    def _with_draw(self, draw: Draw) -> tuple[Pass, ...]:
        known = self._find(draw)
        if known is not None and known.first == known.last:
            grown = known.with_draw(draw)
            return tuple([grown if each is known else each for each in self.passes])
        entry = Pass(
            draw.data_set, draw.number, draw.number, draw.length, draw.size, self._next(draw),
            Intervals(), Intervals(), draw.is_dealt,
        )  # fmt: skip
        if known is not None:  # one of several passes is drawn from again
            entry = replace(entry, taken=known.taken)
        return (*joined(self.passes, draw.data_set), entry.with_draw(draw))

    def _ends(self) -> Iterator[tuple[int, int | None]]:
        """Yield where each stretch ends: a step and samples."""
        yield from ((each.step, each.samples) for each in self.stretches[1:])
        if self.stretches:
            yield self.at

    def rounds(self) -> Iterator[tuple[Stretch, int, int | None]]:
        """Yield each stretch with the step and the samples at its end."""
        for stretch, (step, samples) in zip(self.stretches, self._ends(), strict=True):
            yield stretch, step, samples

    def to_json(self) -> dict[str, Json]:
        """Return plain values, with a digest of them; ``from_json`` reads them back."""
        content: dict[str, Json] = {
            "version": VERSION, "since": list(self.since), "at": list(self.at),
            "passes": [each.to_json() for each in self.passes],
            "stretches": [each.to_json() for each in self.stretches],
            "lost": [each.to_json() for each in self.lost],
        }  # fmt: skip
        if self.sources:
            content["sources"] = [each.to_json() for each in self.sources]
        return {**content, "digest": _digest(content)}

    @classmethod
    def from_json(cls, value: Json) -> "Ledger":
        """Read what ``to_json`` wrote. ``ValueError`` where it is damaged, or of another version:
        the states of two ranks that were mixed have no digest of their own."""
        table = fields.mapped(value, "ledger")
        content = {name: each for name, each in table.items() if name != "digest"}
        if (found := table.get("version")) != VERSION:
            raise ValueError(f"it is of version {found!r}, this release reads {VERSION}")
        if table.get("digest") != _digest(content):
            raise ValueError("its digest is not that of its content")
        try:
            return cls(
                _mark(table["since"], "since"), _mark(table["at"], "at"),
                tuple(map(Pass.from_json, fields.listed(table["passes"], "passes"))),
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
    """Yield the data sets, or the blends of some, of which a step draws other samples than it
    counts."""
    drawn: dict[str, int] = {}
    for draw in draws:
        name = draw.blend or draw.data_set
        drawn[name] = drawn.get(name, 0) + draw.stop - draw.start
    for name, count in drawn.items():
        if count != counted:
            yield f"{name}: the step drew {count} samples and counts {counted}"


def _folded(stretches: Sequence[Stretch]) -> tuple[Stretch, ...]:
    """Let the two oldest stretches stand as one, where there are many."""
    if len(stretches) <= MOST_STRETCHES:
        return tuple(stretches)
    return (replace(stretches[0], round=EARLIER, degrees={}), *stretches[2:])


def _mark(value: Json, name: str) -> tuple[int, int | None]:
    step, samples = fields.listed(value, name)
    return fields.whole_number(step, name), maybe(samples, name)


def _digest(content: Mapping[str, Json]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class LedgerVerdict:
    """What was found in a ledger.

    Attributes:
        breaks: By what the promise is broken; empty: it is kept.
        notes: What is no break and worth knowing: what is not proven, what a pass left, what was
            done twice because it was lost.
    """

    breaks: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def is_kept(self) -> bool:
        return not self.breaks

    def to_json(self) -> dict[str, Json]:
        return {"is_kept": self.is_kept, "breaks": list(self.breaks), "notes": list(self.notes)}


def judge(ledger: Ledger, step: int, samples: int | None) -> LedgerVerdict:
    """Say whether a ledger proves what a training has consumed that is at this step, and says that
    it has consumed so many samples."""
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
    """Compare the samples that were counted with those that were drawn: of one data set they are as
    many."""
    before, now = ledger.since[1], ledger.at[1]
    if before is None or now is None or len({each.data_set for each in ledger.passes}) > 1:
        return
    drawn, counted = sum(each.samples for each in ledger.passes), now - before
    if drawn != counted:
        yield f"{counted} samples were counted since step {ledger.since[0]}, {drawn} were drawn"


def _disordered(ledger: Ledger) -> Iterator[str]:
    """Rounds must follow each other, and nothing may be lost that lies ahead of the ledger's own
    beginning."""
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
    """Return what was left of the pass at this place when a later one began; None: nothing."""
    each = ledger.passes[place]
    is_over = any(other.data_set == each.data_set for other in ledger.passes[place + 1 :])
    if not is_over or each.length is None or each.taken.end >= each.length:
        return None
    return Intervals.of((max(each.taken.end, each.unproven), each.length)) or None


def text_of(lost: Lost, ledger: Ledger) -> str:
    """Say of lost steps how far they were done again."""
    again = min(ledger.at[0], lost.until)
    steps = f"steps {lost.after + 1} to {lost.until} of round {lost.round} were lost"
    if again >= lost.until:
        return f"{steps} and done again"
    done = f"{again - lost.after} of them" if again > lost.after else "none of them"
    return f"{steps}, {done} done again so far"


def name_of(entry: Pass) -> str:
    """Name a pass as a person reads it."""
    numbers = str(entry.first) if entry.count == 1 else f"{entry.first} to {entry.last}"
    return f"{entry.data_set}, pass {numbers}"
