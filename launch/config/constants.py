"""Constants in place of removed keys of the elastic configuration."""

import json
import os
from collections.abc import Mapping

from scalai.core.job.deadlines import STALL_S
from scalai.core.job.spacing import MTBF_HOURS
from scalai.core.planner.weighing import RESIDENCE_S

CONSTANTS: Mapping[str, tuple[float, str]] = {
    "store.mtbf_hours_per_worker": (
        MTBF_HOURS,
        "hours of one worker between two failures, until the job's own failures say more",
    ),
    "store.async_snapshots": (True, "a snapshot beside the training stops it for the least time"),
    "store.durable_keep": (2, "the generation before the newest stays, should that be damaged"),
    "store.replica_slowdown": (0.01, "replicas come in time at 1 % of a step in all but the "
                               "shortest spacings"),
    "resize.stall_s": (STALL_S, "seconds; jobs of long steps wait for ten of their usual steps"),
    "resize.quarantine_s": (60.0, "seconds, and twice as many after each further loss"),
    "resize.build_timeout_s": (300.0, "seconds; then the change is made without a standby"),
    "preemption.interval_s": (2.0, "seconds; providers give notice of 30 s or more"),
    "probe.health_timeout_s": (60.0, "seconds, as long as the slowest diagnosis of one GPU"),
    "planner.residence_s": (RESIDENCE_S, "seconds between two changes of a usual job"),
    "planner.trial_steps": (0, "no degrees are tried: measured steps correct the prediction"),
    "planner.figures": (0, "none: the planner knows the devices of `scalai plan --help`"),
}  # fmt: skip
"""Removed keys of the elastic configuration: the value in their place, and its reason. A file with
such a key is read without it."""
TEST_VARIABLE = "SCALAI_TEST_CONSTANTS"
"""Environment variable of the product's own tests: a JSON object that overrules ``CONSTANTS`` in
whole jobs. Nothing else sets it."""


def constant(key: str) -> float:
    """The constant in place of a removed key; ``key``: ``section.key``."""
    value, _ = CONSTANTS[key]
    return float(json.loads(os.environ.get(TEST_VARIABLE, "{}")).get(key, value))


def ignored(key: str, found: object) -> str:
    """The warning about a removed key of a file: what was found, and the constant."""
    value, reason = CONSTANTS[key]
    section, _, name = key.partition(".")
    return f"[{section}] {name} = {found!r} is ignored; it is always {value:g} ({reason})"
