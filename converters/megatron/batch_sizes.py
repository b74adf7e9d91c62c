"""Global batch sizes that a Megatron-LM job passes through, as its flags say them.

Source: megatron/core/num_microbatches_calculator.py of 0.14.0 to 0.20 (d98e8a64; the step schedule
is of 0.20).
"""

from collections.abc import Mapping, Sequence

from scalai.core.degrees.batches import BatchRamp
from scalai.core.errors import RefusedError, UsageError

RAMP, SCHEDULE = "--rampup-batch-size", "--step-batch-size-schedule"
_FACTORS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def ramp_sizes(words: Sequence[str], final: int) -> tuple[int, ...]:
    """Return the sizes that steps have by ``--rampup-batch-size START INCREMENT SAMPLES``, also the
    final one.

    Raises:
        UsageError: It is no ramp to ``final``.
    """
    text = " ".join(words)
    ramp = _ramp(words, final)
    start, samples = ramp.start, ramp.ramp_samples
    if start == final:
        raise UsageError(
            f"--rampup-batch-size {text} begins with the final batch of {final}, by which "
            "Megatron-LM divides by zero; leave it out."
        )
    # Megatron-LM grows by equal numbers of samples: with none it divides by zero.
    if samples < 1:
        raise UsageError(f"--rampup-batch-size {text}: {samples} samples; use 1 or more.")
    return ramp.passed


def _ramp(words: Sequence[str], final: int) -> BatchRamp:
    try:
        start, increment, samples = map(int, words)
        return BatchRamp(start, increment, samples, final)
    except (ValueError, RefusedError) as error:
        text = " ".join(words)
        raise UsageError(f"--rampup-batch-size {text} is no batch-size ramp: {error}") from error


def stated_batch(given: Mapping[str, Sequence[str]]) -> int | BatchRamp | None:
    """Return the global batch that flags state; None: they do not, or it is neither of one size nor
    a ramp.

    Raises:
        UsageError: A flag has something else behind it.
    """
    words = given.get("--global-batch-size")
    if not words or SCHEDULE in given:
        return None
    if not words[0].isdecimal():
        raise UsageError(f"--global-batch-size {words[0]} is no whole number.")
    final = int(words[0])
    return _ramp(given[RAMP], final) if RAMP in given else final


def step_sizes(words: Sequence[str]) -> tuple[int, ...]:
    """Return the sizes of ``--step-batch-size-schedule "THRESHOLD:SIZE ..."`` in their order.

    Raises:
        UsageError: It is no such schedule.
    """
    text = " ".join(words)
    steps = []
    for step in text.replace(",", " ").split():
        threshold, separator, size = step.partition(":")
        try:
            if not separator:
                raise ValueError
            steps.append((_number(threshold), _number(size)))
        except (ValueError, OverflowError):
            raise UsageError(
                f"--step-batch-size-schedule: {step!r} is no THRESHOLD:SIZE, such as 250B:1536."
            ) from None
    steps.sort()
    thresholds = [threshold for threshold, _ in steps]
    if not steps or thresholds[0] or len(set(thresholds)) < len(steps):
        raise UsageError(
            f"--step-batch-size-schedule {text!r}: the first threshold must be 0, and no other may "
            "be there twice."
        )
    if min(size for _, size in steps) < 1:
        raise UsageError(f"--step-batch-size-schedule {text!r}: every size must be 1 or more.")
    return tuple(size for _, size in steps)


def _number(text: str) -> int:
    word = text.strip().upper()
    factor = _FACTORS.get(word[-1:], 1)
    return int(float(word[:-1] if factor > 1 else word) * factor)
