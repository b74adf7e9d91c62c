"""Hosts of the jobs, for a number of devices of each."""

from collections.abc import Mapping, Sequence

Hosts = tuple[tuple[int, int], ...]
"""A job's hosts with its devices on each."""


def place_most_free(
    order: Sequence[str], wanted: Mapping[str, int], held: Mapping[str, Hosts], free: Sequence[int]
) -> dict[str, Hosts]:
    """Keep jobs whose number of devices stays, and put the others on the emptiest hosts.

    Args:
        order: Jobs in the order of their placing.
        free: Devices of each host.
    """
    kept = {
        name: hosts
        for name, hosts in held.items()
        if wanted.get(name) == sum(count for _, count in hosts)
    }
    left = list(free)
    for hosts in kept.values():
        for host, count in hosts:
            left[host] -= count
    found = dict(kept)
    for name in order:
        if name in kept or not wanted.get(name):
            continue
        found[name] = _emptiest_first(wanted[name], left)
    return found


def place_packed(
    order: Sequence[str], wanted: Mapping[str, int], held: Mapping[str, Hosts], free: Sequence[int]
) -> dict[str, Hosts]:
    """As ``place_most_free``, but a job that fits on one host takes the fullest one with room, and
    further ones take whole hosts first."""
    kept = {
        name: hosts
        for name, hosts in held.items()
        if wanted.get(name) == sum(count for _, count in hosts)
    }
    left = list(free)
    for hosts in kept.values():
        for host, count in hosts:
            left[host] -= count
    found = dict(kept)
    for name in sorted(order, key=lambda name: -wanted[name]):
        if name in kept or not wanted[name]:
            continue
        fitting = [host for host, count in enumerate(left) if count >= wanted[name]]
        before = [host for host, _ in held.get(name, ()) if host in fitting]
        if fitting:
            host = min(before or fitting, key=lambda host: (left[host], host))
            found[name] = ((host, wanted[name]),)
            left[host] -= wanted[name]
        else:
            found[name] = _emptiest_first(wanted[name], left)
    return found


def _emptiest_first(devices: int, left: list[int]) -> Hosts:
    hosts: list[tuple[int, int]] = []
    while devices:
        host = max(range(len(left)), key=lambda at: (left[at], -at))
        count = min(left[host], devices)
        assert count, "more devices were given than there are"
        hosts.append((host, count))
        left[host] -= count
        devices -= count
    return tuple(hosts)
