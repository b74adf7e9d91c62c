"""The rule for leaving the running layout, common to jobs, ``scalai plan --from`` and replayed
traces."""

RESIDENCE_S = 2100.0
"""How long devices are taken to stay as they are: the mean of the predecessor's trace (Tenplex,
SOSP 2024, section 6.2)."""
MARGIN = 0.05
"""By so much more work a change must promise at least."""
MEASURED_SPREAD = 0.03
"""Half of the interval of a step that was measured in the job."""


def steps_within(residence_s: float, lost_s: float, step_s: float) -> float:
    """Return the steps until devices change again, after ``lost_s`` seconds without steps."""
    return max(0.0, residence_s - lost_s) / step_s


def needed_gain(spread: float) -> float:
    """Return the least relative gain of steps over the running layout.

    Args:
        spread: Half of the interval of the ratio of the two steps, relative.
    """
    return max(MARGIN, spread)


def is_worth_leaving(steps: float, present_steps: float, spread: float) -> bool:
    """Return whether ``steps`` exceed ``present_steps`` by the needed gain."""
    return steps > (1 + needed_gain(spread)) * present_steps
