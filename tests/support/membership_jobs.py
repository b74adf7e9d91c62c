"""Jobs of ``membership_simulation`` as tests begin with them, and what has come of them."""

from scalai.core.job import membership as m
from scalai.core.messages import actions
from support.membership_simulation import Simulation, job


def two_hosts(**settings: object) -> Simulation:
    """Return a running job on hosts a and b, two slots each, whose start is stored."""
    simulation = Simulation(job(**{"max_hosts": 2, **settings}))
    simulation.join("a", 2)
    simulation.join("b", 2)
    simulation.settle()
    simulation.snapshot()
    simulation.settle()
    assert simulation.job.phase is m.Phase.RUNNING
    return simulation


def rounds(simulation: Simulation) -> list[actions.StartRound]:
    """Return the rounds so far, oldest first."""
    return [action for action in simulation.logged if isinstance(action, actions.StartRound)]


def until(simulation: Simulation, phase: m.Phase) -> None:
    """Let the hosts answer until the job is in this phase."""
    while simulation.job.phase is not phase:
        simulation.answer(simulation.waiting()[0])
