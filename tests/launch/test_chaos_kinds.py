"""Schedules of faults: the same seed gives the same one, every kind comes, and no kind takes away
more copies of the state than it says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalai.core.errors import UsageError
from scalai.launch.chaos.kinds import (
    KINDS,
    MEMORY_GOES,
    SIGNALS,
    TRIGGERS,
    At,
    Effect,
    Fault,
    Loss,
    Target,
    most_steps_lost,
    parse,
    schedule,
    struck,
)

ALL = tuple(map(parse, KINDS))
HOSTS = st.dictionaries(
    st.sampled_from([f"h{number}" for number in range(9)]), st.integers(1, 8), min_size=4
)


def of(
    seed: int, hosts: dict[str, int], replicas: int = 1, rounds: int = 1, every: int = 20
) -> tuple[Fault, ...]:
    return schedule(seed, ALL, hosts, least_hosts=1, replicas=replicas, every=every, rounds=rounds)


@given(st.integers(), HOSTS, st.integers(1, 2), st.integers(1, 3))
def test_every_kind_comes_as_often_as_it_should_and_the_same_seed_says_when(
    seed: int, hosts: dict[str, int], replicas: int, rounds: int
) -> None:
    faults = of(seed, hosts, replicas, rounds)
    assert faults == of(seed, dict(reversed(hosts.items())), replicas, rounds)
    names = [fault.kind.name for fault in faults]
    assert sorted(names) == sorted([*KINDS] * rounds)
    assert all({*fault.hosts} <= hosts.keys() and fault.steps >= 20 for fault in faults)


@given(st.integers(), HOSTS, st.integers(0, 2))
def test_no_more_copies_go_at_once_than_the_kind_says(
    seed: int, hosts: dict[str, int], replicas: int
) -> None:
    for fault in of(seed, hosts, replicas):
        count = len(set(fault.hosts))
        assert count < len(hosts), "somebody is left"
        if fault.kind.name in MEMORY_GOES and fault.kind.loss is not Loss.DISK:
            assert count <= max(1, replicas)
        if fault.kind.loss is Loss.DISK and fault.kind.name in MEMORY_GOES:
            assert count == replicas + 1
        if fault.kind.target is Target.WORKER:
            assert 0 <= fault.worker < hosts[fault.hosts[0]]


def test_another_seed_gives_another_schedule() -> None:
    hosts = dict.fromkeys("abcd", 2)
    assert len({tuple(map(str, of(seed, hosts))) for seed in range(20)}) == 20


def test_what_ends_the_job_comes_last() -> None:
    for seed in range(20):
        ends = [f.kind.effect is Effect.ENDS for f in of(seed, dict.fromkeys("abcd", 1))]
        assert ends == sorted(ends) and any(ends)


def test_more_hosts_than_there_are_cannot_be_struck() -> None:
    with pytest.raises(UsageError, match="kill-more-hosts strikes 2 of 2 hosts"):
        schedule(
            0, [parse("kill-more-hosts")], {"a": 1, "b": 1}, least_hosts=1, replicas=1, every=5
        )
    with pytest.raises(UsageError, match="the job needs 2"):
        schedule(0, [parse("kill-agent")], {"a": 1, "b": 1}, least_hosts=2, replicas=1, every=5)


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("kill-worker", At()),
        ("kill-worker@step=120", At(120)),
        ("kill-worker@s=2.5", At(after_s=2.5)),
        ("stop-agent@station=commit", At(station="commit")),
        ("exit-worker@step=3", At(3, station="step")),
    ],
)
def test_a_fault_is_read_as_it_was_written(text: str, at: At) -> None:
    found = parse(text)
    assert found.kind is KINDS[text.partition("@")[0]] and found.at == at


@pytest.mark.parametrize(
    "text",
    ["nonsense", "kill-worker@step=x", "kill-worker@station=nowhere",
     "full-disk@station=commit", "exit-worker@station=restore", "kill-worker@when=3"],
)  # fmt: skip
def test_what_is_no_fault_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse(text)


def test_every_station_and_signal_is_of_a_kind() -> None:
    assert SIGNALS.keys() <= KINDS.keys() and MEMORY_GOES <= KINDS.keys()
    assert all(kind.station in {"", *TRIGGERS} for kind in KINDS.values())
    assert all(name in {"", *KINDS} for name in TRIGGERS.values())
    assert struck(KINDS["kill-hosts"], 2) == 2 and struck(KINDS["kill-more-hosts"], 2) == 3


def test_what_may_be_lost_follows_from_what_outlives_the_fault() -> None:
    assert most_steps_lost(KINDS["term-agent"], 7, 3, 40) == 0
    assert most_steps_lost(KINDS["kill-worker"], 7, 3, 40) == 14
    assert most_steps_lost(KINDS["stop-agent"], 7, 3, 40) == 15
    assert most_steps_lost(KINDS["stop-agent"], None, 30, None) == 31
    assert most_steps_lost(KINDS["kill-worker"], None, 30, None) == 31
    assert most_steps_lost(KINDS["kill-more-hosts"], 7, 3, 40) == 54
    assert most_steps_lost(KINDS["kill-more-hosts"], 7, 3, None) is None
