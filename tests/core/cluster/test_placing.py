"""Hosts of jobs."""

from random import Random

import pytest

from scalai.core.cluster.placing import Hosts, place_most_free, place_packed
from scalai.core.cluster.simulator import Place


@pytest.mark.parametrize("place", [place_most_free, place_packed])
@pytest.mark.parametrize("seed", range(20))
def test_each_job_has_its_devices_no_host_too_many_and_unchanged_jobs_stay_or_become_compact(
    place: Place, seed: int
) -> None:
    random = Random(seed)
    free = [4] * 6
    held: dict[str, Hosts] = {}
    for _ in range(12):
        wanted: dict[str, int] = {}
        for name in (f"job-{number}" for number in range(9)):
            size = random.choice([0, 1, 2, 3, 4, 8, sum(c for _, c in held.get(name, ()))])
            if size and size + sum(wanted.values()) <= 24:
                wanted[name] = size
        found = place(list(wanted), wanted, held, free)
        assert {name: sum(c for _, c in hosts) for name, hosts in found.items()} == wanted
        for host in range(6):
            assert sum(c for hosts in found.values() for at, c in hosts if at == host) <= 4
        for name, hosts in held.items():
            if wanted.get(name) == sum(c for _, c in hosts) and found[name] != hosts:
                # Only to be compact, or to make room for others.
                assert place is place_packed and len(found[name]) <= len(hosts)
        held = found


def test_a_small_job_takes_the_fullest_host_with_room() -> None:
    held: dict[str, Hosts] = {"old": ((1, 3),)}
    found = place_packed(["old", "new"], {"old": 3, "new": 1}, held, [4, 4])
    assert found["new"] == ((1, 1),)


def test_small_jobs_move_aside_for_whole_hosts_and_stay_where_there_is_no_room() -> None:
    held: dict[str, Hosts] = {"a": ((0, 1),), "b": ((1, 1),)}
    wanted = {"a": 1, "b": 1, "new": 4}
    found = place_packed(list(wanted), wanted, held, [4, 4])
    assert len(found["new"]) == 1 and found["a"][0][0] == found["b"][0][0]
    held = {"a": ((0, 3),), "b": ((1, 2),)}
    found = place_packed(["a", "b", "new"], {"a": 3, "b": 2, "new": 3}, held, [4, 4])
    assert found["a"] == held["a"] and found["b"] == held["b"] and len(found["new"]) == 2


def test_a_spread_job_becomes_compact_once_there_is_room() -> None:
    held: dict[str, Hosts] = {"a": ((0, 2), (1, 2)), "b": ((0, 2),), "c": ((1, 2),)}
    assert place_packed(["a", "b", "c"], {"a": 4, "b": 2, "c": 2}, held, [4, 4]) == held
    assert len(place_packed(["a"], {"a": 4}, held, [4, 4])["a"]) == 1
