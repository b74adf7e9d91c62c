"""What becomes of workers that outlive a failure of their round: they make no further update, say
where they stand, and write their state if it is wanted.

A thread of each worker does it, while the main thread may hang in a collective whose partner died.
"""

from dataclasses import replace

from scalai.core.host import actions, commits, snapshots
from scalai.core.host.actions import Level
from scalai.core.host.events import GroupSeen
from scalai.core.host.state import Call, Emergency, Snapshot
from scalai.core.host.step import Step
from scalai.core.job.deadlines import FREEZE_ALL_S
from scalai.core.messages import reports
from scalai.core.messages.worker_messages import AwaitFreeze, RankFailed, RankFrozen

CAUSE_S = 0.5
"""A process that is killed closes its connections before it has ended: others may raise for that so
much sooner than its end can be seen."""


def await_freeze(step: Step, call: Call, request: AwaitFreeze) -> None:
    """A thread of a worker waits beside the training."""
    current = step.present()
    if current.emergency is not None:
        step.answer(call)
    else:
        step.change_round(watching={**current.watching, request.rank: call})


def failed(step: Step, request: RankFailed) -> None:
    """A worker's script has raised. Its process waits to be ended, and may write meanwhile. One
    that died may be the cause, and is named instead: it is looked for first, for ``CAUSE_S``."""
    current = step.present()
    if not current.raised:
        step.change_round(raised=f"rank {request.rank}: {request.reason}", raised_at=step.now)
        step.do(actions.PollGroup(current.number))


def freeze(step: Step) -> None:
    """Have the workers that live make no further update. Snapshots on the way are given up: who
    writes one stands at its step, and may write it again."""
    current = step.present()
    if not current.has_group:
        step.tell(reports.Frozen(current.number, ()))
    if current.emergency is not None and current.has_group:
        # Another coordinator has told it before, and may not have heard the answer.
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
    """A worker says of which step its memory is the state."""
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
    go_on(step, current.number)  # also where it was to write, and cannot


def _report(step: Step) -> None:
    """Tell the coordinator, once, where the workers stand: when all that live have said so, or the
    time is over."""
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
    """Workers that stand at this step write their state, and that of others which they hold too."""
    current = step.present()
    if current.emergency is None or not current.emergency.is_reported:
        step.tell(reports.Rescued(current.number, at))
        return
    if current.emergency.step == at and current.sealed_step == at:  # it was told before
        _done(step)
        return
    if current.emergency.has_sealed:  # of a step of which not enough was written
        commits.discard(step)
    step.change_round(
        emergency=replace(current.emergency, step=at, has_sealed=False, is_done=False)
    )
    go_on(step, current.number)


def go_on(step: Step, number: int) -> None:
    """Order what can be ordered of a round, and seal what is written."""
    current = step.round
    if current is None or not step.is_present(number) or current.emergency is None:
        return
    _report(step)
    emergency, under_way = step.present().emergency, current.snapshot
    assert emergency is not None
    if emergency.step is None or emergency.is_done or (under_way and under_way.is_sealing):
        return
    is_sealed = under_way is None and current.sealed_step == emergency.step
    has_parts = under_way is not None and bool(under_way.parts)
    if is_sealed or not (has_parts or set(current.ranks) - current.absent):
        step.change_round(snapshot=None)
        _done(step)
    elif current.reserved is not None:
        if under_way is None:
            _order(step)
        snapshots.seal_if_complete(step)
    elif not current.is_reserving:
        step.change_round(is_reserving=True)
        step.do(actions.Reserve(current.number, current.held()))


def _order(step: Step) -> None:
    """Give those that stand at the step their orders."""
    current = step.present()
    emergency = current.emergency
    assert emergency is not None and emergency.step is not None
    calls = {r: call for r, call in emergency.waiting.items() if r not in current.absent}
    left = {rank: call for rank, call in emergency.waiting.items() if rank not in calls}
    step.change_round(
        snapshot=Snapshot("emergency", emergency.step, waiting=calls),
        emergency=replace(emergency, waiting=left, has_sealed=True),
    )
    snapshots.give_orders(step)


def cannot(step: Step, reason: str) -> bool:
    """Whether something has failed that a snapshot needs, in an emergency: then this host writes
    nothing."""
    current = step.round
    if current is None or current.emergency is None:
        return False
    step.change_round(is_reserving=False)
    if current.emergency.step is not None and not current.emergency.is_done:
        step.log(Level.ERROR, f"event=not_rescued {reason}")
        step.change_round(snapshot=None, reserved=None)
        _done(step)
    return True


def _done(step: Step) -> None:
    """Tell the coordinator that this host writes nothing (more) of the step."""
    current = step.present()
    emergency = current.emergency
    assert emergency is not None and emergency.step is not None
    step.change_round(emergency=replace(emergency, is_done=True))
    step.tell(reports.Rescued(current.number, emergency.step))


def watch(step: Step, seen: GroupSeen | None) -> None:
    """Do without workers that end or hang meanwhile."""
    current = step.round
    if current is not None and current.raised and step.now - current.raised_at >= CAUSE_S:
        step.fail(current.raised)
    if current is None or current.emergency is None or not current.has_group:
        return
    ended = frozenset(seen.ended if seen is not None else ()) & set(current.ranks)
    if ended - current.lost:
        step.change_round(lost=current.lost | ended)
    _give_up_who_hangs(step)
    go_on(step, current.number)


def _give_up_who_hangs(step: Step) -> None:
    """Do without workers that have an order and do not write; the clock begins anew whenever one
    does."""
    current = step.present()
    hung = (current.snapshot.unwritten if current.snapshot else frozenset()) - current.absent
    if not hung or hung != current.unwritten:
        give_up_at = step.now + step.state.settings.drain_timeout_s if hung else None
        step.change_round(unwritten=hung, give_up_at=give_up_at)
    elif current.give_up_at is not None and step.now >= current.give_up_at:
        step.log(
            Level.ERROR,
            f"event=gave_up ranks={sorted(hung)} hang in their snapshot: they are ended",
        )
        step.do(actions.Kill(current.number, hung))  # or they might write on
        step.change_round(lost=current.lost | hung, give_up_at=None)
