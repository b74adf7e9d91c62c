"""Workloads in virtual time."""

from collections import defaultdict

import pytest
from cluster_jobs import DATA, LIMITS, read_kinds, read_peers, read_workloads

from scalai.core.cluster.application import Application, Asked, read_application
from scalai.core.cluster.placing import place_packed
from scalai.core.cluster.policies import POLICIES
from scalai.core.cluster.question import Answer, Memory, Question
from scalai.core.cluster.simulator import (
    Outcome,
    Resources,
    Rules,
    Sight,
    Submission,
    simulate,
)
from scalai.core.cluster.steady import steady

STATED = Sight(is_length_stated=True)
FIXED_BATCH = Sight("none", is_batch_free=False)
FIXED_BATCH_SEEN = Sight(is_batch_free=False)


def kind(noise: tuple[float, float] = (1.0, 0.0)) -> Application:
    """Two epochs of 100 steps; a sample takes a tenth of a second on a device, and several devices
    an instant more."""
    header = "placement,local_bsz,step_time,sync_time"
    places = ["1", "2", "3", "4", "14", "24", "34", "44", "11", "12", "22", "13"]
    placed = [header] + [
        f"{place},{local},{local / 10},{0.0}" for place in places for local in (1, 8, 64)
    ]
    scaled = ["num_nodes,num_replicas,local_bsz,step_time,sync_time"]
    row = f"{noise[0]},{noise[1]}"
    tables = {
        batch: ["progress,iteration,grad_sqr,grad_var", f"100,100,{row}", f"200,200,{row}"]
        for batch in (8, 64)
    }
    return read_application("toy", placed, scaled, tables, epochs=2, most_devices=8)


def run(policy: str, jobs: list[Submission], sight: Sight, rules: Rules, **of: float) -> Outcome:
    kinds = {"toy": kind((of.get("sqr", 1.0), of.get("var", 0.0)))}
    return simulate(jobs, kinds, POLICIES[policy], rules, sight, place=place_packed)


def submitted(number: int, at_s: float, devices: int = 2, batch: int = 8) -> Submission:
    return Submission(f"toy-{number}", at_s, "toy", Asked(devices, batch))


def test_a_job_takes_its_wait_its_standstill_and_its_steps() -> None:
    # Submitted at 10, decided at 60, 30 s of standstill, 200 steps of 4 samples a device.
    found = run("fixed", [submitted(0, 10.0)], FIXED_BATCH, Rules(hosts=2))
    assert found.completion_s == {"toy-0": pytest.approx(50 + 30 + 200 * 0.4)}
    assert found.changes == {"toy-0": 0}


def test_a_batch_that_gains_nothing_is_not_taken_and_one_that_gains_all_is() -> None:
    alone = run("fixed", [submitted(0, 0.0, devices=1)], FIXED_BATCH, Rules(hosts=1))
    without = run("shortest", [submitted(0, 0.0)], STATED, Rules(hosts=1), sqr=1.0, var=0.0)
    gaining = run("shortest", [submitted(0, 0.0)], STATED, Rules(hosts=1), sqr=0.0, var=1.0)
    assert without.completion_s["toy-0"] < alone.completion_s["toy-0"]
    assert gaining.completion_s["toy-0"] <= without.completion_s["toy-0"]


@pytest.mark.parametrize("name", POLICIES)
def test_every_job_ends_and_at_no_time_are_more_devices_used_than_there_are(name: str) -> None:
    jobs = [submitted(n, 37.0 * n, devices=1 + n % 3) for n in range(8)]
    found = run(name, jobs, Sight(is_length_stated=True, is_batch_free=name != "optimus",
                                  is_in_epochs=name == "optimus"), Rules(hosts=2))  # fmt: skip
    assert set(found.completion_s) == {one.name for one in jobs}
    held: dict[str, int] = defaultdict(int)
    for span in sorted(found.spans, key=lambda span: (span.from_s, span.devices)):
        held[span.name] = span.devices
        assert sum(held.values()) <= 8
    assert not any(held.values())


def test_dearer_changes_never_help() -> None:
    jobs = [submitted(n, 50.0 * n) for n in range(8)]
    means = [run("shortest", jobs, STATED, Rules(hosts=2, pause_s=s)).mean_s for s in (1, 30, 60)]
    assert means == sorted(means)


def test_a_policy_sees_only_what_a_job_has_run() -> None:
    seen: list[Question] = []

    def watch(question: Question, memory: Memory) -> Answer:
        seen.append(question)
        return POLICIES["goodput"](question, memory)

    jobs = [submitted(0, 0.0)]
    first, other = kind((1.0, 2.0)), kind((1.0, 50.0))
    later = {batch: (rows[0], other.epochs[batch][1]) for batch, rows in first.epochs.items()}
    changed = Application("toy", first.limits, first.ends, later, first.placed, first.sized)
    simulate(jobs, {"toy": first}, watch, Rules(hosts=1), Sight(), place=place_packed)
    assert all(one.remaining is None for question in seen for one in question.jobs)
    seen.clear()
    for toy in (first, changed):
        simulate(jobs, {"toy": toy}, watch, Rules(hosts=1), STATED, place=place_packed)
    runs = len([question for question in seen if question.now_s == 60.0])
    assert runs == 2
    half = [each for each in seen if (each.jobs[0].remaining or 0.0) > 100]
    by_time = defaultdict(list)
    for question in half:
        by_time[question.now_s].append(question.jobs[0].rates.tolist())
    assert all(rates[0] == rates[-1] for rates in by_time.values())


def test_the_published_run_of_tiresias_is_met_within_a_hundredth() -> None:
    workload = read_workloads(DATA)["1.0", "3"]
    published = next(
        peer.mean_s
        for peer in read_peers(DATA)
        if (peer.load, peer.workload, peer.policy) == ("1.0", "3", "tiresias")
    )
    found = simulate(
        workload, read_kinds(DATA), POLICIES["tiresias"], Rules(), FIXED_BATCH, limits=LIMITS
    )
    assert found.mean_s == pytest.approx(published, rel=0.01)


def test_a_decision_follows_a_lost_device_a_new_one_and_an_arrival_at_once() -> None:
    jobs = [submitted(0, 0.0, batch=64), submitted(1, 90.0, batch=64)]
    rules = Rules(hosts=1, per_host=4, every_s=1000, look_s=1, pause_s=0.5)
    found = simulate(
        jobs, {"toy": kind()}, steady(POLICIES["goodput"]), rules, FIXED_BATCH_SEEN,
        resources=[Resources(30.0, 1, 3), Resources(60.0, 1, 4)],
    )  # fmt: skip
    assert [(span.name, span.from_s, span.devices) for span in found.spans[:5]] == [
        ("toy-0", 1.0, 4), ("toy-0", 30.0, 3), ("toy-0", 60.0, 4), ("toy-0", 90.0, 3),
        ("toy-1", 90.0, 1),
    ]  # fmt: skip
