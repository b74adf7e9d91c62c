"""Snapshots of a host: orders, sealing, and shares of dead ranks.

A snapshot is written at a stop, on the way (``snapshot_every``), or at the start. Its files are
made beside the training; a worker only copies.
"""

from collections.abc import Mapping
from dataclasses import replace

from scalai.core.host import actions
from scalai.core.host.actions import Level
from scalai.core.host.state import Call, HostSnapshot, Round, Seals, SnapshotFiles
from scalai.core.host.step import Step
from scalai.core.job.recovery import LINEAGE, lineage_from
from scalai.core.job.remembered import ASKED
from scalai.core.jsonable import Json
from scalai.core.messages import reports
from scalai.core.messages.commands import DropSnapshot, Space, Start
from scalai.core.messages.worker_messages import (
    AwaitSlot,
    BeginSnapshot,
    RankUnwritten,
    RankWritten,
    WriteOrder,
)
from scalai.core.tensors.fingerprint import differing_replicas

FILES_S = 20.0
"""Longest wait of a snapshot on the way for its files; then training goes on without it."""
SEALED_KEPT = 2
"""Number of uncommitted sealed snapshots to keep, as with a silent coordinator: all hosts may have
these."""
PASSED_STEPS = 2
"""Steps behind a snapshot after which every host has sealed the one before: the next step's update
waits for the files, and the step after it for the update."""
_CHANGES = (
    "A change would keep one rank's values for all: it is made only where a host has to leave. "
    "Have the script keep them equal (sum their gradients over these ranks), or say they are cut."
)
AGAIN_S, LONGEST_AGAIN_S = 5.0, 300.0
"""First and longest pause between tries to reserve room, in seconds."""


def reserve(step: Step) -> None:
    """Make the next snapshot's files beside the training, once the store has room for them."""
    current = step.round
    if current is None or current.is_ending or not current.is_complete(current.models.published):
        return
    files = current.files
    is_first = not current.is_restoring and current.snapshot is None and not current.stepped
    is_early = current.snapshot is None and step.now < files.again_at
    is_full = len(current.seals.uncommitted) > SEALED_KEPT
    if not is_first:
        is_full |= not current.is_complete(current.stepped) or len(step.state.generations) > 1
    if files.slot is None and not files.is_making and not is_early and not is_full:
        make_files(step)


def make_files(step: Step) -> None:
    """Make the next snapshot's files, whatever else there is."""
    current = step.present()
    step.change_round(files=replace(current.files, is_making=True))
    step.do(actions.Reserve(current.number, current.models.held()))


def reserved(step: Step, number: int, slot: SnapshotFiles) -> None:
    """Use the new files; return them if their round has ended."""
    if not step.is_present(number):
        step.do(actions.ReuseFiles(slot))
        return
    files = replace(step.present().files, slot=slot, is_making=False, again_at=0.0)
    current = step.change_round(files=files)
    if current.emergency is not None:
        return  # its own look gives orders
    _give_slots(step)
    give_orders(step)
    seal_if_complete(step)


def no_room(step: Step, number: int, reason: str) -> None:
    """Retry with growing pauses: training needs no room. A snapshot that is due fails the round."""
    if not step.is_present(number):
        return
    files = replace(step.present().files, is_making=False)
    current = step.change_round(files=files)
    is_on_the_way = current.snapshot is not None and current.snapshot.reason == "snapshot"
    is_wanted = current.snapshot is not None and not is_on_the_way
    if is_wanted or not current.is_complete(current.stepped):
        # A job that begins is refused: to begin again makes no room. One that goes on has had some.
        is_first = isinstance(current.command, Start) and not current.command.sources
        step.fail(reason, is_refusal=is_first and not is_wanted)
        return
    wait_s = min(2 * files.wait_s or AGAIN_S, LONGEST_AGAIN_S)
    step.change_round(files=replace(files, wait_s=wait_s, again_at=step.now + wait_s))
    step.log(
        Level.WARNING,
        f"event=no_room round={current.number}: {reason} Until there is room the training goes on, "
        "but a change or an end would lose the steps since the newest generation. Tried again in "
        f"{wait_s:.0f} s.",
    )
    if is_on_the_way:
        _give_up(step, "there is no room for it")


def watch(step: Step) -> None:
    """Skip a snapshot on the way after too long a wait for its files.

    An older generation keeps their room until the newest one has its replicas or the coordinator is
    back. An agreed stop ends the wait at once: its snapshot is newer and needs the room and the
    time.
    """
    current = step.round
    under_way = None if current is None else current.snapshot
    if current is None or current.is_ending:
        return
    if under_way is None or under_way.reason != "snapshot":
        return
    if current.files.slot is not None or under_way.is_given_up:
        return
    waited = step.now - under_way.since
    if current.stop is not None:
        _give_up(step, f"there are no files for it before the stop at step {current.stop.step}")
    elif waited > _patience_s(step.state.settings.hang_s):
        _give_up(step, f"there have been no files for it for {waited:.0f} s")


def _patience_s(hang_s: float) -> float:
    """Shorter than a hang, as when the coordinator dies between a commit and its replicas."""
    return min(FILES_S, hang_s / 2) if hang_s else FILES_S


def _give_up(step: Step, reason: str) -> None:
    """Release this host's ranks from the snapshot on the way."""
    under_way = step.present().snapshot
    assert under_way is not None
    text = f"event=snapshot_skipped step={under_way.step} {reason}; the training goes on."
    step.log(Level.WARNING, text)
    by, waiting = under_way.unwritten_by | set(under_way.waiting), under_way.waiting
    step.change_round(snapshot=replace(under_way, is_given_up=True, waiting={}, unwritten_by=by))
    for call in waiting.values():
        step.answer(call)
    seal_if_complete(step)


def retry(step: Step) -> None:
    if step.round is not None and step.round.files.again_at:
        reserve(step)


def give_back(step: Step, ended: Round) -> None:
    """Reuse the next snapshot's files: the workers are gone."""
    step.do(actions.StopReserving())
    is_sealing = ended.snapshot is not None and ended.snapshot.is_sealing
    if ended.files.slot is not None and not is_sealing:
        step.do(actions.ReuseFiles(ended.files.slot))


def await_slot(step: Step, call: Call, request: AwaitSlot) -> None:
    """Answer a worker with its file of the next snapshot, once it exists."""
    current = step.of(request.round)
    if current is None or request.rank not in current.ranks:
        step.answer(call)
        return
    waiters = (*current.files.waiters, (request.rank, call))
    step.change_of(request.round, files=replace(current.files, waiters=waiters))
    if step.is_present(request.round):
        _give_slots(step)


def _give_slots(step: Step) -> None:
    current = step.present()
    files = current.files
    if files.slot is None or current.snapshot is not None:
        return
    step.change_round(files=replace(files, waiters=()))
    for rank, call in files.waiters:
        step.answer(call, files.slot.orders[rank])


def begin(step: Step, call: Call, request: BeginSnapshot) -> None:
    """Handle a worker's arrival at a snapshot step. A withdrawn stop gives no order; the worker
    goes on."""
    current = step.present()
    if current.emergency is not None:
        return  # it stands there until its round ends
    stop = current.stop
    if request.reason == "stop" and (stop is None or stop.step != request.step):
        if stop is not None and stop.step < request.step and request.rank == current.ranks.start:
            what = "the script has made no boundary there, as at --iterations-to-skip"
            step.tell(reports.Held(current.number, stop.step, what))
        step.answer(call)
        return
    if current.snapshot is None:
        under_way = HostSnapshot(request.reason, request.step, since=step.now)
        current = step.change_round(snapshot=under_way)
    elif request.step < current.snapshot.step:
        step.answer(call)  # the others have skipped it
        return
    elif current.snapshot.step != request.step:
        # The others still write this rank's last snapshot; its next one comes after it.
        step.change_round(postponed=(*current.postponed, (call, request)))
        _pass_over(step, current.snapshot, request)
        return
    assert current.snapshot is not None
    if current.snapshot.is_given_up:
        step.answer(call)
        _without(step, request.rank)
        return
    waiting = {**current.snapshot.waiting, request.rank: call}
    prints = current.snapshot.prints
    if request.fingerprints:
        prints = {**prints, request.rank: request.fingerprints}
    current = step.change_round(snapshot=replace(current.snapshot, waiting=waiting, prints=prints))
    if request.reason == "start" and current.is_complete(prints) and (found := _differing(step)):
        _say_differing(step, found)
    reserve(step)
    tell_arrived(step)
    give_orders(step)


def _pass_over(step: Step, under_way: HostSnapshot, later: BeginSnapshot) -> None:
    """Count a worker out of the snapshot on the way: it learned of the interval too late and is
    past it."""
    known = under_way.ordered | set(under_way.waiting) | under_way.unwritten_by
    if later.step > under_way.step and not under_way.is_last and later.rank not in known:
        _without(step, later.rank)


def spaced(step: Step, command: Space, newest: int) -> None:
    """Record the snapshot interval that workers can now read; ``newest``: their furthest step."""
    round, begin, every = command.round, command.begin, command.every
    if step.is_present(round):
        step.change_round(every=every)
    text = f"event=spaced round={round} begin={begin} every={every}"
    if newest < begin:
        step.log(Level.INFO, text)
        return
    text += f": a worker was at step {newest} by then, and may leave out or add a snapshot"
    step.log(Level.WARNING, text)


def tell_arrived(step: Step) -> None:
    """Report once that all living workers have ended the stop step: a later death leaves no rank
    waiting in a collective."""
    current = step.present()
    under_way, stop = current.snapshot, current.stop
    is_stop = under_way is None or under_way.reason == "stop"
    if stop is None or stop.has_arrived or not is_stop:
        return
    waiting = set(under_way.waiting) if under_way else set()
    if current.is_complete(waiting | current.lost):
        if found := _differing(step):
            _say_differing(step, found)
        step.change_round(stop=replace(stop, has_arrived=True))
        step.tell(reports.Arrived(current.number, stop.step, found))


def _differing(step: Step) -> str:
    """Names of replicas on this host with different contents."""
    current = step.present()
    under_way = current.snapshot
    if under_way is None or not under_way.prints:
        return ""
    found = differing_replicas(current.models.held(), under_way.prints)
    step.change_round(snapshot=replace(under_way, prints={}))
    return found


def _say_differing(step: Step, found: str) -> None:
    text = f"event=replicas_differ {found}: they should hold the same. {_CHANGES}"
    step.log(Level.WARNING, text)


def withdraw(step: Step) -> None:
    """Release workers that wait at the stop."""
    current = step.present()
    under_way = current.snapshot
    if under_way is None or under_way.reason != "stop" or current.may_write:
        return
    step.change_round(snapshot=None)
    for call in under_way.waiting.values():
        step.answer(call)


def give_orders(step: Step) -> None:
    """Answer waiting workers once files and the job's number of tensors are there; at a stop, once
    every host's workers have come."""
    current = step.present()
    under_way = current.snapshot
    slot = current.files.slot
    if under_way is None or slot is None or current.models.tensors is None:
        return
    if under_way.reason == "stop" and not current.may_write:
        return
    ordered = under_way.ordered | set(under_way.waiting)
    step.change_round(snapshot=replace(under_way, waiting={}, ordered=ordered))
    for rank, call in under_way.waiting.items():
        step.answer(call, slot.orders[rank])


def written(step: Step, call: Call, written: RankWritten) -> None:
    """Record a rank's share, or one taken over from a dead rank."""
    current = step.present()
    under_way = current.snapshot
    if under_way is None or written.step != under_way.step:
        # It was sealed without this worker, or it was on the way and given up at a failure.
        step.answer(call)
        return
    is_again = written.rank in under_way.parts
    is_again &= written.rank not in under_way.substitutes.writing
    if is_again or written.rank not in under_way.ordered:
        step.answer(call)  # in an emergency: its main thread was in the middle of a snapshot
        return
    if under_way.is_last:
        under_way = replace(under_way, done={**under_way.done, written.rank: call})
    else:
        step.answer(call)
    under_way = replace(
        _with_part(under_way, written),
        seconds=longest(under_way.seconds, written.seconds),
        consumed_samples=written.consumed_samples,
    )
    step.change_round(snapshot=under_way)
    seal_if_complete(step)


def unwritten(step: Step, call: Call, request: RankUnwritten) -> None:
    """Drop this worker's share of a snapshot on the way: the shares of others may be the whole
    state."""
    step.answer(call)
    text = f"event=unwritten rank={request.rank} step={request.step} {request.reason}"
    step.log(Level.WARNING, text)
    under_way = step.present().snapshot
    if under_way is not None and under_way.step == request.step and not under_way.is_last:
        _without(step, request.rank)


def _without(step: Step, rank: int) -> None:
    under_way = step.present().snapshot
    assert under_way is not None
    by = under_way.unwritten_by | {rank}
    step.change_round(snapshot=replace(under_way, unwritten_by=by))
    seal_if_complete(step)


def _with_part(under_way: HostSnapshot, written: RankWritten) -> HostSnapshot:
    """Add a rank's own share first, later those taken over."""
    others = under_way.substitutes
    writing = dict(others.writing)
    order = writing.pop(written.rank, None)
    if order is None:
        return replace(under_way, parts={**under_way.parts, written.rank: written.part})
    done = (*others.written, (order, written.fingerprints))
    return replace(under_way, substitutes=replace(others, writing=writing, written=done))


def seal_if_complete(step: Step) -> None:
    """Seal once every living worker has written, the shares of dead ones included."""
    current = step.present()
    under_way = current.snapshot
    is_emergency = current.emergency is not None
    is_draining = current.stop is not None
    is_stop = is_draining and (under_way is None or under_way.reason == "stop")
    if is_stop and not is_emergency and not current.may_write:
        return
    written = set(under_way.parts) if under_way else set()
    by = under_way.unwritten_by if under_way else frozenset[int]()
    if not current.is_complete(written | current.absent | by):
        return
    is_on_the_way = under_way is not None and not under_way.is_last
    if is_on_the_way and current.lost - written and not is_draining:
        return  # the round has failed
    if under_way is not None and is_on_the_way and not written:
        _skip(step, current, under_way)
        return
    if not written and is_draining and not is_emergency:
        _tell_sealed(step, None)
    if not written or under_way is None or under_way.is_sealing:
        return
    if under_way.is_last:
        under_way = _hand_over(step)
    if not under_way.substitutes.queued and not under_way.substitutes.writing:
        _seal(step, step.present(), under_way)


def cannot(step: Step, reason: str) -> bool:
    """Skip a snapshot on the way with a failed seal: training goes on. False for any other
    failure."""
    current = step.present()
    under_way = current.snapshot
    if under_way is None or under_way.reason != "snapshot" or not under_way.is_sealing:
        return False
    text = f"event=snapshot_skipped step={under_way.step} {reason} The training goes on."
    step.log(Level.WARNING, text)
    step.change_round(files=replace(current.files, slot=None))  # it was given back
    _skip(step, current, under_way)
    reserve(step)
    return True


def _skip(step: Step, current: Round, under_way: HostSnapshot) -> None:
    """Report no part of a snapshot on the way; other hosts may have the whole state."""
    name = _name(current, under_way.step)
    step.tell(reports.Skipped(current.number, name))
    step.change_round(snapshot=None)
    _begin_postponed(step)
    seal_if_complete(step)


def _name(current: Round, at: int) -> str:
    return f"{current.workers.run}-{current.number}-{at}"


def _begin_postponed(step: Step) -> None:
    postponed = step.present().postponed
    step.change_round(postponed=())
    for call, request in postponed:
        begin(step, call, request)


def _seal(step: Step, current: Round, under_way: HostSnapshot) -> None:
    slot, facts = current.files.slot, dict(current.models.facts)
    assert slot is not None, "who has written had an order"
    step.change_round(snapshot=replace(under_way, is_sealing=True, done={}))
    for call in under_way.done.values():
        step.answer(call)
    about = {
        "snapshot": _name(current, under_way.step),
        "consumed_samples": under_way.consumed_samples,
        "degrees": dict(current.workers.degrees),
        "world_size": current.workers.placement.world_size,
        "tensors": current.models.tensors,
        "hosts": list(current.workers.placement.group),
        "facts": facts,
        LINEAGE: _lineage(current),
    }
    if (known := step.state.remembered) is not None:
        facts[ASKED] = known.value.request.value()
    taken_over = under_way.substitutes.written
    step.do(actions.Seal(current.number, slot, under_way.step, about, under_way.parts, taken_over))


def _lineage(current: Round) -> Json:
    command = current.command
    if not isinstance(command, Start) or command.sources is None:
        return []
    source = command.sources.value
    return lineage_from(source.about.value(), source.generation, current.workers.run)


def sealed(step: Step, seal: actions.Seal, manifest: bytes) -> None:
    """Report a sealed snapshot.

    One of an ended round is dropped, unless the job went on without this host: the coordinator may
    count on it.
    """
    number = seal.round
    if not step.is_present(number):
        if number not in step.state.expelled:
            step.do(actions.ReuseFiles(seal.slot))
        return
    _tell_sealed(step, manifest)
    current = step.present()
    under_way = current.snapshot
    if under_way is not None:
        uncommitted = (*current.seals.uncommitted, _name(current, under_way.step))
        step.change_round(seals=Seals(under_way.step, uncommitted))
    step.change_round(files=replace(current.files, slot=None), snapshot=None)
    _begin_postponed(step)


def give_up_older(step: Step, newest: int) -> None:
    """Drop uncommitted sealed snapshots once the workers' ``newest`` step shows later ones on all
    hosts."""
    current = step.round
    if current is None:
        return
    sealed, uncommitted = current.seals.step, current.seals.uncommitted
    if sealed is None or len(uncommitted) <= SEALED_KEPT:
        return
    if newest < sealed + min(PASSED_STEPS, max(1, current.snapshot_every)):
        return
    step.change_round(seals=Seals(sealed, uncommitted[-SEALED_KEPT:]))
    for name in uncommitted[:-SEALED_KEPT]:
        step.log(
            Level.WARNING,
            f"event=snapshot_given_up snapshot={name} nobody has committed it, and {SEALED_KEPT} "
            "later ones are sealed: is the coordinator silent?",
        )
        step.do(DropSnapshot(name))
    reserve(step)


def settled(step: Step, name: str) -> None:
    """Forget a sealed snapshot after the coordinator's decision."""
    current = step.round
    if current is not None and name in current.seals.uncommitted:
        left = tuple(each for each in current.seals.uncommitted if each != name)
        step.change_round(seals=replace(current.seals, uncommitted=left))


def was_given_up(step: Step, name: str) -> bool:
    """Whether this host dropped a snapshot because later ones were sealed."""
    current = step.round
    newest = None if current is None else current.seals.step
    if current is None or newest is None:
        return False
    its = name.removeprefix(_name(current, 0).removesuffix("0"))
    return its.isdigit() and int(its) < newest and name not in current.seals.uncommitted


def _tell_sealed(step: Step, manifest: bytes | None) -> None:
    """Report a snapshot; None: nobody lived to write."""
    current = step.present()
    stop = current.stop
    if stop is not None and stop.has_sealed:
        return
    under_way = current.snapshot or HostSnapshot("stop", 0 if stop is None else stop.step)
    if stop is not None and under_way.reason == "stop":
        step.change_round(stop=replace(stop, has_sealed=True))
    name, seconds = _name(current, under_way.step), dict(under_way.seconds)
    step.tell(reports.Sealed(current.number, under_way.reason, name, manifest, seconds))


def _hand_over(step: Step) -> HostSnapshot:
    """Give the shares of dead workers to living replicas. Returns the snapshot afterwards."""
    current = step.present()
    under_way, slot, lost = current.snapshot, current.files.slot, current.absent
    assert under_way is not None and slot is not None
    others, alive = under_way.substitutes, set(under_way.parts) - lost
    # A substitute's death leaves a gap here; other holders of the pieces still have them.
    queued = {rank: each for rank, each in others.queued.items() if rank not in lost}
    writing = {rank: each for rank, each in others.writing.items() if rank not in lost}
    new = sorted(lost - set(under_way.parts) - others.replaced)
    for rank in new:
        for substitute, order in slot.take_over(rank, alive).items():
            queued[substitute] = (*queued.get(substitute, ()), order)
    done, given = dict(under_way.done), list[tuple[Call, WriteOrder]]()
    for rank in [rank for rank in queued if rank in done]:
        writing[rank], *rest = queued.pop(rank)
        if rest:
            queued[rank] = tuple(rest)
        given.append((done.pop(rank), writing[rank]))
    replaced = others.replaced | set(new)
    others = replace(others, replaced=replaced, queued=queued, writing=writing)
    under_way = replace(under_way, substitutes=others, done=done)
    step.change_round(snapshot=under_way)
    for call, order in given:
        step.answer(call, order)
    return under_way


def overdue(step: Step) -> frozenset[int]:
    """Ranks with an order and nothing written for the drain timeout; each write restarts the
    clock."""
    current, patience_s = step.present(), step.state.settings.drain_timeout_s
    under_way = current.snapshot
    hung = frozenset[int]() if under_way is None else under_way.unwritten - current.absent
    if under_way is None or not hung:
        return frozenset()
    is_over = hung == under_way.overdue and step.now >= under_way.give_up_at
    if is_over or hung != under_way.overdue:
        at = step.now + patience_s
        step.change_round(snapshot=replace(under_way, overdue=hung, give_up_at=at))
    if not is_over:
        return frozenset()
    text = f"event=gave_up ranks={sorted(hung)} hang in their snapshot: they are ended"
    step.log(Level.ERROR, text)
    return hung


def longest(kept: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Longest time of any worker by phase, in seconds."""
    return {phase: max(kept.get(phase, 0.0), more.get(phase, 0.0)) for phase in {**kept, **more}}
