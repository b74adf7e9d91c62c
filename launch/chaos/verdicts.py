"""Judges injected faults: detection, cost, and equality of the training with an uninterrupted
run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scalai.core.jsonable import Json
from scalai.launch.chaos.kinds import Effect, Fault, Heard


@dataclass(frozen=True, slots=True)
class ReportedRound:
    """A round begun after a fault, by its report: first ``step``, lost steps, and ``seconds`` of
    each phase. ``noticed_at``: seconds since the injection."""

    reason: str
    step: int | None
    steps_lost: int
    noticed_s: float
    total_s: float
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class FaultOutcome:
    """Observations of one fault.

    ``step``: the job's newest step at the fault, None: it did not strike. ``sign``: the job's or
    the injection's words for it; empty: not seen. ``seen_s``, ``back_s``: seconds from the
    injection to its detection, and to the training of all hosts (``step_to_pass``). ``limit``:
    limit of lost steps, None: none. ``skipped``: reason against an injection here. ``trouble``:
    other problems.
    """

    fault: Fault
    step: int | None = None
    sign: str = ""
    seen_s: float | None = None
    rounds: tuple[ReportedRound, ...] = ()
    back_s: float | None = None
    limit: int | None = None
    skipped: str = ""
    trouble: str = ""

    @property
    def steps_lost(self) -> int:
        return sum(each.steps_lost for each in self.rounds)

    @property
    def detect_s(self) -> float | None:
        """Seconds to the job's knowledge of the fault: to its first round after it, or without one,
        or after the job's end, to its words."""
        is_of_the_job = bool(self.rounds) and self.fault.kind.effect is not Effect.ENDS
        return self.rounds[0].noticed_s if is_of_the_job else self.seen_s

    @property
    def is_seen(self) -> bool:
        return self.step is not None and bool(self.sign)


def step_to_pass(step: int, rounds: Sequence[ReportedRound]) -> int:
    """Return the step to pass for a recovered job, with ``step`` at the fault: it may have gone
    back, and need not have repeated all lost steps."""
    begun = rounds[-1].step if rounds else None
    return step if begun is None else min(step, begun)


def problems(outcome: FaultOutcome) -> tuple[str, ...]:
    """Return the reasons of a failure; empty: as expected, or skipped."""
    if outcome.skipped:
        return ()
    found = []
    effect = outcome.fault.kind.effect
    if outcome.step is None:
        found.append("it did not strike")
    elif not outcome.sign:
        found.append("not seen: nothing that the job says shows it")
    if outcome.trouble:
        found.append(outcome.trouble)
    if outcome.is_seen and effect is Effect.ROUND and not outcome.rounds:
        found.append("no round was begun behind it")
    if outcome.is_seen and effect is Effect.NOTED and outcome.rounds:
        found.append(f"it cost a round: {outcome.rounds[0].reason}")
    if outcome.is_seen and outcome.back_s is None and not outcome.trouble:
        found.append("the job did not train again on all hosts")
    if outcome.limit is not None and outcome.steps_lost > outcome.limit:
        found.append(f"{outcome.steps_lost} steps were lost, {outcome.limit} may be")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run beside an uninterrupted one: compared steps, repeated ones, and differences."""

    steps: int
    again: int
    wrong: tuple[str, ...]


def compare(made: Sequence[tuple[int, float]], reference: Mapping[int, float]) -> Comparison:
    """Compare every step, repeated ones included, exactly.

    Args:
        made: Step and loss, in the order of the run.
        reference: Loss of each step of an uninterrupted run.
    """
    wrong = []
    steps = {step for step, _ in made}
    for step, loss in made:
        if step not in reference:
            wrong.append(f"step {step} is not in the uninterrupted run")
        elif loss != reference[step]:
            wrong.append(f"step {step}: {loss!r} instead of {reference[step]!r}")
    missing = sorted(set(range(1, max(steps, default=0) + 1)) - steps)
    if missing:
        wrong.append(f"{len(missing)} steps were never made: {missing[:5]}")
    if not steps:
        wrong.append("no step was made")
    return Comparison(len(steps), len(made) - len(steps), tuple(wrong))


@dataclass(frozen=True, slots=True)
class Verdict:
    """All of a schedule: outcomes of the faults, comparison of the losses (None: no reference), and
    final fingerprints by tensor of this run and the uninterrupted one (None: likewise)."""

    seed: int
    outcomes: tuple[FaultOutcome, ...]
    losses: Comparison | None = None
    fingerprints: tuple[Mapping[str, int], Mapping[str, int]] | None = None

    @property
    def wrong(self) -> tuple[str, ...]:
        """Differences from the uninterrupted run."""
        found = list(self.losses.wrong) if self.losses is not None else []
        if self.fingerprints is not None:
            own, other = self.fingerprints
            names = [n for n in sorted({*own, *other}) if own.get(n) != other.get(n)]
            found += [f"the final fingerprint of {name} differs" for name in names]
            found += [] if own else ["there is no final state"]
        return tuple(found)

    @property
    def passed(self) -> tuple[FaultOutcome, ...]:
        return tuple(each for each in self.outcomes if not each.skipped and not problems(each))

    @property
    def failed(self) -> tuple[FaultOutcome, ...]:
        return tuple(each for each in self.outcomes if problems(each))

    @property
    def holds(self) -> bool:
        """Whether every fault was seen and survived as stated, without differences."""
        return bool(self.passed) and not self.failed and not self.wrong

    def figures(self) -> dict[str, Json]:
        """Return the figures of ``make chaos``. A kind passes if each of its faults does."""
        failed = {each.fault.kind.name for each in self.failed}
        injected = {each.fault.kind.name for each in self.outcomes if each.is_seen}
        lost = dict[str, Json]()
        for each in self.outcomes:
            if each.is_seen:
                before = lost.get(each.fault.kind.name, {"lost": 0, "limit": each.limit})
                most = max(before["lost"], each.steps_lost)
                limits = [x for x in (before["limit"], each.limit) if x is not None]
                lost[each.fault.kind.name] = {"lost": most, "limit": max(limits, default=None)}
        return {
            "faults": len(injected),
            "passed": len(injected - failed) if not self.wrong else 0,
            "failed": sorted(failed),
            "skipped": {e.fault.kind.name: e.skipped for e in self.outcomes if e.skipped},
            "steps_lost_max": dict(sorted(lost.items())),
            "detect_s_max": {
                heard.name.lower(): self._detect_s_max(heard)
                for heard in (Heard.PROCESS, Heard.SILENCE, Heard.HANG)
            },
            "differs": list(self.wrong[:5]),
        }

    def _detect_s_max(self, heard: Heard) -> float | None:
        found = [
            each.detect_s
            for each in self.passed
            if each.fault.kind.heard is heard and each.detect_s is not None
        ]
        return round(max(found), 2) if found else None

    def to_json(self) -> dict[str, Json]:
        losses = self.losses
        return {
            "seed": self.seed,
            "holds": self.holds,
            **self.figures(),
            "outcomes": [to_json(each) for each in self.outcomes],
            "losses": losses and {
                "steps": losses.steps, "again": losses.again, "wrong": list(losses.wrong),
            },
            "fingerprints": self.fingerprints and {
                "run": {k: str(v) for k, v in self.fingerprints[0].items()},
                "reference": {k: str(v) for k, v in self.fingerprints[1].items()},
            },
        }  # fmt: skip


def to_json(outcome: FaultOutcome) -> dict[str, Json]:
    """Return an outcome in the format of the verdict's file."""
    fault = outcome.fault
    return {
        "kind": fault.kind.name, "hosts": list(fault.hosts), "at": str(fault.at),
        "step": outcome.step, "sign": outcome.sign, "seen_s": outcome.seen_s,
        "detect_s": outcome.detect_s, "back_s": outcome.back_s,
        "steps_lost": outcome.steps_lost, "limit": outcome.limit,
        "skipped": outcome.skipped, "problems": list(problems(outcome)),
        "rounds": [
            {
                "reason": each.reason, "step": each.step, "steps_lost": each.steps_lost,
                "noticed_s": each.noticed_s, "total_s": each.total_s,
                "seconds": dict(each.seconds),
            }
            for each in outcome.rounds
        ],
    }  # fmt: skip


def table(verdict: Verdict) -> str:
    """Return the verdict as lines for a person."""
    lines = [f"{'fault':18}{'on':12}{'step':>6}{'seen':>8}{'known':>8}{'back':>8}{'lost':>9}  "]
    for each in verdict.outcomes:
        lost = f"{each.steps_lost} of {'-' if each.limit is None else each.limit}"
        found = problems(each)
        word = f"skipped: {each.skipped}" if each.skipped else "; ".join(found) or "as stated"
        lines.append(
            f"{each.fault.kind.name:18}{','.join(each.fault.hosts):12}"
            f"{'-' if each.step is None else each.step:>6}{_s(each.seen_s):>8}"
            f"{_s(each.detect_s):>8}{_s(each.back_s):>8}{lost:>9}  {word}"
        )
    phases = [r.seconds for each in verdict.outcomes for r in each.rounds]
    if phases:
        sums = {name: sum(p.get(name, 0.0) for p in phases) for name in phases[0]}
        spent = ", ".join(f"{name} {value:.2f}" for name, value in sums.items() if value)
        lines.append(f"{len(phases)} rounds, seconds by phase: {spent}")
    if verdict.losses is not None:
        losses = verdict.losses
        lines.append(
            f"{losses.steps} steps ({losses.again} made once more) beside an uninterrupted run: "
            f"{'all equal' if not losses.wrong else losses.wrong[0]}"
        )
    if verdict.fingerprints is not None:
        lines.append(
            f"the final state of {len(verdict.fingerprints[0])} tensors beside that of an "
            f"uninterrupted run: {'equal' if not verdict.wrong else verdict.wrong[-1]}"
        )
    lines.append("all as stated" if verdict.holds else "NOT as stated")
    return "\n".join(lines)


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


INK, PALE, GOOD, BAD = "#22303c", "#b9c6d2", "#0b6e8f", "#c8443a"
PHASES = {
    "known": "#b9c6d2", "drain": "#6fb1c7", "snapshot": "#0b6e8f", "relaunch": "#5c6b78",
    "move": "#d9822b", "restore": "#a44a3f", "proof": "#5d4a7e", "first_step": "#e3b23c",
}  # fmt: skip


def draw(verdict: Mapping[str, Any], path: Path) -> Path | None:
    """Write the picture of a verdict as a PNG; return its path, None: matplotlib is not there.

    Args:
        verdict: As ``verdict.json`` has it.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
        from matplotlib.patches import Rectangle
    except ImportError:
        return None
    outcomes = [each for each in verdict["outcomes"] if not each["skipped"]]
    height = 1.6 + 0.32 * max(1, len(outcomes))
    figure, (times, steps) = plt.subplots(
        1, 2, figsize=(12, height), sharey=True, width_ratios=(2.2, 1), layout="constrained"
    )
    names = [f"{each['kind']} ({','.join(each['hosts'])})" for each in outcomes]
    places = list(range(len(outcomes)))
    for place, each in zip(places, outcomes, strict=True):
        left = 0.0
        for phase, color in PHASES.items():
            width = _seconds(each, phase)
            times.barh(place, width, left=left, color=color, height=0.62)
            left += width
        if each["back_s"] is not None:
            times.plot(each["back_s"], place, "|", color=INK, markersize=9)
        color = BAD if each["problems"] else GOOD
        steps.barh(place, each["steps_lost"], color=color, height=0.5)
        if each["limit"] is not None:
            steps.plot(each["limit"], place, "|", color=INK, markersize=11)
    times.set_yticks(places, names, fontsize=8)
    for label, each in zip(times.get_yticklabels(), outcomes, strict=True):
        label.set_color(BAD if each["problems"] else INK)
    times.invert_yaxis()
    times.set_xlabel("seconds until the next round trains, by phase; |: all hosts train again")
    steps.set_xlabel("steps lost; |: as many as may be")
    for axes in (times, steps):
        axes.spines[["top", "right"]].set_visible(False)
    handles = [Rectangle((0, 0), 1, 1, color=color) for color in PHASES.values()]
    times.legend(handles, list(PHASES), fontsize=7, loc="lower right", ncols=2, frameon=False)
    word = "as stated" if verdict["holds"] else "NOT as stated"
    figure.suptitle(f"{verdict['passed']} of {verdict['faults']} kinds of faults: {word}", x=0.5)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _seconds(outcome: Mapping[str, Any], phase: str) -> float:
    if phase == "known":
        return float(outcome["detect_s"] or 0.0)
    return float(sum(each["seconds"].get(phase, 0.0) for each in outcome["rounds"]))
