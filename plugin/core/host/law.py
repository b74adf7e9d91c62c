"""The law of a host: ``advance(state, event)`` returns the next state of the host and the actions.

Nothing here waits, sends, reads a clock or touches a process: the agent (``launch.agent.loop``)
feeds events in and performs the actions. The law of the job (``core.job.resize``) issues this law's
commands and gets its reports. Every rule keeps one promise: a sealed snapshot stays until the
coordinator's decision, and every pending call gets an answer, or an error once its round has ended.
"""

from scalai.core.host import (
    actions,
    commits,
    emergency,
    events,
    leaving,
    proof_step,
    rounds,
    snapshots,
    stops,
    succession,
)
from scalai.core.host.actions import Action, Level
from scalai.core.host.standby import Standby
from scalai.core.host.state import Call, HostState, SnapshotFiles
from scalai.core.host.step import Step
from scalai.core.messages import commands, reports
from scalai.core.messages.worker_messages import (
    AwaitFreeze,
    AwaitPieces,
    AwaitRound,
    AwaitSlot,
    BeginSnapshot,
    Hello,
    Publish,
    RankFailed,
    RankFinished,
    RankFrozen,
    RankRefused,
    RankRestored,
    RankStepped,
    RankUnhooked,
    RankUnwritten,
    RankWritten,
    Stand,
    WorkerRequest,
)

OF_THE_PRESENT_ROUND = (
    commands.Expect,
    commands.Proceed,
    commands.Prepare,
    commands.Agree,
    commands.TakeSnapshot,
    commands.Withdraw,
    commands.Freeze,
    commands.Rescue,
)
"""Commands to the workers of a round; too late for any other round."""
OF_BOTH_ROUNDS = (
    Hello, AwaitRound, Publish, AwaitSlot, RankFinished, RankRefused, RankUnhooked,
)  # fmt: skip
"""Requests allowed from workers on standby."""


def advance(state: HostState, event: events.Event) -> tuple[HostState, tuple[Action, ...]]:
    """The host after ``event``, and the agent's actions in order."""
    step = Step(state)
    if state.exit is None:
        _on(step, event)
    return step.state, tuple(step.due)


def _on(step: Step, event: events.Event) -> None:
    """Apply the rule of an event; reports of the agent's own parts are passed on."""
    match event:
        case events.TimePassed(at, seen):
            _time_passed(step, at, seen)
        case events.Commanded(command, seen):
            _commanded(step, command, seen)
        case events.Called(call, request):
            _called(step, call, request)
        case events.WorkerGone(number, rank, seen):
            stops.worker_gone(step, number, rank, seen)
            emergency.go_on(step, number)
        case events.GroupOver():
            rounds.group_over(step, event)
        case events.Done(work, result):
            _done(step, work, result)
        case events.Failed(work, reason):
            _failed(step, work, reason)
        case events.RestorePlanned():
            rounds.planned(step, event)
        case events.PiecesHere():
            rounds.pieces_here(step, event)
        case events.NothingToCommit(command, found):
            commits.nothing(step, command, found)
        case events.Holds(generations):
            commits.holds(step, generations)
        case events.LeaveAsked():
            leaving.asked(step)
        case events.Noticed():
            leaving.noticed(step, event)
        case events.NoticeWithdrawn(source):
            leaving.withdrawn(step, source)
        case events.Expelled(reason):
            _expelled(step, reason)
        case events.CoordinatorReplaced():
            succession.replaced(step)
        case events.JobLost(reason):
            _lost(step, reason)
        case reports.Committed():
            commits.done(step, event)
        case reports.Slots(slots):
            if slots != step.state.slots:
                step.change(slots=slots)
                step.tell(event)
        case reports.Prepared() | reports.Moved() | reports.Unproven():
            if step.is_present(event.round):
                step.tell(event)
        case (
            reports.Grown()
            | reports.Suspected()
            | reports.Replicated()
            | reports.HealthChecked()
            | reports.Knocked()
        ):
            step.tell(event)
        case _:
            raise AssertionError(f"nobody decides about {event!r}")


def _done(step: Step, work: Action, result: events.Result) -> None:
    match work, result:
        case actions.StartGroup(workers), Standby() | None:
            rounds.group_started(step, workers.round, result)
        case actions.WarmUp(), None:
            rounds.warmed(step)
        case actions.EndGroup(number), int(newest):
            rounds.group_ended(step, number, newest)
        case commands.Agree(), None:
            stops.agreed(step, work)
        case commands.Space(), int(newest):
            snapshots.spaced(step, work, newest)
        case actions.Reserve(number), SnapshotFiles():
            snapshots.reserved(step, number, result)
            emergency.go_on(step, number)
        case actions.Seal(), bytes(manifest):
            snapshots.sealed(step, work, manifest)
            emergency.go_on(step, work.round)
        case actions.FetchWanted(start), None:
            rounds.all_here(step, start.workers.round)
        case actions.Rejoin(), None:
            _rejoined(step)
        case _:
            raise AssertionError(f"nobody decides about {result!r} of {work!r}")


def _failed(step: Step, work: Action, reason: str) -> None:
    match work:
        case actions.StartGroup(workers):
            rounds.group_not_started(step, workers.round, reason)
        case actions.Reserve(number):
            if not step.is_present(number) or not emergency.cannot(step, reason):
                snapshots.no_room(step, number, reason)
        case actions.Seal(number):
            is_present = step.is_present(number) and not emergency.cannot(step, reason)
            if is_present and not snapshots.cannot(step, reason):
                step.fail(reason)
        case actions.FetchWanted(start):
            if step.is_present(start.workers.round) and not emergency.cannot(step, reason):
                step.fail(reason)
        case commands.Commit():
            commits.no_room(step, work, reason)
        case actions.Rejoin():
            _lost(step, reason)
        case _:
            step.fail(reason)


def _lost(step: Step, reason: str) -> None:
    step.log(Level.ERROR, reason)
    step.change(exit=1)


# ---------------------------------------------------------------------- time


def _time_passed(step: Step, at: float, seen: events.GroupSeen | None) -> None:
    step.change(now=at)
    if leaving.is_over(step, seen):
        return
    commits.retry(step)
    snapshots.retry(step)
    snapshots.give_up_older(step, 0 if seen is None else seen.newest)
    snapshots.watch(step)
    stops.watch(step, seen)
    emergency.watch(step, seen)
    rounds.poll(step)
    proof_step.watch(step, seen)


# ---------------------------------------------------------------------- what the coordinator says


def _commanded(step: Step, command: commands.Command, seen: events.GroupSeen | None) -> None:
    if isinstance(command, OF_THE_PRESENT_ROUND) and not step.is_present(command.round):
        return
    match command:
        case commands.Remember(known):
            step.change(remembered=known)
        case commands.Build():
            rounds.build(step, command)
        case commands.GiveUp(number):
            rounds.give_up(step, number)
        case commands.Start():
            rounds.start(step, command)
        case commands.Expect(_, tensors):
            rounds.expect(step, tensors)
        case commands.Proceed():
            rounds.proceed(step)
        case commands.Prepare(_, stop):
            stops.prepare(step, stop, seen)
        case commands.Agree():
            stops.agree(step, command)
        case commands.TakeSnapshot():
            stops.take_snapshot(step)
        case commands.Withdraw():
            stops.withdraw(step)
        case commands.Freeze():
            emergency.freeze(step)
        case commands.Rescue(_, at):
            emergency.write(step, at)
        case commands.Stop(number, has_written):
            rounds.stop(step, number, has_written=has_written)
        case commands.Commit():
            commits.commit(step, command)
        case commands.Discard():
            commits.discard(step)
        case commands.Space(number):
            if step.is_present(number) and step.present().has_group:
                step.do(command)
        case commands.DropSnapshot(snapshot):
            snapshots.settled(step, snapshot)
            step.do(command)
        case commands.Drop():
            commits.drop(step, command)
        case commands.LogStacks():
            if step.round is not None and step.round.has_group:
                step.do(actions.ShowStacks(step.round.number))
        case commands.Exit():
            _exit(step, command)
        case _:  # for the store, the data plane and the health check, as it came
            step.do(command)


def _exit(step: Step, command: commands.Exit) -> None:
    code, reason = command.code, command.reason
    step.log(Level.INFO, f"event=exit host={step.state.host} code={code} reason={reason!r}")
    finish = step.state.finish
    step.do(actions.LeaveState(command, finish.step, finish.ledger))
    step.change(exit=code)


def _expelled(step: Step, reason: str) -> None:
    """End the workers and join again: the job goes on without this host."""
    step.log(
        Level.WARNING,
        f"event=expelled host={step.state.host} {reason} Its workers end, and it joins again with "
        "what its store holds.",
    )
    commits.forget(step)
    rounds.give_up(step)
    if step.round is None:
        step.do(actions.Rejoin())
        return
    step.change(is_rejoining=True, expelled=step.state.with_expelled(step.round.number))
    rounds.end(step, 0.0)


def _rejoined(step: Step) -> None:
    step.log(Level.INFO, f"event=rejoined host={step.state.host}")
    step.tell(reports.Slots(step.state.slots))
    leaving.tell_again(step)
    succession.tell_again(step)


# ---------------------------------------------------------------------- what workers say


def _called(step: Step, call: Call, request: WorkerRequest) -> None:
    """Handle a worker's call, or refuse one of an ended or foreign round: late calls may still
    arrive."""
    current = step.of(request.round)
    is_known = current is not None and (
        request.rank in current.ranks or isinstance(request, AwaitSlot)
    )
    is_due = isinstance(request, RankStepped | RankFinished)  # also of one that proves or ends
    if current is not None and not current.is_ending:
        is_due |= step.is_present(request.round) or isinstance(request, OF_BOTH_ROUNDS)
    if current is None or not is_known or not is_due:
        step.refuse(call, rounds.ENDED)
        return
    step.change_of(request.round, calls=current.calls | {call})
    match request:
        case Hello():
            is_standby = not step.is_present(request.round)
            step.change_of(request.round, calls=current.calls)
            at_brink = is_standby and current.is_at_brink
            answer = actions.AnswerHello(
                call, current.workers, is_standby, at_brink, current.is_from_standby
            )
            step.do(answer)
            rounds.joined(step, request)
        case AwaitRound():
            rounds.await_round(step, call, request)
        case Publish():
            rounds.publish(step, call, request)
        case AwaitPieces():
            rounds.await_pieces(step, call, request)
        case AwaitSlot():
            snapshots.await_slot(step, call, request)
        case BeginSnapshot():
            snapshots.begin(step, call, request)
        case Stand():
            stops.stand(step, call, request)
        case RankWritten():
            snapshots.written(step, call, request)
        case RankUnwritten():
            snapshots.unwritten(step, call, request)
        case RankRestored():
            rounds.restored(step, call, request)
        case RankStepped():
            step.answer(call)
            rounds.stepped(step, request)
        case RankFinished():
            step.answer(call)
            rounds.finished(step, request)
        case RankRefused(_, number, reason):
            rounds.refuse(step, number, reason)  # it waits only to be ended
        case AwaitFreeze():
            emergency.await_freeze(step, call, request)
        case RankFrozen():
            emergency.frozen(step, call, request)
        case RankFailed():
            emergency.failed(step, request)
        case RankUnhooked(rank, number):
            step.answer(call)
            rounds.unhooked(step, number, rank)
