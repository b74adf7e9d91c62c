"""What happens in the demonstration, and what must be true of it: values in, verdicts out.

``demo.py`` carries it out; nothing here starts a process or reads a file.
"""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from scalai.launch.commands.job_history import Resize, difference

LOSS_LIMIT = 1e-6
"""Largest relative difference of a loss to the uninterrupted run's."""

ORDINARY_STEPS = 5
"""Steps after a change that tell how long a step of the new layout takes."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of resources, and the degrees that it must lead to. ``host``: which one comes or
    goes; at a start none: there are two."""

    kind: Literal["start", "leave", "join", "scale"]
    degrees: str
    host: str = ""
    workers: int = 0

    def __str__(self) -> str:
        match self.kind:
            case "start":
                return f"host {self.host} starts" if self.host else "two hosts start"
            case "leave":
                return f"host {self.host} leaves (SIGTERM)"
            case "join":
                return f"host {self.host} joins"
            case "scale":
                return f"scalai scale --nproc {self.workers}"

    @property
    def label(self) -> str:
        """A few words for a table or a picture."""
        match self.kind:
            case "start":
                return "start"
            case "leave":
                return f"{self.host} leaves"
            case "join":
                return f"{self.host} joins"
            case "scale":
                return f"scale to {self.workers}"


@dataclass(frozen=True, slots=True)
class Step:
    """One line of the losses. ``lr``: the rate that the step used; ``at``: when it ended, s."""

    step: int
    loss: float
    lr: float
    at: float


@dataclass(frozen=True, slots=True)
class Run:
    """What a training wrote down, in the order written."""

    steps: tuple[Step, ...]
    samples: tuple[tuple[int, int], ...]
    """Each step and the hash of the tokens it consumed."""

    @property
    def last_step(self) -> int:
        return max((line.step for line in self.steps), default=0)


def read_run(losses: str, samples: str) -> Run:
    """Read the two files of a run; a last line that is still being written is left out."""
    return Run(
        tuple(Step(**line) for line in _lines(losses)),
        tuple((line["step"], line["samples"]) for line in _lines(samples)),
    )


def _lines(text: str) -> Iterable[dict[str, Any]]:
    whole = text[: text.rfind("\n") + 1]
    return (json.loads(line) for line in whole.splitlines())


def pause_s(run: Run, resize: Resize) -> float:
    """Return the seconds that training stood still: the gap between the steps around a change,
    less one ordinary step of the new round."""
    lines = [line for line in run.steps if line.step >= resize.step]
    gaps = [after.at - before.at for before, after in pairwise(lines)]
    ordinary = statistics.median(gaps[1 : 1 + ORDINARY_STEPS]) if gaps[1:] else 0.0
    return max(0.0, gaps[0] - ordinary) if gaps else 0.0


@dataclass(frozen=True, slots=True)
class Check:
    """One promise, whether it was kept, and what was found."""

    promise: str
    is_kept: bool
    found: str


def check(
    elastic: Run,
    reference: Run,
    resizes: Sequence[Resize],
    first: tuple[Mapping[str, int], Mapping[str, int]],
    saved_step: int,
    story: Sequence[Change],
) -> tuple[Check, ...]:
    """Return every check of the demonstration.

    Args:
        elastic: The run whose resources changed.
        reference: The uninterrupted run.
        first: Fingerprints by tensor of both runs' first generations, the elastic run's first.
        saved_step: Step of the state that the last host left on disk.
    """
    return (
        _check_first(*first),
        check_degrees(resizes, story),
        _check_steps(elastic, reference, resizes),
        _check_losses(elastic, reference),
        _check_samples(elastic, reference),
        _check_rates(elastic, reference),
        check_proofs(resizes[1:]),
        Check(
            "the last host left the newest state on disk",
            saved_step == elastic.last_step,
            f"step {saved_step} of {elastic.last_step}",
        ),
    )


def _check_first(elastic: Mapping[str, int], reference: Mapping[str, int]) -> Check:
    unequal = sorted(
        name
        for name in elastic.keys() | reference.keys()
        if elastic.get(name) != reference.get(name)
    )
    found = f"{len(elastic)} tensors, fingerprints equal"
    if unequal or not elastic:
        found = f"{len(unequal)} tensors differ: {', '.join(unequal[:3]) or 'there are none'}"
    return Check("both runs began with the same state", bool(elastic) and not unequal, found)


def check_degrees(resizes: Sequence[Resize], story: Sequence[Change]) -> Check:
    found = [resize.after for resize in resizes]
    return Check(
        "the degrees are those of the table", found == [c.degrees for c in story], " → ".join(found)
    )


def _check_steps(elastic: Run, reference: Run, resizes: Sequence[Resize]) -> Check:
    last = elastic.last_step
    expected = list(range(1, last + 1))
    wrong = [
        name
        for name, steps in (
            ("losses", [line.step for line in elastic.steps]),
            ("samples", [step for step, _ in elastic.samples]),
            ("the uninterrupted run", [line.step for line in reference.steps]),
        )
        # Samples are written by another rank than losses: only their own order is fixed.
        if sorted(steps) != expected
    ]
    lost = sum(resize.steps_lost or 0 for resize in resizes)
    found = f"{last} steps, {lost} lost"
    if wrong:
        found += f"; missing or twice in {' and '.join(wrong)}"
    return Check("each step was made exactly once", last > 0 and not wrong and not lost, found)


def _check_losses(elastic: Run, reference: Run) -> Check:
    known = {line.step: line.loss for line in reference.steps}
    worst, step = max(
        ((difference(e.loss, known[e.step]), e.step) for e in elastic.steps if e.step in known),
        default=(math.inf, 0),
    )
    return Check(
        f"losses agree to {LOSS_LIMIT:.0e} at every step",
        worst <= LOSS_LIMIT,
        f"largest relative difference {worst:.1e}, at step {step}",
    )


def _check_samples(elastic: Run, reference: Run) -> Check:
    mine, its = dict(elastic.samples), dict(reference.samples)
    unequal = sorted(step for step in mine.keys() | its.keys() if mine.get(step) != its.get(step))
    return _equal_at_every_step("every batch had the same samples", unequal, len(mine))


def _check_rates(elastic: Run, reference: Run) -> Check:
    mine = {line.step: line.lr for line in elastic.steps}
    its = {line.step: line.lr for line in reference.steps}
    unequal = sorted(step for step in mine.keys() | its.keys() if mine.get(step) != its.get(step))
    return _equal_at_every_step("every step had the same learning rate", unequal, len(mine))


def _equal_at_every_step(promise: str, unequal: Sequence[int], steps: int) -> Check:
    found = f"equal at {steps} steps"
    if unequal:
        found = f"{len(unequal)} steps differ, the first is step {unequal[0]}"
    return Check(promise, steps > 0 and not unequal, found)


def check_proofs(restores: Sequence[Resize]) -> Check:
    proven = [resize for resize in restores if resize.proof.is_whole]
    tensors = ", ".join(str(resize.proof.proven or 0) for resize in restores)
    return Check(
        "every restored tensor is the written one",
        bool(restores) and len(proven) == len(restores),
        f"{len(proven)} of {len(restores)} restores proven ({tensors} tensors)",
    )
