"""A host with a new coordinator: its workers train on, and it joins with the state of their
round."""

from scalai.core.host import actions, commits, rounds, stops
from scalai.core.host.actions import Level
from scalai.core.host.events import GroupSeen
from scalai.core.host.state import HostState
from scalai.core.host.step import Step
from scalai.core.job.remembered import Underway
from scalai.core.messages import reports


def replaced(step: Step) -> None:
    """Forget decisions half known to the old coordinator, and join the new one.

    A stop is withdrawn unless all workers of this host stand at it: another host may then already
    have the order to write. Workers being ended are waited for.
    """
    host, current = step.state.host, step.round
    step.log(
        Level.WARNING,
        f"event=coordinator_replaced host={host}: it joins the new one"
        + (", and its workers train on" if current is not None else ""),
    )
    commits.forget(step)
    rounds.give_up(step)
    if current is None:
        step.do(actions.Rejoin())
        return
    if current.is_ending:
        step.change(is_rejoining=True, expelled=step.state.with_expelled(current.number))
        return
    has_arrived = current.stop is not None and current.stop.has_arrived
    if not has_arrived and current.emergency is None:
        stops.withdraw(step)
    step.do(actions.Rejoin())


def tell_again(step: Step) -> None:
    """Repeat reports of the present round: the old coordinator may have missed them."""
    current = step.round
    outcome = None if current is None else current.outcome
    if isinstance(outcome, reports.WorkersFailed | reports.Finished):
        step.tell(outcome)


def underway(state: HostState, seen: GroupSeen | None) -> Underway | None:
    """The host's round for the new coordinator; None without one, or while its workers end."""
    current = state.round
    if current is None or current.is_ending:
        return None
    workers, models, stop = current.workers, current.models, current.stop
    is_trained = current.has_group
    if state.settings.is_elastic and not models.is_unhooked:
        is_trained = current.is_complete(current.first.ranks)
    has_begun = models.is_proven and models.tensors is not None
    return Underway(
        run=workers.run,
        round=current.number,
        workers=workers.placement.workers,
        degrees=workers.degrees,
        micro_batch_size=workers.micro_batch_size,
        generation=workers.generation,
        newest=seen.newest if seen is not None else 0,
        is_proven=has_begun or not state.settings.is_elastic or models.is_unhooked,
        is_stepping=is_trained,
        is_hooked=not models.is_unhooked,
        stop=None if stop is None else stop.step,
        has_arrived=stop is not None and stop.has_arrived,
        is_writing=current.may_write,
        is_sealed=stop is not None and stop.has_sealed,
        is_failed=current.failure is not None or current.emergency is not None,
        is_finished=isinstance(current.outcome, reports.Finished),
        every=current.snapshot_every,
        recompute=workers.recompute,
        offload=workers.offload,
    )
