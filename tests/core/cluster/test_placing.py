"""Hosts of jobs."""

from random import Random

import pytest

from scalai.core.cluster.placing import Hosts, place_most_free, place_packed


@pytest.mark.parametrize("place", [place_most_free, place_packed])
@pytest.mark.parametrize("seed", range(20))
def test_each_job_has_its_devices_no_host_too_many_and_unchanged_jobs_stay(
    place: type[place_packed], seed: int
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
            if wanted.get(name) == sum(c for _, c in hosts):
                assert found[name] == hosts
        held = found


def test_a_small_job_takes_the_fullest_host_with_room() -> None:
    held: dict[str, Hosts] = {"old": ((1, 3),)}
    found = place_packed(["old", "new"], {"old": 3, "new": 1}, held, [4, 4])
    assert found["new"] == ((1, 1),)
