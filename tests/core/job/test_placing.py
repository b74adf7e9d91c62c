"""The rules of membership: hosts change places with each other at a change, and at nothing else."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from scalai.core.job import membership as m
from scalai.core.messages import events
from scalai.core.planner.columns import OPTIMIZER
from scalai.core.planner.placement import make_place
from support.membership_choice import assign_all
from support.membership_jobs import rounds, two_hosts
from support.membership_simulation import Simulation, job


@dataclass
class Placing:
    """Puts hosts in the order of their names, last ones first, and notes what it was asked."""

    asked: list[tuple[m.Assignment, m.Assignment]] = field(default_factory=list)
    is_reversed: bool = True

    def __call__(
        self, target: m.Assignment, ran: m.Assignment, slots: tuple[tuple[str, int], ...]
    ) -> m.Assignment:
        self.asked.append((target, ran))
        workers = tuple(sorted(target.workers, reverse=self.is_reversed))
        return replace(target, workers=workers, reason="placed")


def placed_job(place: Callable[..., m.Assignment], **settings: object) -> Simulation:
    simulation = two_hosts(**{"max_hosts": 3, "place": place, **settings})
    simulation.train(5)
    return simulation


def test_a_job_begins_in_the_order_of_joining_and_changes_to_the_better_one() -> None:
    place = Placing()
    simulation = placed_job(place)
    assert rounds(simulation)[-1].assignment.active == ("a", "b")
    simulation.join("c", 2)
    simulation.settle()
    last = rounds(simulation)[-1].assignment
    assert last.active == ("c", "b", "a") and last.reason == "placed"
    target, ran = place.asked[-1]
    assert [name for name, _ in target.workers] == ["a", "b", "c"]
    assert ran.workers == (("a", 2), ("b", 2))


def test_a_job_that_runs_is_not_changed_for_another_order() -> None:
    place = Placing()
    simulation = placed_job(place)
    simulation.join("c", 2)
    simulation.settle()
    place.is_reversed = False
    before = rounds(simulation)
    simulation.feed(events.Rescaled(simulation.job.settings.assign, simulation.now))
    simulation.settle()
    assert rounds(simulation) == before and simulation.job.phase is m.Phase.RUNNING


def test_workers_that_stand_by_begin_where_they_were_built() -> None:
    place = Placing()
    simulation = placed_job(place, build_timeout_s=30.0)
    simulation.join("c", 2)
    simulation.tick(1.0)
    assert simulation.job.phase is m.Phase.BUILDING
    place.is_reversed = False  # more is known of the state by the time of the stop
    simulation.settle()
    last = rounds(simulation)[-1]
    assert last.is_built and last.assignment.active == ("c", "b", "a")
    assert last.assignment.reason == "placed"


def test_what_has_failed_in_its_order_is_passed_over() -> None:
    simulation = placed_job(Placing(), left=3)
    simulation.cannot_run.add(6)
    simulation.join("c", 2)
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING
    tried = [each.assignment for each in rounds(simulation)]
    assert [each.degrees.dp for each in tried].count(6) <= 2
    assert tried[-1].workers == (("a", 2), ("b", 2)), "back to what ran"


def test_what_has_failed_is_not_tried_again_in_another_order() -> None:
    place = Placing()
    simulation = placed_job(place, left=3)
    simulation.cannot_run.add(6)
    simulation.join("c", 2)
    simulation.settle()
    before = len(rounds(simulation))
    place.is_reversed = False
    simulation.feed(events.Rescaled(simulation.job.settings.assign, simulation.now))
    simulation.settle()
    assert len(rounds(simulation)) == before and simulation.job.phase is m.Phase.RUNNING


def test_a_host_that_has_lost_its_memory_holds_nothing() -> None:
    place = Placing()
    simulation = placed_job(place)
    simulation.lose("a")
    place.asked.clear()
    simulation.join("a", 2)  # a new machine of that name
    simulation.join("c", 2)
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING
    ran = {asked[1].workers for asked in place.asked}
    assert ran == {((m.LOST, 2), ("b", 2))}


def test_a_job_without_state_has_the_order_of_joining() -> None:
    place = Placing()
    simulation = Simulation(job(place=place))
    simulation.join("b", 2)
    simulation.join("a", 2)
    simulation.settle()
    assert rounds(simulation)[-1].assignment.active == ("b", "a") and not place.asked


def test_the_host_that_stays_keeps_its_ranks() -> None:
    place, four = make_place(None, lambda world_size: OPTIMIZER), assign_all(2, (4,))
    simulation = placed_job(place, assign=four)
    simulation.join("c", 2)
    simulation.settle()
    simulation.feed(events.HostLeaving("a", simulation.now))
    simulation.settle()
    last = rounds(simulation)[-1].assignment
    assert last.active == ("c", "b") and "of what is wanted crosses" in last.reason
