"""Workers that outlive a failure: they stop updating, report their step, and write their state on
request.

A thread of each worker does it; the main thread may hang in a collective with a dead partner.
"""

from dataclasses import replace

from scalai.core.host import actions, commits, snapshots
from scalai.core.host.actions import Level
from scalai.core.host.events import GroupSeen
from scalai.core.host.state import Call, Emergency, HostSnapshot, Raised
from scalai.core.host.step import Step
from scalai.core.job.deadlines import FREEZE_ALL_S
from scalai.core.job.endings import WRONG_RESULT
from scalai.core.messages import reports
from scalai.core.messages.worker_messages import AwaitFreeze, RankFailed, RankFrozen

CAUSE_S = 0.5
"""Time to look for a dead process, in seconds. A killed process closes its connections before it
ends: others may raise that much sooner than its end is visible."""


def await_freeze(step: Step, call: Call, request: AwaitFreeze) -> None:
    current = step.present()
    if current.emergency is not None:
        step.answer(call)
    else:
        step.change_round(watching={**current.watching, request.rank: call})


def failed(step: Step, request: RankFailed) -> None:
    """Record a script's exception. Its process waits to be ended, and may write meanwhile. For
    ``CAUSE_S`` a dead worker is sought first, and named instead as the likely cause."""
    current = step.present()
    # Of ranks that leave with one code, the one that is at fault may tell last.
    is_culprit = isinstance(current.outcome, Raised) and WRONG_RESULT in request.reason
    if current.outcome is None or is_culprit:
        raised = Raised(f"rank {request.rank}: {request.reason}", step.now)
        step.change_round(outcome=raised)
        step.do(actions.PollGroup(current.number))


def freeze(step: Step) -> None:
    """Stop further updates by living workers, and give up snapshots on the way: a rank in one
    stands at its step and may write it again."""
    current = step.present()
    if not current.has_group:
        step.tell(reports.Frozen(current.number, ()))
    if current.emergency is not None and current.has_group:
        # Another coordinator has asked before, and may not have heard the answer.
        step.change_round(emergency=replace(current.emergency, is_reported=False))
        _report(step)
    if current.emergency is not None or not current.has_group:
        return
    step.log(Level.INFO, f"event=freeze round={current.number}")
    under_way = current.snapshot
    is_sealing = under_way is not None and under_way.is_sealing
    step.change_round(
        emergency=Emergency(step.now + FREEZE_ALL_S),
        watching={},
        snapshot=under_way if is_sealing else None,
        postponed=(),
    )
    for call in current.watching.values():
        step.answer(call)
    _report(step)


def frozen(step: Step, call: Call, request: RankFrozen) -> None:
    """Record the step of a worker's memory."""
    current = step.present()
    emergency = current.emergency
    if emergency is None:
        step.answer(call)
        return
    if request.step is None:
        step.log(Level.WARNING, f"event=torn rank={request.rank} {request.reason}")
    step.change_round(
        emergency=replace(
            emergency,
            steps={**emergency.steps, request.rank: request.step},
            waiting={**emergency.waiting, request.rank: call},
        )
    )
    go_on(step, current.number)  # also after a failed write


def _report(step: Step) -> None:
    """Report the workers' steps once: when all living ones have answered, or at the deadline."""
    current = step.present()
    emergency = current.emergency
    if emergency is None or emergency.is_reported:
        return
    silent = set(current.ranks) - current.lost - emergency.steps.keys()
    if silent and step.now < emergency.until:
        return
    if silent:
        step.log(Level.WARNING, f"event=not_frozen ranks={sorted(silent)} do not answer")
    steps = {at for at in emergency.steps.values() if at is not None}
    step.change_round(emergency=replace(emergency, is_reported=True))
    step.tell(reports.Frozen(current.number, tuple(sorted(steps))))


def write(step: Step, at: int) -> None:
    """Write the state of workers at this step, with their replicas of others' state."""
    current = step.present()
    if current.emergency is None or not current.emergency.is_reported:
        step.tell(reports.Rescued(current.number, at))
        return
    if current.emergency.step == at and current.seals.step == at:  # a repeated command
        _done(step)
        return
    if current.emergency.has_sealed:  # of a step without a complete state
        commits.discard(step)
    step.change_round(
        emergency=replace(current.emergency, step=at, has_sealed=False, is_done=False)
    )
    go_on(step, current.number)


def go_on(step: Step, number: int) -> None:
    """Give the possible orders of a round, and seal a complete write."""
    current = step.round
    if current is None or not step.is_present(number) or current.emergency is None:
        return
    _report(step)
    emergency, under_way = step.present().emergency, current.snapshot
    assert emergency is not None
    if emergency.step is None or emergency.is_done or (under_way and under_way.is_sealing):
        return
    is_sealed = under_way is None and current.seals.step == emergency.step
    has_parts = under_way is not None and bool(under_way.parts)
    if is_sealed or not (has_parts or set(current.ranks) - current.absent):
        step.change_round(snapshot=None)
        _done(step)
    elif current.files.slot is not None:
        if under_way is None:
            _order(step)
        snapshots.seal_if_complete(step)
    elif not current.files.is_making:
        snapshots.make_files(step)


def _order(step: Step) -> None:
    """Give orders to ranks at the step."""
    current = step.present()
    emergency = current.emergency
    assert emergency is not None and emergency.step is not None
    calls = {r: call for r, call in emergency.waiting.items() if r not in current.absent}
    left = {rank: call for rank, call in emergency.waiting.items() if rank not in calls}
    step.change_round(
        snapshot=HostSnapshot("emergency", emergency.step, waiting=calls),
        emergency=replace(emergency, waiting=left, has_sealed=True),
    )
    snapshots.give_orders(step)


def cannot(step: Step, reason: str) -> bool:
    """Handle a failed snapshot of an emergency: this host writes nothing. False without an
    emergency."""
    current = step.round
    if current is None or current.emergency is None:
        return False
    files = replace(current.files, is_making=False)
    step.change_round(files=files)
    if current.emergency.step is not None and not current.emergency.is_done:
        step.log(Level.ERROR, f"event=not_rescued {reason}")
        step.change_round(snapshot=None, files=replace(files, slot=None))
        _done(step)
    return True


def _done(step: Step) -> None:
    """Report that this host writes nothing (more) of the step."""
    current = step.present()
    emergency = current.emergency
    assert emergency is not None and emergency.step is not None
    step.change_round(emergency=replace(emergency, is_done=True))
    step.tell(reports.Rescued(current.number, emergency.step))


def watch(step: Step, seen: GroupSeen | None) -> None:
    """Count out workers that end or hang meanwhile."""
    current = step.round
    raised = None if current is None else current.outcome
    if isinstance(raised, Raised) and step.now - raised.at >= CAUSE_S:
        step.fail(raised.reason)
    if current is None or current.emergency is None or not current.has_group:
        return
    ended = frozenset(seen.ended if seen is not None else ()) & set(current.ranks)
    if ended - current.lost:
        step.change_round(lost=current.lost | ended)
    if hung := snapshots.overdue(step):
        step.do(actions.Kill(current.number, hung))  # or they might write on
        step.change_round(lost=step.present().lost | hung)
    go_on(step, current.number)
