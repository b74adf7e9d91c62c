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
        for host, count in found[name]:
            left[host] -= count
    return found


def place_packed(
    order: Sequence[str], wanted: Mapping[str, int], held: Mapping[str, Hosts], free: Sequence[int]
) -> dict[str, Hosts]:
    """Keep jobs whose number of devices stays, and put each on the fewest hosts where that is
    possible: small jobs move aside for whole hosts, and a spread job moves once it can be compact.
    """
    per_host = max(free, default=1)
    floor = _Floor(list(free), per_host)
    for name, hosts in held.items():
        if wanted.get(name) == sum(count for _, count in hosts):
            floor.put(name, hosts)
    for name in sorted(order, key=lambda name: -wanted[name]):
        if name not in floor.found and wanted[name]:
            floor.clear(wanted[name])
            before = {host for host, _ in held.get(name, ())}
            floor.put(
                name,
                floor.compact(wanted[name], before) or _emptiest_first(wanted[name], floor.left),
            )
    for name in sorted(floor.found, key=lambda name: -wanted[name]):
        if len(floor.found[name]) > -(-wanted[name] // per_host):
            old = floor.take(name)
            floor.put(name, floor.compact(wanted[name], set()) or old)
    return floor.found


class _Floor:
    """Free devices of hosts, and the jobs placed on them."""

    def __init__(self, left: list[int], per_host: int) -> None:
        self.left, self.per_host = left, per_host
        self.found: dict[str, Hosts] = {}

    def put(self, name: str, hosts: Hosts) -> None:
        self.found[name] = hosts
        for host, count in hosts:
            self.left[host] -= count

    def take(self, name: str) -> Hosts:
        hosts = self.found.pop(name)
        for host, count in hosts:
            self.left[host] += count
        return hosts

    def compact(self, devices: int, before: set[int]) -> Hosts | None:
        """Return whole hosts, and the fullest one with room for the rest; None: there are none."""
        full, rest = divmod(devices, self.per_host)
        whole = [host for host, count in enumerate(self.left) if count == self.per_host]
        whole.sort(key=lambda host: (host not in before, host))
        if len(whole) < full:
            return None
        chosen = whole[:full]
        hosts = [(host, self.per_host) for host in chosen]
        if rest:
            fitting = [h for h, count in enumerate(self.left) if count >= rest and h not in chosen]
            if not fitting:
                return None
            host = min(fitting, key=lambda h: (h not in before, self.left[h], h))
            hosts.append((host, rest))
        return tuple(hosts)

    def clear(self, devices: int) -> None:
        """Move small jobs aside, if possible, until a job has its whole hosts."""
        while sum(count == self.per_host for count in self.left) < devices // self.per_host:
            small: dict[int, list[str]] = {}
            for name, hosts in self.found.items():
                if len(hosts) == 1:
                    small.setdefault(hosts[0][0], []).append(name)
            movable = {
                host: names
                for host, names in small.items()
                if 0 < sum(self.found[name][0][1] for name in names) < self.per_host
                and sum(self.found[name][0][1] for name in names) + self.left[host] == self.per_host
            }
            if not any(
                self._move(host, movable[host])
                for host in sorted(movable, key=lambda host: (-self.left[host], host))
            ):
                return

    def _move(self, host: int, names: Sequence[str]) -> bool:
        """Move jobs of a host to partly used ones; False: there is no room, and they stay."""
        old = {name: self.take(name) for name in names}
        self.left[host] = 0
        for name in sorted(names, key=lambda name: -old[name][0][1]):
            count = old[name][0][1]
            fitting = [h for h, free in enumerate(self.left) if count <= free < self.per_host]
            if not fitting:
                for moved in [one for one in names if one in self.found]:
                    self.take(moved)
                self.left[host] = self.per_host
                for one, hosts in old.items():
                    self.put(one, hosts)
                return False
            self.put(name, ((min(fitting, key=lambda h: (self.left[h], h)), count),))
        self.left[host] = self.per_host
        return True


def _emptiest_first(devices: int, free: Sequence[int]) -> Hosts:
    left = list(free)
    hosts: list[tuple[int, int]] = []
    while devices:
        host = max(range(len(left)), key=lambda at: (left[at], -at))
        count = min(left[host], devices)
        assert count, "more devices were given than there are"
        hosts.append((host, count))
        left[host] -= count
        devices -= count
    return tuple(hosts)
