"""Jobs of the law with some of their fields, by the fields' own names: each names one record."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

from scalai.core.job import membership as m

RECORDS = (
    "settings", "budget", "change", "attempt", "stop", "states", "copies", "health", "takeover",
)  # fmt: skip
"""Fields of a job that are records of its fields."""


def but(job: m.Job, **facts: Any) -> m.Job:
    """Return the job with these fields, of its own or of its records."""
    whole = {field.name for field in fields(m.Job)}
    for name, value in facts.items():
        owners = [each for each in RECORDS if name in _names(getattr(job, each))]
        if name in whole and not (name == "stop" and isinstance(value, int)):
            job = replace(job, **{name: value})
            continue
        (owner,) = owners
        job = replace(job, **{owner: replace(getattr(job, owner), **{name: value})})
    return job


def _names(record: object) -> set[str]:
    return {field.name for field in fields(record)} if is_dataclass(record) else set()


def made(**facts: Any) -> m.Job:
    """Return a job with these fields; ``assign`` is its choice of degrees."""
    return but(m.Job(m.JobSettings(facts.pop("assign"))), **facts)
