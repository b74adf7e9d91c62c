"""The rules of membership: what comes of a phase that takes too long."""

from pathlib import Path

import pytest

from scalai.core.host.state import Settings
from scalai.core.job import membership as m
from scalai.core.job.deadlines import ANSWER_S, GONE_S, JOIN_S, LIMITS, STORE_READY_S, TABLE, TELL_S
from scalai.core.job.membership import active
from scalai.core.job.resize import advance
from scalai.core.messages import actions, events, reports
from support.membership_choice import assign_all
from support.membership_jobs import rounds, two_hosts, until
from support.membership_simulation import Simulation, job

pytestmark = pytest.mark.fault

EXIT_GRACE_S = Settings("a", is_elastic=True, drain_timeout_s=120.0).exit_grace_s
ARCHITECTURE = Path(__file__).parents[3] / "docs" / "architecture.md"


def reported_lines(simulation: Simulation) -> list[str]:
    lines = (action.text for action in simulation.logged if isinstance(action, actions.Say))
    return [line for line in lines if line.startswith("event=")]


def test_every_phase_has_its_line_and_the_docs_repeat_it() -> None:
    assert set(LIMITS) == set(m.Phase) - {m.Phase.ENDED}
    text = ARCHITECTURE.read_text()
    for line in TABLE:
        row = f"| {line.phase.value} | {line.clock} | {line.default} | {line.consequence} |"
        assert row in text, f"docs/architecture.md lacks: {row}"


def test_limits_that_hang_together_end_one_after_the_other() -> None:
    """What was lost on its way is told again before its host counts as lost; a join outlasts what
    it waits for; who waits for killed workers is waited for."""
    assert 2 * TELL_S < ANSWER_S and STORE_READY_S < JOIN_S
    stopping = LIMITS[m.Phase.STOPPING].seconds(job())
    assert stopping is not None and GONE_S + EXIT_GRACE_S < stopping


def test_workers_that_the_kernel_cannot_end_do_not_cost_their_host() -> None:
    """The host waits for the memory of their devices, and answers once others may start."""
    simulation = two_hosts()
    simulation.feed(events.Rescaled(assign_all(allowed=(2,)), simulation.now))
    until(simulation, m.Phase.STOPPING)
    simulation.hosts["b"].is_silent = True
    while "a" in simulation.waiting():
        simulation.answer("a")
    simulation.pass_time(GONE_S + EXIT_GRACE_S, 5.0)
    assert simulation.job.phase is m.Phase.STOPPING and "b" in simulation.job.hosts


def test_a_stop_that_a_rank_does_not_come_to_is_taken_back_and_tried_again_later() -> None:
    simulation = two_hosts(drain_timeout_s=20.0)
    simulation.hosts["b"].is_hung = True
    simulation.feed(events.Rescaled(assign_all(allowed=(2,)), simulation.now))
    until(simulation, m.Phase.DRAINING)
    simulation.deliver()
    assert simulation.hosts["a"].stands and not simulation.hosts["b"].stands
    simulation.tick(1.0)
    simulation.tick(21.0)
    assert simulation.job.phase is m.Phase.RUNNING
    simulation.deliver()
    assert not simulation.hosts["a"].stands and not simulation.snapshots
    assert "tried again after 20 s" in reported_lines(simulation)[-1]
    simulation.wake(simulation.hosts["b"])
    simulation.pass_time(60.0, 5.0)
    simulation.settle()
    last = rounds(simulation)[-1]
    assert last.assignment.degrees.world_size == 2 and last.steps_lost == 0
    assert simulation.job.budget.left == 3 and simulation.job.change.withdrawn == 0


def test_a_change_of_replicas_that_differ_is_refused_by_name_and_the_job_trains_on() -> None:
    simulation = two_hosts()
    simulation.hosts["b"].differing = "'param/w' on ranks [0, 1]"
    simulation.feed(events.Rescaled(assign_all(allowed=(2,)), simulation.now))
    until(simulation, m.Phase.DRAINING)
    simulation.deliver()
    assert simulation.job.phase is m.Phase.RUNNING and not simulation.snapshots
    assert not simulation.hosts["a"].stands and simulation.job.budget.left == 3
    assert "replicas that differ: 'param/w' on ranks [0, 1]" in reported_lines(simulation)[-1]


def test_replicas_that_differ_keep_no_host_from_leaving_and_are_named() -> None:
    simulation = two_hosts()
    simulation.hosts["b"].differing = "'param/w' on ranks [0, 1]"
    simulation.feed(events.HostLeaving("a", simulation.now))
    simulation.settle()
    assert set(simulation.hosts) == {"b"} and rounds(simulation)[-1].steps_lost == 0
    said = [each.text for each in simulation.logged if isinstance(each, actions.Say)]
    assert any("event=replicas_differ host b holds" in text for text in said)


@pytest.mark.parametrize("what", ["leave", "request"])
def test_what_was_said_during_a_stop_that_is_taken_back_is_met_at_once(what: str) -> None:
    simulation = two_hosts(drain_timeout_s=20.0, build_timeout_s=0.0)
    simulation.hosts["b"].is_hung = True
    simulation.feed(events.Rescaled(assign_all(allowed=(2,)), simulation.now))
    until(simulation, m.Phase.DRAINING)
    simulation.deliver()
    if what == "leave":
        simulation.feed(events.HostLeaving("a", simulation.now))
    else:
        simulation.feed(events.Rescaled(assign_all(allowed=(3,)), simulation.now))
    simulation.tick(1.0)
    simulation.tick(21.0)
    assert simulation.job.phase is m.Phase.RUNNING
    simulation.tick(1.0)
    assert simulation.job.phase is m.Phase.PREPARING


def test_each_further_try_of_such_a_change_comes_later() -> None:
    simulation = two_hosts(drain_timeout_s=10.0)
    simulation.hosts["b"].is_hung = True
    simulation.feed(events.Rescaled(assign_all(allowed=(2,)), simulation.now))
    simulation.pass_time(1000.0, 1.0)
    waits = [
        text.split("tried again after ")[1].split()[0]
        for text in reported_lines(simulation)
        if "withdrawn" in text
    ]
    assert waits[:4] == ["10", "20", "40", "80"]


def test_a_start_that_makes_no_progress_goes_back_to_what_ran() -> None:
    simulation = two_hosts(start_timeout_s=100.0, left=0)
    simulation.feed(events.Rescaled(assign_all(allowed=(2, 3)), simulation.now))
    until(simulation, m.Phase.STARTING)
    simulation.hosts["b"].is_hung = True
    simulation.pass_time(95.0, 5.0)
    assert simulation.job.phase is m.Phase.STARTING
    assert "b (nothing so far)" in reported_lines(simulation)[-1]
    simulation.feed(events.Reported("b", reports.Moved(simulation.job.round, 1 << 30)))
    simulation.pass_time(95.0, 5.0)
    assert simulation.job.phase is m.Phase.STARTING, "the clock begins anew with each progress"
    simulation.pass_time(20.0, 5.0)
    simulation.settle()
    last = rounds(simulation)[-1]
    # The host that did not hang waits for it, and has made no step.
    assert last.assignment.degrees.world_size == 4 and last.steps_lost == 0
    assert simulation.job.phase is m.Phase.RUNNING and simulation.job.budget.left == 0


def test_a_first_start_that_makes_no_progress_is_a_failure() -> None:
    simulation = Simulation(job(max_hosts=1, start_timeout_s=100.0, left=1))
    simulation.join("a", 2)
    simulation.hosts["a"].is_hung = True
    simulation.pass_time(150.0, 10.0)
    assert simulation.job.budget.left == 0 and simulation.job.phase is m.Phase.RUNNING


@pytest.mark.parametrize(
    "phase", [m.Phase.PREPARING, m.Phase.SNAPSHOTTING, m.Phase.COMMITTING, m.Phase.STOPPING]
)
def test_a_host_that_does_not_answer_counts_as_lost_where_others_can_go_on(
    phase: m.Phase,
) -> None:
    simulation = two_hosts(is_loss_free=True, drain_timeout_s=20.0)
    simulation.feed(events.Rescaled(assign_all(allowed=(2, 3)), simulation.now))
    until(simulation, phase)
    simulation.hosts["b"].is_silent = True
    simulation.pass_time(300.0, 10.0)
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING and active(simulation.job) == {"a"}
    assert simulation.job.budget.left == 3


def test_a_host_that_has_nothing_to_commit_is_not_waited_for() -> None:
    simulation = two_hosts(drain_timeout_s=20.0)
    simulation.feed(events.Rescaled(assign_all(allowed=(2,)), simulation.now))
    until(simulation, m.Phase.SNAPSHOTTING)
    simulation.hosts["b"].is_hung = True  # its workers are ended; a has replicas of them
    simulation.deliver()
    assert simulation.job.phase is m.Phase.RUNNING and set(simulation.hosts) == {"a", "b"}
    assert rounds(simulation)[-1].steps_lost == 0


@pytest.mark.parametrize("phase", [m.Phase.DRAINING, m.Phase.SNAPSHOTTING])
def test_a_host_whose_agent_comes_back_in_a_stop_has_no_workers_to_wait_for(phase: m.Phase) -> None:
    simulation = two_hosts(drain_timeout_s=20.0)
    simulation.feed(events.Rescaled(assign_all(allowed=(2,)), simulation.now))
    until(simulation, phase)
    kept = simulation.lose("b")
    simulation.join("b", 2, kept.parts)
    simulation.deliver()
    assert simulation.job.phase is m.Phase.RUNNING and set(simulation.hosts) == {"a", "b"}
    assert rounds(simulation)[-1].steps_lost == 0


def test_a_stop_without_workers_that_were_lost_is_not_taken_back_for_their_new_agent() -> None:
    simulation = two_hosts(drain_timeout_s=20.0)
    simulation.feed(events.Rescaled(assign_all(allowed=(2,)), simulation.now))
    until(simulation, m.Phase.DRAINING)
    simulation.hosts["a"].is_hung = True  # in a collective with those that are lost
    kept = simulation.lose("b")
    simulation.join("b", 2, kept.parts)
    simulation.deliver()
    simulation.tick(1.0)
    simulation.tick(21.0)
    assert simulation.job.phase is m.Phase.STOPPING and simulation.job.budget.left == 2


def test_a_host_that_is_not_lost_all_the_same_is_asked_for_again_after_as_long() -> None:
    simulation = two_hosts()
    simulation.feed(events.Rescaled(assign_all(allowed=(2,)), simulation.now))
    until(simulation, m.Phase.PREPARING)
    simulation.answer("a")
    state, asked = simulation.job, []
    for second in range(200):
        state, due = advance(state, events.Ticked(simulation.now + second, 0))
        asked += [second for action in due if isinstance(action, actions.Lose)]
    assert asked == [61, 122, 183]


def test_the_only_host_is_waited_for_and_told_of() -> None:
    simulation = Simulation(job(max_hosts=1))
    simulation.join("a", 4)
    simulation.settle()
    simulation.snapshot()
    simulation.settle()
    simulation.feed(events.Rescaled(assign_all(allowed=(2,)), simulation.now))
    simulation.hosts["a"].is_silent = True
    simulation.pass_time(400.0, 5.0)
    assert simulation.job.phase is m.Phase.PREPARING and "a" in simulation.hosts
    assert 2 <= len(reported_lines(simulation)) <= 4
    simulation.heal()
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING


def test_who_waits_for_hosts_says_so_every_minute() -> None:
    simulation = Simulation(job(assign=assign_all(minimum=2)))
    simulation.join("a", 2)
    simulation.pass_time(200.0, 5.0)
    assert [text.split(" since")[0] for text in reported_lines(simulation)] == [
        "event=slow phase=waiting"
    ] * 3


def test_a_script_that_has_ended_on_every_host_while_a_stop_waits_has_ended() -> None:
    simulation = two_hosts()
    simulation.feed(events.Rescaled(assign_all(allowed=(2,)), simulation.now))
    until(simulation, m.Phase.DRAINING)
    for name in "ab":
        simulation.hosts[name].is_done = True
        simulation.feed(events.Reported(name, reports.Finished(simulation.job.round)))
    assert [(e.hosts, e.code) for e in simulation.exits] == [(("a", "b"), 0)]


def test_a_refusal_ends_a_first_start_with_its_own_words_and_a_change_goes_back() -> None:
    first = Simulation(job(max_hosts=1))
    first.join("a", 2)
    refused = events.Reported(
        "a", reports.WorkersFailed(first.job.round, "no such model", is_refusal=True)
    )
    first.feed(refused)
    assert [(e.code, e.reason) for e in first.exits] == [(3, "no such model")]
    simulation = two_hosts(left=0)
    simulation.feed(events.Rescaled(assign_all(allowed=(2,)), simulation.now))
    until(simulation, m.Phase.STARTING)
    round = simulation.job.round
    simulation.feed(
        events.Reported("a", reports.WorkersFailed(round, "not with DP 2", is_refusal=True))
    )
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING
    assert rounds(simulation)[-1].assignment.degrees.world_size == 4
    assert [failed.reason for failed in simulation.job.change.failed] == ["not with DP 2"]


def test_what_a_signal_killed_is_tried_once_more_before_it_goes_back() -> None:
    simulation = two_hosts(left=0)
    simulation.feed(events.Rescaled(assign_all(allowed=(2,)), simulation.now))
    for _ in range(2):
        until(simulation, m.Phase.STARTING)
        assert rounds(simulation)[-1].assignment.degrees.world_size == 2
        simulation.feed(
            events.Reported(
                "a", reports.WorkersFailed(simulation.job.round, "killed", is_chance=True)
            )
        )
        while simulation.job.phase is m.Phase.STOPPING:
            simulation.answer(simulation.waiting()[0])
    simulation.settle()
    assert rounds(simulation)[-1].assignment.degrees.world_size == 4


def test_a_change_that_failed_is_tried_again_once_a_host_of_it_has_joined_anew() -> None:
    simulation = two_hosts(max_hosts=3)
    simulation.cannot_run.add(6)
    simulation.join("c", 2)
    simulation.settle()
    assert active(simulation.job) == {"a", "b"} and len(rounds(simulation)) == 3
    simulation.feed(events.Reported("c", reports.Slots(1)))
    simulation.feed(events.Reported("c", reports.Slots(2)))
    simulation.settle()
    assert len(rounds(simulation)) == 3, "nothing of it is new"
    simulation.cannot_run.clear()
    simulation.feed(events.HostLeaving("c", simulation.now))
    simulation.settle()
    simulation.join("c", 2)
    simulation.settle()
    assert active(simulation.job) == {"a", "b", "c"}


def test_where_hosts_may_come_and_go_the_loss_of_one_is_no_failure() -> None:
    simulation = two_hosts(left=0, is_loss_free=True)
    simulation.lose("b")
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING and active(simulation.job) == {"a"}


def test_an_hour_of_steps_earns_a_failure_back_where_nobody_gave_a_budget() -> None:
    simulation = two_hosts(does_refill=True)
    simulation.feed(events.Reported("a", reports.WorkersFailed(simulation.job.round, "died")))
    simulation.settle()
    assert simulation.job.budget.left == 2
    simulation.pass_time(7200.0)
    assert simulation.job.budget.left == 2, "time without steps earns nothing"
    for _ in range(75):
        simulation.train(1)
        simulation.tick(60.0)
    assert simulation.job.budget.left == 3


def test_a_host_that_is_lost_again_and_again_waits_and_the_others_train_on() -> None:
    simulation = two_hosts(max_hosts=3, is_loss_free=True)
    for _ in range(3):
        simulation.join("c", 2)
        simulation.settle()
        assert "c" in active(simulation.job)
        simulation.lose("c")
        simulation.settle()
    made = len(rounds(simulation))
    simulation.join("c", 2)
    simulation.feed(events.Ticked(simulation.now + 2.0, 0))
    assert len(rounds(simulation)) == made and simulation.job.phase is m.Phase.RUNNING
    assert "c" in simulation.job.health.barred
    simulation.pass_time(300.0, 5.0)
    assert "c" in active(simulation.job)


def test_the_only_host_that_fits_is_taken_though_it_flaps() -> None:
    simulation = Simulation(job(max_hosts=2, is_loss_free=True, assign=assign_all(minimum=2)))
    simulation.join("a", 2)
    for _ in range(4):
        simulation.join("b", 2)
        simulation.settle()
        assert active(simulation.job) == {"a", "b"}
        simulation.lose("b")
        simulation.settle()


def test_a_script_that_nothing_hooks_is_never_stopped_for_a_change() -> None:
    simulation = Simulation(job(max_hosts=2))
    simulation.join("a", 2)
    simulation.tick(2.0)
    simulation.hosts["a"].is_hung = True  # no step will be told of
    simulation.feed(events.Reported("a", reports.Unhooked(simulation.job.round)))
    simulation.join("b", 2)
    simulation.feed(events.HostLeaving("b", simulation.now))
    simulation.feed(events.Rescaled(assign_all(allowed=(1,)), simulation.now))
    simulation.pass_time(7200.0)
    assert simulation.job.phase is m.Phase.RUNNING and len(rounds(simulation)) == 1
    assert any("nothing hooks" in text for text in reported_lines(simulation))
    hooked, _ = advance(simulation.job, events.Reported("a", reports.Hooked(simulation.job.round)))
    assert hooked.attempt.is_hooked
    hooked, _ = advance(hooked, events.Ticked(simulation.now + 2.0, 0))
    assert hooked.phase is m.Phase.PREPARING, "what was refused is met"
