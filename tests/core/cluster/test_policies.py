"""Who gets what: laws that hold for every policy, and the rule of each."""

from collections.abc import Mapping
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from scalai.core.cluster.policies import POLICIES
from scalai.core.cluster.question import (
    Answer,
    ClusterJob,
    Ended,
    Memory,
    Question,
    Standing,
)
from scalai.core.cluster.steady import steady


def job(number: int, **changes: object) -> ClusterJob:
    sizes = np.arange(0, 17, dtype=np.float64)
    plain = ClusterJob(
        f"job-{number}", "gpt", float(number), 4, (1, 16),
        Standing(0, 60.0, 60.0), sizes / (1 + 0.05 * np.maximum(sizes - 1, 0)),
        remaining=1000.0, pause_s=30.0,
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


def ask(*jobs: ClusterJob, hosts: int = 4, ended: tuple[Ended, ...] = ()) -> Question:
    return Question(1000.0, jobs, hosts, 4, ended)


def drawn(seed: int) -> Question:
    random = Random(seed)
    jobs = []
    for number in range(random.randrange(1, 12)):
        size = random.choice([0, 0, 1, 2, 4])
        standing = Standing(size, 60.0 * size, 240.0 * size)
        allowed = random.choice([1, 2]), 16
        jobs.append(
            job(number, standing=standing, allowed=allowed, asked=random.randrange(1, 9),
                remaining=random.lognormvariate(7, 2))
        )  # fmt: skip
    return ask(*jobs)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(5))
def test_no_more_devices_are_given_than_there_are_and_each_job_keeps_its_limits(
    name: str, seed: int
) -> None:
    question = drawn(seed)
    answer = POLICIES[name](question, {})
    known = {one.name: one for one in question.jobs}
    assert sum(answer.devices.values()) <= question.devices
    for one, given in answer.devices.items():
        limit = known[one].asked if name in ("fifo", "fixed", "tiresias", "qssf") else 1
        assert limit <= given <= known[one].allowed[1]
    assert POLICIES[name](question, {}) == answer


@pytest.mark.parametrize("name", POLICIES)
def test_a_job_alone_runs(name: str) -> None:
    assert POLICIES[name](ask(job(0)), {}).devices["job-0"] >= 1
    assert POLICIES[name](ask(), {}).devices == {}
    none = steady(POLICIES[name])(ask(job(0), hosts=0), {})
    assert none.devices == {}


@pytest.mark.parametrize("name", ["goodput", "shortest", "dynamic-program"])
def test_a_size_stays_where_another_gains_less_than_its_standstill(name: str) -> None:
    rates = np.minimum(np.arange(0, 17, dtype=np.float64), 4.0)
    rates[8:] = 4.2
    one = job(0, standing=Standing(4, 600.0, 2400.0), rates=rates)
    assert POLICIES[name](ask(one), {}).devices == {"job-0": 4}


@pytest.mark.parametrize("name", ["goodput", "shortest", "dynamic-program"])
def test_only_sizes_with_a_valid_layout_are_given(name: str) -> None:
    rates = np.zeros(17)
    rates[6], rates[12] = 5.0, 9.0
    odd = job(0, rates=rates, allowed=(6, 12), standing=Standing())
    assert POLICIES[name](ask(odd), {}).devices == {"job-0": 6}
    running = replace(odd, standing=Standing(6, 900.0, 5400.0))
    assert POLICIES[name](ask(running), {}).devices == {"job-0": 12}
    assert POLICIES[name](ask(replace(running, rates=np.zeros(17))), {}).devices == {}


def test_the_shortest_work_comes_first_where_not_all_fit() -> None:
    jobs = [job(n, remaining=10.0 ** (5 - n), allowed=(4, 4))
            for n in range(5)]  # fmt: skip
    assert "job-0" not in POLICIES["shortest"](ask(*jobs), {}).devices


def test_priority_turns_the_order() -> None:
    jobs = [job(0, allowed=(4, 4), priority=50.0), job(1, allowed=(4, 4), remaining=500.0)]
    assert POLICIES["shortest"](ask(*jobs, hosts=1), {}).devices == {"job-0": 4}


def test_a_blind_policy_does_not_look_at_lengths() -> None:
    question = drawn(5)
    hidden = replace(question, jobs=tuple(replace(one, remaining=None) for one in question.jobs))
    for name in ("goodput", "dynamic-program", "tiresias", "qssf", "fifo"):
        assert POLICIES[name](hidden, {}) == POLICIES[name](question, {})


def test_tiresias_puts_jobs_with_much_service_behind_and_remembers_it() -> None:
    long = job(0, standing=Standing(4, 16 * 900.0, 16 * 3600.0))
    first = POLICIES["tiresias"](ask(long, job(1), hosts=1), {})
    assert first.devices == {"job-1": 4}
    assert set(first.memory) == {"job-0"}


def test_fifo_waits_for_the_first_and_fixed_passes_it_by() -> None:
    running = job(0, standing=Standing(4, 600.0, 2400.0))
    question = ask(running, job(1, asked=8), job(2), hosts=2)
    assert POLICIES["fifo"](question, {}).devices == {"job-0": 4}
    assert POLICIES["fixed"](question, {}).devices == {"job-0": 4, "job-2": 4}


@pytest.mark.parametrize("name", ["fifo", "fixed", "tiresias", "qssf"])
def test_a_job_that_asks_for_more_than_all_devices_gets_all_of_them(name: str) -> None:
    assert POLICIES[name](ask(job(0, asked=9), hosts=2), {}).devices == {"job-0": 8}


def test_optimus_steps_over_sizes_that_a_job_cannot_have() -> None:
    rates = np.zeros(17)
    rates[[2, 4, 8, 16]] = 2.0, 3.8, 7.0, 12.0
    assert POLICIES["optimus"](ask(job(0, rates=rates)), {}).devices == {"job-0": 16}
    jobs = job(0, rates=rates), job(1, rates=rates), job(2)
    found = POLICIES["optimus"](ask(*jobs, hosts=2), {}).devices
    assert found == {"job-0": 2, "job-1": 2, "job-2": 4}
    assert POLICIES["optimus"](ask(job(0, rates=rates), hosts=0), {}).devices == {"job-0": 0}


def test_qssf_serves_the_kind_first_that_was_short_before() -> None:
    past = (*[Ended("long", 4, 9000.0)] * 3, *[Ended("short", 4, 60.0)] * 3)
    jobs = [job(0, kind="long"), job(1, kind="short")]
    assert POLICIES["qssf"](ask(*jobs, hosts=1, ended=past), {}).devices == {"job-1": 4}


def test_the_dynamic_program_admits_the_oldest_and_lets_all_of_them_run() -> None:
    answer = POLICIES["dynamic-program"](ask(*(job(n) for n in range(6)), hosts=1), {})
    assert answer.devices == {f"job-{n}": 1 for n in range(4)}


# ------------------------------------------------------------------ running jobs


def given(wanted: Mapping[str, int], *jobs: ClusterJob, hosts: int = 1) -> Mapping[str, int]:
    def policy(question: Question, memory: Memory) -> Answer:
        return Answer(wanted)

    return steady(policy)(ask(*jobs, hosts=hosts), {}).devices


def running(number: int, devices: int, since_s: float = 1e6, **changes: object) -> ClusterJob:
    standing = Standing(devices, 1000.0, 1000.0, since_s)
    return job(number, standing=standing, pause_s=2.0, **changes)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(8))
def test_every_policy_leaves_running_jobs_their_least_devices(name: str, seed: int) -> None:
    question = drawn(seed)
    found = steady(POLICIES[name])(question, {}).devices
    held = [one for one in question.jobs if one.devices]
    assert all(found[one.name] >= min(one.devices, one.allowed[0]) for one in held)
    if sum(one.allowed[0] for one in held) <= question.devices:
        assert sum(found.values()) <= question.devices


def test_a_job_that_would_be_stopped_keeps_its_least_and_others_wait() -> None:
    assert given({"job-1": 4}, running(0, 4), job(1)) == {"job-0": 4}
    assert given({"job-0": 1, "job-1": 3}, running(0, 4), job(1)) == {"job-0": 1, "job-1": 3}


@pytest.mark.parametrize(
    ("sizes", "asked", "given_now"), [((2, 4), 4, 4), ((1, 2), 4, 2), ((4,), 3, 4), ((), 4, 0)]
)
def test_a_job_that_cannot_have_what_was_asked_gets_the_next_size(
    sizes: tuple[int, ...], asked: int, given_now: int
) -> None:
    """The next smaller one, else its least; unless nothing is known of its speeds."""
    rates = np.zeros(17)
    rates[list(sizes)] = 1.0
    found = given({"job-0": asked}, job(0, rates=rates))
    assert found == ({"job-0": given_now} if given_now else {})
    assert given({"job-0": asked}, job(0, rates=np.zeros(0))) == {"job-0": asked}
    present = running(0, 3, rates=rates)
    assert given({"job-0": 3}, present) == {"job-0": 3}


def test_a_job_that_has_just_changed_does_not_grow_again() -> None:
    wanted = {"job-0": 1, "job-1": 3}
    young = running(0, 2), running(1, 2, since_s=30.0)
    assert given(wanted, *young) == {"job-0": 2, "job-1": 2}
    assert given(wanted, running(0, 2), running(1, 2)) == wanted


def test_a_gain_below_the_standstill_is_no_reason_to_change() -> None:
    flat = np.minimum(np.arange(0, 17, dtype=np.float64), 2.0)
    assert given({"job-0": 4}, running(0, 2, rates=flat)) == {"job-0": 2}
    slower = np.array([0.0, 1.0, 1.5, 1.6, 1.2])
    assert given({"job-0": 3}, running(0, 4, rates=slower)) == {"job-0": 3}


def test_nobody_gives_a_device_back_that_nobody_needs() -> None:
    assert given({"job-0": 1, "job-1": 1}, running(0, 2), running(1, 1)) == {
        "job-0": 2, "job-1": 1,
    }  # fmt: skip


def test_lost_devices_are_taken_from_whom_has_most_even_if_it_has_just_changed() -> None:
    jobs = running(0, 3, since_s=0.0), running(1, 1), running(2, 1)
    assert given({one.name: one.devices for one in jobs}, *jobs) == {
        "job-0": 2, "job-1": 1, "job-2": 1,
    }  # fmt: skip
    even = [running(n, 2, priority=3.0 - n) for n in range(3)]
    assert given({one.name: 2 for one in even}, *even) == {"job-0": 2, "job-1": 1, "job-2": 1}


def test_too_many_jobs_for_the_devices_keep_their_least() -> None:
    assert given({}, *(running(n, 1) for n in range(6))) == {f"job-{n}": 1 for n in range(6)}


def test_what_one_job_does_not_take_another_one_does() -> None:
    """Both would grow alike, and the first one has just changed."""
    free = ask(running(0, 1, since_s=1.0), running(1, 1), running(2, 1), hosts=1)
    found = steady(POLICIES["goodput"])(free, {}).devices
    assert found["job-0"] == 1 and sum(found.values()) == 4


@pytest.mark.parametrize("name", ["goodput", "dynamic-program"])
@pytest.mark.parametrize("seed", range(8))
def test_noise_in_measured_steps_does_not_choose_who_grows(name: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    rates = np.array([0.0, 1.0, 1.85]) * random.uniform(0.97, 1.03, (2, 3))
    jobs = [running(n, 1, rates=rates[n], allowed=(1, 2)) for n in range(2)]
    three = replace(ask(*jobs, hosts=1), per_host=3)
    assert steady(POLICIES[name])(three, {}).devices == {"job-0": 2, "job-1": 1}
    less = replace(jobs[0], rates=np.array([0.0, 1.0, 1.3]))
    uneven = replace(three, jobs=(less, jobs[1]))
    assert steady(POLICIES[name])(uneven, {}).devices == {"job-0": 1, "job-1": 2}
