"""When what runs is left for something else: the one rule of a running job, of ``scalai plan
--from`` and of a trace that is replayed."""

RESIDENCE_S = 2100.0
"""How long devices are taken to stay as they are: the mean of the predecessor's trace (Tenplex,
SOSP 2024, section 6.2)."""
MARGIN = 0.05
"""By so much more work a change must promise at least."""
MEASURED_SPREAD = 0.03
"""Half of the interval of a step that was measured in the job."""


def steps_within(residence_s: float, lost_s: float, step_s: float) -> float:
    """Return the steps that are made until devices change again, where ``lost_s`` pass before the
    first one."""
    return max(0.0, residence_s - lost_s) / step_s


def needed_gain(spread: float) -> float:
    """Return by what share something must do more steps than what runs.

    Args:
        spread: Half of the interval of the ratio of the two steps, over it.
    """
    return max(MARGIN, spread)


def is_worth_leaving(steps: float, present_steps: float, spread: float) -> bool:
    """Return whether so many steps are enough more than those that what runs would do."""
    return steps > (1 + needed_gain(spread)) * present_steps
