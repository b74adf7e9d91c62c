"""What each rank wrote of each step, line by line, beside the ledger of the generations: hashes of
the samples that it read, so that a step that was done again can be seen to have had the same ones.

A rank writes a file. One that was killed may have torn its last line; it is left out. The lines of
all ranks of a step add up: hashes are sums over samples, in any layout.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from scalai.core import fields
from scalai.core.dataset.ledger import LedgerVerdict
from scalai.core.degrees.batches import combine_hashes
from scalai.core.errors import StoreError
from scalai.core.jsonable import Json


@dataclass(frozen=True, slots=True)
class StepLine:
    """One step of one rank.

    Attributes:
        run: Which start of the whole job.
        round: Of this run, as torchrun counts its restarts.
        consumed_samples: Of all ranks, the step included.
        samples_hash: Of the samples that this rank read; None: it reads none.
        loss, rate: None on ranks that do not have them.
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
    """One step of a job as it counts: that of the newest round that did it.

    ``samples_hash`` is that of the global batch, ``lr`` the rate after the step.
    """

    round: int
    step: int
    consumed_samples: int
    samples_hash: int
    loss: float | None
    lr: float | None


def read_lines(text: str, where: str) -> tuple[tuple[StepLine, ...], bool]:
    """Return the lines of a file, and whether its last one was torn.

    Raises:
        StoreError: Another line is damaged; names ``where``.
    """
    *whole, rest = text.split("\n")
    found = []
    for number, line in enumerate(whole):
        try:
            found.append(_line(fields.parsed(line)))
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
    """Unite the lines of all ranks to one entry a step, ordered by step; of a step done twice the
    newest round counts."""
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
    """Return the rounds of all runs in the order in which they were done: rounds of a run are
    numbered, and each file has its runs in order."""
    runs: dict[str, int] = {}
    for file in files:
        for line in file:
            runs.setdefault(line.run, len(runs))
    found = {line.attempt for file in files for line in file}
    return sorted(found, key=lambda attempt: (runs[attempt[0]], attempt[1]))


def judge_lines(files: Mapping[str, tuple[Sequence[StepLine], bool]]) -> LedgerVerdict:
    """Say whether the steps that were written follow each other, and had the same samples where
    they were done again.

    Args:
        files: By name what ``read_lines`` returned, the file of the lowest rank first.
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
    """Compare what each step consumed with what it did when it was done before."""
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
    """Yield the steps of a round: number, samples consumed, and the hash of the global batch; None:
    not all ranks that read samples have written it."""
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
    """Return a line as it is written."""
    return json.dumps(line.to_json()) + "\n"
