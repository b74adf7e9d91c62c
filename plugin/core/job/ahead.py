"""What a job would run if hosts came or went: known before anything fails."""

from collections.abc import Iterator

from scalai.core.job.membership import Assign, Assignment

Hosts = tuple[tuple[str, int], ...]
NEWCOMER = "another"
"""Stands for a host that may come; it has as many slots as the last one that is there."""


def changes_ahead(hosts: Hosts) -> Iterator[tuple[str, Hosts]]:
    """Yield one host less, two less, half of them and one more, as far as they differ."""
    seen = {len(hosts)}
    for name, count in (
        ("one less", len(hosts) - 1), ("two less", len(hosts) - 2), ("half", len(hosts) // 2),
    ):  # fmt: skip
        if count > 0 and count not in seen:
            seen.add(count)
            yield name, hosts[:count]
    if hosts:
        yield "one more", (*hosts, (NEWCOMER, hosts[-1][1]))


def plans_ahead(
    assign: Assign, hosts: Hosts, present: Assignment | None
) -> Iterator[tuple[str, Assignment | None]]:
    """Yield what the job would run after each; None: it could not."""
    for name, there in changes_ahead(hosts):
        yield name, assign(there, present)
