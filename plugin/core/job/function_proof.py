"""Proof of one function across a change: numbers of one step, made by the old workers without its
update and by the new ones, and the limits of their differences.

Fingerprints prove the state, and do not cover a loss that depends on the layout.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

POLICIES = ("auto", "always", "never")
FACT = "proven_layouts"
"""Key of the layouts' keys in the facts of a generation."""
FP32 = (3e-6, 3e-5)
"""Largest relative difference of loss and gradient norm in float32: healthy changes differ by less
than 3e-7 of the loss, faults by more than 6e-5 of the loss or 1e-2 of the norm."""
SPREADS = 3.0
"""In 16 bit: limit in spreads of steps repeated at the same degrees."""
LEAST = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""And never below the rounding of the type: repetitions at the same degrees may be bit-equal, other
degrees sum in another order."""
PROOF_S = 20.0
"""Time for old workers to make their further step, in seconds: less than the coordinator's wait for
an answer."""
MOST_STEPS = 64
"""Steps with kept numbers, for a comparison when they are made again."""
REMADE = (3e-6, 3e-4)
"""Largest relative difference of a repeated step, in float32: the framework's own sum of the norm
is off by 1e-5 on a CPU."""
Made = tuple[int, float, float]
"""A step, its loss and its gradient norm; NaN: unknown."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers of a step before its update.

    Attributes:
        loss: Mean over all samples or tokens of the step; None: unknown.
        norm: Norm of the whole gradient; None: unknown.
        is_skipped: Its update was skipped, as by a loss scaler: the norm is meaningless.
        dtype: Dtype of the passes, in torch's word.
        framework: Name and version.
        obstacle: Obstacle to a comparison, such as dropout; empty: none.
        seconds: Duration of the step.
        norms: Norms of separately updated parts of the gradient, by name.
        is_random: Steps draw random numbers, even if this pass drew none.
    """

    loss: float | None = None
    norm: float | None = None
    is_skipped: bool = False
    dtype: str = "float32"
    framework: str = ""
    obstacle: str = ""
    seconds: float = 0.0
    norms: Mapping[str, float] = field(default_factory=dict)
    is_random: bool = False

    def __str__(self) -> str:
        return f"loss {_digits(self.loss)}, gradient norm {_digits(self.norm)}"


def _digits(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.9g}"


def merged(one: Numbers | None, other: Numbers | None) -> Numbers | None:
    """Numbers of several ranks of one step: only the last pipeline stage has the loss."""
    if one is None or other is None:
        return one or other
    return replace(
        one,
        loss=other.loss if one.loss is None else one.loss,
        norm=other.norm if one.norm is None else one.norm,
        norms={**other.norms, **one.norms},
        is_skipped=one.is_skipped or other.is_skipped,
        framework=one.framework or other.framework,
        obstacle=one.obstacle or other.obstacle,
        is_random=one.is_random or other.is_random,
        seconds=max(one.seconds, other.seconds),
    )


@dataclass(frozen=True, slots=True)
class Spread:
    """Largest relative differences of steps repeated at the same degrees; ``steps``: their
    number."""

    loss: float = 0.0
    norm: float = 0.0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class StepComparison:
    """Agreement of two makings of a step; None: not comparable. ``text``: their difference, or the
    obstacle."""

    is_same: bool | None
    text: str


def compare(
    before: Numbers | None, after: Numbers | None, spread: Spread = Spread()
) -> StepComparison:
    """Compare a step as it was made before a change and behind it."""
    if before is None or after is None:
        side = "old" if before is None else "new"
        return StepComparison(None, f"the {side} workers have given no numbers of the step")
    if before.obstacle or after.obstacle:
        return StepComparison(None, before.obstacle or after.obstacle)
    if (limits := _limits(before.dtype, spread)) is None:
        return StepComparison(None, f"{before.dtype}: no step was repeated at the same degrees yet")
    is_skipped = before.is_skipped or after.is_skipped
    pairs = [("loss", before.loss, after.loss, limits[0])]
    if not is_skipped:
        pairs.append(("norm", before.norm, after.norm, limits[1]))
        for part in sorted(before.norms.keys() & after.norms.keys()):
            pair = before.norms[part], after.norms[part]
            pairs.append((f"norm_of_{part}", *pair, limits[1]))
    found = [
        (name, difference(one, other), limit)
        for name, one, other, limit in pairs
        if one is not None and other is not None
    ]
    if not found:
        return StepComparison(None, "both sides know neither the loss nor the gradient norm")
    beyond = any(off > limit for _, off, limit in found)
    text = " ".join(f"{name}_differs={off:.2g} limit={limit:.2g}" for name, off, limit in found)
    return StepComparison(not beyond, f"{text} ({before}; then {after})")


@dataclass(frozen=True, slots=True)
class Remade:
    """The newest steps of a job, and its repeated ones.

    Attributes:
        steps: Newest numbers by step, with their round and layout.
        spread: Spread of steps repeated in their layout.
        warned: The last round with a logged difference.
    """

    steps: Mapping[int, tuple[int, str, float, float]] = field(default_factory=dict)
    spread: Spread = Spread()
    warned: int = 0


def remade(
    known: Remade,
    round: int,
    layout: str,
    dtype: str,
    made: Sequence[Made],
    *,
    is_random: bool = False,
) -> tuple[Remade, str]:
    """Compare a round's steps with the same steps of an earlier round; ``is_random``: only within
    one layout, for others have other random streams.

    Returns:
        The new record, and a log line: once a round, for a step beyond the limits.
    """
    steps, spread, text = dict(known.steps), known.spread, ""
    for step, loss, norm in made:
        earlier = steps.get(step)
        steps[step] = round, layout, loss, norm
        if earlier is None or earlier[0] == round or (is_random and earlier[1] != layout):
            continue
        off = difference_known(earlier[2], loss), difference_known(earlier[3], norm)
        limits = REMADE if dtype not in LEAST else _limits(dtype, spread)
        is_beyond = limits is not None and (off[0] > limits[0] or off[1] > limits[1])
        if earlier[1] == layout and not is_beyond:
            spread = Spread(max(spread.loss, off[0]), max(spread.norm, off[1]), spread.steps + 1)
        if is_beyond and not text:
            text = (
                f"step {step} computes otherwise than before: loss {earlier[2]:.9g}, then "
                f"{loss:.9g}; gradient norm {earlier[3]:.9g}, then {norm:.9g}; {earlier[1]}, then "
                f"{layout}"
            )
    kept = {step: steps[step] for step in sorted(steps)[-MOST_STEPS:]}
    warned = round if text else known.warned
    return Remade(kept, spread, warned), "" if known.warned == round else text


def difference_known(one: float, other: float) -> float:
    """Return the relative difference of two numbers, 0 if one is not known."""
    return 0.0 if math.isnan(one) or math.isnan(other) else difference(one, other)


def _limits(dtype: str, spread: Spread) -> tuple[float, float] | None:
    if dtype not in LEAST:
        return FP32
    least = LEAST[dtype]
    if not spread.steps:
        return None
    return max(least, SPREADS * spread.loss), max(least, SPREADS * spread.norm)


def difference(one: float, other: float) -> float:
    """Return the relative difference of two numbers; neither finite: they are equal."""
    if not math.isfinite(one) or not math.isfinite(other):
        return 0.0 if math.isfinite(one) == math.isfinite(other) else math.inf
    largest = max(abs(one), abs(other))
    return abs(one - other) / largest if largest else 0.0


@dataclass(frozen=True, slots=True)
class ProofAsked:
    """Workers of a round make a step more behind its end.

    Attributes:
        awaited: Hosts of the round that have not reported the step.
        before: Its numbers so far.
        until: How long they are waited for, by the job's clock.
    """

    round: int
    awaited: frozenset[str]
    before: Numbers | None = None
    until: float = 0.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """The new round has made the step and trains on; the old one has yet to report it."""

    asked: ProofAsked


@dataclass(frozen=True, slots=True)
class Refuted:
    """The round that ends computes another function: nothing of it is kept."""


@dataclass(frozen=True, slots=True)
class FunctionProof:
    """Knowledge of the function of a job's layouts.

    Attributes:
        known: Keys of layouts with a proven function, and the job's first one.
        framework, dtype, is_random: As reported with the newest round's first step; no framework:
            nothing measures its steps.
        remade: Numbers of the newest steps.
        proof: The proof under way, or its refutation.
        after: Numbers of the present round's first step.
        found: Outcome of the newest comparison, for the report; empty: none was made.
        seconds: Duration of the old workers' step.
        said: Newest logged reason for an unproven change.
    """

    known: tuple[str, ...] = ()
    framework: str = ""
    dtype: str = "float32"
    is_random: bool = False
    remade: Remade = Remade()
    proof: ProofAsked | Waiting | Refuted | None = None
    after: Numbers | None = None
    found: str = ""
    seconds: float = 0.0
    said: str = ""

    @property
    def asked(self) -> ProofAsked | None:
        """The step that the old workers make, until it is judged."""
        if isinstance(self.proof, Waiting):
            return self.proof.asked
        return self.proof if isinstance(self.proof, ProofAsked) else None

    @property
    def is_waiting(self) -> bool:
        return isinstance(self.proof, Waiting)

    @property
    def is_refuted(self) -> bool:
        return isinstance(self.proof, Refuted)
