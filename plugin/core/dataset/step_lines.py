"""A line a step and rank, beside the ledger of the generations: hashes of the samples read, as the
proof of equal samples in a step done again.

A rank writes a file. A killed rank may have torn its last line; it is left out. The lines of all
ranks of a step add up: hashes are sums over samples, in any layout.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from scalai.core import fields
from scalai.core.dataset.ledger import LedgerVerdict
from scalai.core.degrees.batches import combine_hashes
from scalai.core.errors import StoreError
from scalai.core.jsonable import Json, parse_json


@dataclass(frozen=True, slots=True)
class StepLine:
    """One step of one rank.

    Attributes:
        run: Start of the whole job.
        round: Number in this run, as torchrun counts its restarts.
        consumed_samples: Samples of all ranks, the step included.
        samples_hash: Hash of this rank's samples; None: it reads none.
        loss, rate: None on ranks without them.
    """

    run: str
    round: int
    step: int
    consumed_samples: int
    samples_hash: int | None
    loss: float | None
    rate: float | None

    def to_json(self) -> dict[str, Json]:
        return {
            "run": self.run, "round": self.round, "step": self.step,
            "consumed_samples": self.consumed_samples, "hash": self.samples_hash,
            "loss": self.loss, "lr": self.rate,
        }  # fmt: skip

    @property
    def attempt(self) -> tuple[str, int]:
        return self.run, self.round


@dataclass(frozen=True, slots=True)
class StepEntry:
    """One step of a job, as done by its newest round.

    ``samples_hash`` is the hash of the global batch, ``lr`` the rate after the step.
    """

    round: int
    step: int
    consumed_samples: int
    samples_hash: int
    loss: float | None
    lr: float | None


def read_lines(text: str, where: str) -> tuple[tuple[StepLine, ...], bool]:
    """Lines of a file, and True after a torn last one.

    Raises:
        StoreError: Another line is damaged; names ``where``.
    """
    *whole, rest = text.split("\n")
    found = []
    for number, line in enumerate(whole):
        try:
            found.append(_line(parse_json(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"line {number + 1} of {where} is damaged ({error}), and others follow it: it was "
                "not torn by a kill. Take the file away."
            ) from error
    return tuple(found), bool(rest)


def _line(data: Json) -> StepLine:
    table = fields.mapped(data, "a step's line")
    return StepLine(
        fields.text(table["run"], "run"), fields.whole_number(table["round"], "round"),
        fields.whole_number(table["step"], "step"),
        fields.whole_number(table["consumed_samples"], "consumed_samples"),
        table["hash"], table["loss"], table["lr"],
    )  # fmt: skip


def united(files: Iterable[Sequence[StepLine]]) -> Mapping[int, StepEntry]:
    """One entry a step from the lines of all ranks, ordered by step; the newest round of a step
    counts."""
    attempts, steps = _attempts(files := list(files)), dict[int, list[StepLine]]()
    for line in (line for file in files for line in file):
        steps.setdefault(line.step, []).append(line)
    return {step: _entry(lines, attempts) for step, lines in sorted(steps.items())}


def _entry(lines: Sequence[StepLine], attempts: Sequence[tuple[str, int]]) -> StepEntry:
    newest = max((line.attempt for line in lines), key=attempts.index)
    kept = [line for line in lines if line.attempt == newest]
    hashes = [line.samples_hash for line in kept if line.samples_hash is not None]
    return StepEntry(
        kept[0].round, kept[0].step, kept[0].consumed_samples, combine_hashes(*hashes),
        next((line.loss for line in kept if line.loss is not None), None),
        next((line.rate for line in kept if line.rate is not None), None),
    )  # fmt: skip


def _attempts(files: Iterable[Sequence[StepLine]]) -> list[tuple[str, int]]:
    """Rounds of all runs in order of time: rounds of a run are numbered, and each file has its runs
    in order."""
    runs: dict[str, int] = {}
    for file in files:
        for line in file:
            runs.setdefault(line.run, len(runs))
    found = {line.attempt for file in files for line in file}
    return sorted(found, key=lambda attempt: (runs[attempt[0]], attempt[1]))


def losses_in_order(files: Sequence[Sequence[StepLine]]) -> list[tuple[int, float]]:
    """Steps with their losses in the order made; a step made again comes again."""
    order = {attempt: place for place, attempt in enumerate(_attempts(files))}
    found = {
        (order[line.attempt], line.step): line.loss
        for file in files
        for line in file
        if isinstance(line.loss, int | float)
    }
    return [(step, float(loss)) for (_, step), loss in sorted(found.items())]


def judge_lines(files: Mapping[str, tuple[Sequence[StepLine], bool]]) -> LedgerVerdict:
    """Judge the files: steps must follow each other, and repeats must have the same samples.

    Args:
        files: Results of ``read_lines`` by file name, the lowest rank first.
    """
    lines = [each for each, _ in files.values()]
    breaks = [
        *(fault for name, (each, _) in files.items() for fault in _two_writers(name, each)),
        *_gaps(united(lines)),
        *_other_samples(lines),
    ]
    torn = [f"{name}: its last line was torn" for name, (_, is_torn) in files.items() if is_torn]
    return LedgerVerdict(tuple(breaks), (*torn, *_repeats(lines)))


def _two_writers(name: str, lines: Sequence[StepLine]) -> Iterator[str]:
    """Within a round a rank goes from step to step."""
    last: dict[tuple[str, int], int] = {}
    for line in lines:
        if line.step <= last.get(line.attempt, -1):
            yield (
                f"{name}: step {line.step} of round {line.round} follows step "
                f"{last[line.attempt]}: two processes have written it"
            )
            return
        last[line.attempt] = line.step


def _gaps(entries: Mapping[int, StepEntry]) -> Iterator[str]:
    for before, after in pairwise(entries.values()):
        if after.step != before.step + 1:
            yield f"steps {before.step + 1} to {after.step - 1} are in no file"
        if after.consumed_samples <= before.consumed_samples:
            yield (
                f"step {after.step} ends at {after.consumed_samples} samples, step {before.step} "
                f"at {before.consumed_samples}"
            )


def _other_samples(files: Sequence[Sequence[StepLine]]) -> Iterator[str]:
    """Compare the samples of each step with those of its earlier rounds."""
    known: dict[int, tuple[int, int | None]] = {}
    for attempt in _attempts(files):
        for step, samples, value in _of_attempt(files, attempt):
            before = known.get(step, (samples, None))
            if before[0] != samples or (None not in (before[1], value) and before[1] != value):
                yield f"step {step} had other samples when round {attempt[1]} did it again"
            known[step] = samples, before[1] if value is None else value


def _of_attempt(
    files: Sequence[Sequence[StepLine]], attempt: tuple[str, int]
) -> Iterator[tuple[int, int, int | None]]:
    """Yield the steps of a round: number, consumed samples, hash of the global batch (None: the
    line of a rank is missing)."""
    steps: dict[int, list[StepLine]] = {}
    for file in files:
        for line in file:
            if line.attempt == attempt:
                steps.setdefault(line.step, []).append(line)
    most = max((len(lines) for lines in steps.values()), default=0)
    for step, lines in sorted(steps.items()):
        hashes = [line.samples_hash for line in lines if line.samples_hash is not None]
        is_whole = len(lines) == most and hashes
        yield step, lines[0].consumed_samples, combine_hashes(*hashes) if is_whole else None


def _repeats(files: Sequence[Sequence[StepLine]]) -> Iterator[str]:
    attempts = _attempts(files)
    firsts = {each: min(step for step, _, _ in _of_attempt(files, each)) for each in attempts}
    for before, after in pairwise(attempts):
        last = max(step for step, _, _ in _of_attempt(files, before))
        if firsts[after] <= last:
            yield (f"steps {firsts[after]} to {last} of round {before[1]} were lost and done again")


def line_text(line: StepLine) -> str:
    """A line as text."""
    return json.dumps(line.to_json()) + "\n"
