"""How often a training is saved: what a snapshot costs against what is lost at a failure.

Source: J. W. Young, "A first order approximation to the optimum checkpoint interval",
Communications of the ACM 17 (9), 1974; J. T. Daly, "A higher order estimate of the optimum
checkpoint interval for restart dumps", Future Generation Computer Systems 22 (3), 2006, of which it
is the first-order term. Differs in: bounds, because both the cost and the rate are estimates.
"""

from math import isfinite, sqrt

MTBF_HOURS = 50_000.0
"""Hours of a worker between two failures, where nobody says otherwise. Meta's training of Llama 3
had 419 unexpected interruptions in 54 days on 16,384 GPUs, which is one in 50,700 hours of a GPU
("The Llama 3 Herd of Models", arXiv 2407.21783, section 3.3.4)."""

LEAST_S, MOST_S = 10.0, 3600.0
"""Snapshots are so far apart, at least and at most."""
LEAST_DURATIONS = 4.0
"""And at least so many times as long as one is written."""
MOST_STEPS = 1_000_000
SEEN_S = 3600.0
"""What was seen counts as the rate of failures of so long a time, at least."""


def mtbf_s(workers: int, mtbf_hours: float, failures: int, worker_s: float) -> float:
    """Return how long the job trains between two failures, in seconds.

    Of what is assumed, which the job's own failures correct slowly, and what was seen, which a few
    failures make, that which fails more often.

    Args:
        workers: How many train.
        mtbf_hours: Hours of one worker between two failures, as assumed; > 0.
        failures: How many this job has seen, while it has trained
        worker_s: for so many seconds, times its workers.
    """
    workers = max(1, workers)
    assumed = (1 + failures) / (mtbf_hours * 3600.0 + worker_s)
    seen = failures / max(worker_s, workers * SEEN_S)
    return 1.0 / (workers * max(assumed, seen))


def interval_s(cost_s: float, mtbf_s: float, write_s: float = 0.0) -> float:
    """Return the seconds of training between two snapshots that lose the least time.

    Args:
        cost_s: By how much one makes the training longer; what is no number counts as 0.
        mtbf_s: Between two failures; > 0.
        write_s: How long one is written, its replicas included.
    """
    cost_s = cost_s if isfinite(cost_s) and cost_s > 0 else 0.0
    write_s = write_s if isfinite(write_s) and write_s > 0 else 0.0
    least_s = min(MOST_S, max(LEAST_S, LEAST_DURATIONS * write_s))
    return min(MOST_S, max(least_s, sqrt(2.0 * cost_s * mtbf_s)))


def steps_of(interval_s: float, step_s: float) -> int:
    """Return the steps that come nearest to an interval, at least 1.

    Args:
        interval_s: In seconds.
        step_s: A usual step; > 0.
    """
    return max(1, round(min(MOST_STEPS, interval_s / step_s)))
