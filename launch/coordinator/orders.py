"""What the law asks of hosts and is nothing but a command to them."""

from collections.abc import Container

from scalai.core.messages import actions, commands
from scalai.launch.coordinator.generations import Generations
from scalai.store.parts import is_fetched

Order = tuple[tuple[str, ...], commands.Command]
"""The hosts, and what they are told."""


def command_of(action: actions.Action, round: int, generations: Generations) -> Order:
    """Return the command that carries an action out in this round of the job."""
    match action:
        case actions.Prepare(hosts, stop):
            return hosts, commands.Prepare(round, stop)
        case actions.Agree(hosts, stop, probes):
            return hosts, commands.Agree(round, stop, probes)
        case actions.Withdraw(hosts):
            return hosts, commands.Withdraw(round)
        case actions.TakeSnapshot(hosts):
            return hosts, commands.TakeSnapshot(round)
        case actions.Space(hosts, begin, every):
            return hosts, commands.Space(round, begin, every)
        case actions.Freeze(hosts):
            return hosts, commands.Freeze(round)
        case actions.Rescue(hosts, step):
            return hosts, commands.Rescue(round, step)
        case actions.Proceed(hosts):
            return hosts, commands.Proceed(round)
        case actions.SaveDurable(hosts, generation):
            return hosts, commands.Save(generation)
        case actions.Archive(hosts, order, generation):
            own_only = _is_held_by_writers(generations, generation, hosts)
            return hosts, commands.Archive(order, generation, own_only)
        case actions.FinishArchive(hosts, order, generation):
            return hosts, commands.FinishArchive(order, generation)
        case actions.Retire(hosts, before):
            return hosts, commands.Retire(before)
        case actions.EndWorkers(hosts, ended):
            return hosts, commands.Stop(ended, has_written=False)
        case actions.Examine(hosts, generation):
            return hosts, commands.Examine(generation)
        case actions.Doubt(hosts, generation):
            return hosts, commands.Doubt(generation)
        case actions.Look(hosts):
            return hosts, commands.Look()
        case actions.CheckHealth(hosts, order, reason):
            return hosts, commands.CheckHealth(order, reason)
        case _:
            raise AssertionError(f"nobody carries out {action!r}")


def _is_held_by_writers(generations: Generations, number: int, hosts: Container[str]) -> bool:
    """Whether all that wrote a generation are among these hosts, and hold what they wrote."""
    stated, parts = generations.stated(number), generations.parts(number)
    return stated is not None and all(
        host in hosts and host in parts and not all(map(is_fetched, parts[host].files))
        for host in stated.hosts
    )
