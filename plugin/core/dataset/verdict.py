"""What a ledger proves: that no sample of the training was skipped, and none seen twice."""

from collections.abc import Iterator
from dataclasses import dataclass

from scalai.core.dataset.drawn import Pass
from scalai.core.dataset.intervals import Intervals
from scalai.core.dataset.ledger import Ledger, Lost
from scalai.core.dataset.sources import changes
from scalai.core.jsonable import Json


@dataclass(frozen=True, slots=True)
class Verdict:
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


def judge(ledger: Ledger, step: int, samples: int | None) -> Verdict:
    """Say whether a ledger proves what a training has consumed that is at this step, and says that
    it has consumed so many samples."""
    return Verdict(tuple(_breaks(ledger, step, samples)), tuple(_notes(ledger)))


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
    yield from _miscounted(ledger)
    yield from _disordered(ledger)


def _miscounted(ledger: Ledger) -> Iterator[str]:
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
