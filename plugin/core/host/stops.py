"""A stop of the host's workers at one step; dead or hung workers delay nobody."""

from dataclasses import replace

from scalai.core.host import actions, snapshots
from scalai.core.host.actions import Level
from scalai.core.host.events import GroupSeen
from scalai.core.host.state import AgreedStop, Call, HeldStop, Round
from scalai.core.host.step import Step
from scalai.core.messages import commands, reports
from scalai.core.messages.worker_messages import Stand

HELD_TELL_S = 15.0
"""Interval of reports that a save delays a stop, in seconds: well before the agent counts as
silent."""
HELD_LOG_S = 60.0
UNLOOKED_S = 60.0
"""Workers look for a save's end after each step: without a look for this long, in seconds, they may
hang."""


def prepare(step: Step, stop: int, seen: GroupSeen | None) -> None:
    """Propose a stop. During a save it waits: training goes on, and the coordinator gets the
    reason."""
    current = step.round
    if current is None or not current.has_group or seen is None:
        return
    if seen.save is not None:
        step.change(held=HeldStop(current.number, stop, step.now, seen.looks, step.now))
        step.do(actions.WantStop(current.number, 2 if current.was_put_off else 1))
        _hold(step, seen)
        return
    step.change(held=None)
    step.do(actions.WantStop(current.number, 2 if current.was_put_off else 0))
    step.do(commands.Prepare(current.number, stop))


def _hold(step: Step, seen: GroupSeen) -> None:
    """Report the reason of a delayed stop, or propose it at last."""
    held, now = step.state.held, step.now
    if held is None:
        return
    if seen.save is None:
        prepare(step, held.stop, seen)
        return
    if seen.looks != held.looks:
        held = replace(held, looks=seen.looks, looked_at=now)
    what = f"the save of iteration {seen.save} is in flight, {now - held.since:.0f} s so far"
    if now - held.looked_at > UNLOOKED_S:
        what += f"; no worker has looked for its end for {now - held.looked_at:.0f} s"
    if now >= held.tell_at:
        held = replace(held, tell_at=now + HELD_TELL_S)
        step.tell(reports.Held(held.round, held.stop, what))
    if now >= held.log_at:
        held = replace(held, log_at=now + HELD_LOG_S)
        step.log(Level.INFO, f"event=held a change waits: {what}. The training goes on.")
    step.change(held=held)


def stand(step: Step, call: Call, request: Stand) -> None:
    """Hold a worker at an agreed stop with a save that began on the way. It is answered at the
    stop's withdrawal: all ranks stand there alike."""
    current = step.round
    stop = None if current is None or current.number != request.round else current.stop
    if current is None or stop is None or stop.step != request.step:
        step.answer(call)
        return
    step.change_round(was_put_off=True)
    standing = tuple(each for each in step.state.standing if each in current.calls)
    if not standing:  # calls of an ended round do not count
        what = f"the save of iteration {request.iteration} has begun on the way to it"
        step.tell(reports.Held(current.number, request.step, what))
    step.change(standing=(*standing, call))


def withdraw(step: Step) -> None:
    """Forget the stop, proposed or agreed, and release waiting workers."""
    current = step.round
    step.change(held=None)
    if current is None or not current.has_group:
        return
    # First, so that no released worker comes to it again.
    step.do(actions.WantStop(current.number, 0), commands.Withdraw(current.number))
    snapshots.withdraw(step)
    step.change_round(stop=None)
    standing = step.state.standing
    step.change(standing=())
    for call in standing:
        step.answer(call)


def agree(step: Step, command: commands.Agree) -> None:
    """Let workers come to this stop: all workers of the job see it."""
    current = step.round
    if current is not None and current.has_group:
        step.do(command)


def agreed(step: Step, command: commands.Agree) -> None:
    """Record the stop once its word is written."""
    if not step.is_present(command.round):
        return
    stop = step.present().stop
    if stop is None or stop.step != command.stop:  # or another coordinator repeats it
        stop = AgreedStop(command.stop)
    step.change_round(stop=replace(stop, proves=command.proves))


def take_snapshot(step: Step) -> None:
    """Let workers write and leave: the workers of every host stand at the stop."""
    if step.round is None or step.round.stop is None:
        return
    step.change_round(stop=replace(step.round.stop, may_write=True))
    snapshots.give_orders(step)
    snapshots.seal_if_complete(step)


def watch(step: Step, seen: GroupSeen | None) -> None:
    """Watch workers on their way to the stop, and count out writers that hang."""
    current, held = step.round, step.state.held
    if held is not None and (current is None or current.number != held.round):
        step.change(held=None)
    if current is None or not current.has_group or seen is None:
        return
    if step.state.held is not None:
        _hold(step, seen)
    current = step.present()
    if current.stop is None or current.emergency is not None:
        return
    if not current.stop.may_write:
        _look_for_ends(step, current, seen)
    elif not current.stop.has_sealed and (hung := snapshots.overdue(step)):
        # A fork of a dead worker may hold its connection.
        dead = hung & seen.ended.keys()
        step.do(actions.Kill(current.number, hung - dead))
        if dead:
            _go_on(step, dead)


def worker_gone(step: Step, number: int, rank: int, seen: GroupSeen | None) -> None:
    """Handle the end of a present worker's connection."""
    current = step.round
    if current is None or current.number != number or not current.has_group:
        return
    if rank not in current.ranks:
        return
    stop = current.stop
    is_done = stop is not None and stop.has_sealed
    is_done |= current.snapshot is not None and rank in current.snapshot.parts
    if stop is not None and not stop.may_write and current.emergency is None:
        if seen is None or rank not in seen.reached:
            return  # its exit decides: see watch
        step.log(Level.ERROR, f"event=worker_lost rank={rank} at the stop")
    elif stop is not None and not is_done and rank not in current.finished:
        step.log(Level.ERROR, f"event=worker_lost rank={rank} while it snapshots")
    if stop is not None and current.emergency is None:
        _go_on(step, frozenset({rank}))
    else:
        step.change_round(lost=current.lost | {rank})


def _go_on(step: Step, lost: frozenset[int]) -> None:
    """Go on without lost workers."""
    step.change_round(lost=step.present().lost | lost)
    snapshots.tell_arrived(step)
    snapshots.give_orders(step)
    snapshots.seal_if_complete(step)


def _look_for_ends(step: Step, current: Round, seen: GroupSeen) -> None:
    """Handle ends before the stop: success or failure. A worker that died at the stop is lost, and
    its replicas may write for it: a poll would end those with it."""
    died = frozenset(rank for rank, code in seen.ended.items() if code != 0)
    early = sorted(died - seen.reached)
    if early:
        step.fail(f"ranks {early} died on their way to the stop", is_chance=True)
    elif set(current.ranks) <= set(seen.ended) - died:
        step.do(actions.PollGroup(current.number))
    elif died - current.lost:
        _go_on(step, died)
