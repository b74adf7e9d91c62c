"""A round of the host's workers from start to end: on standby or begun, published, restored,
proven, stepped, finished, failed, ended."""

from dataclasses import replace

import numpy as np

from scalai.core.errors import ProofError
from scalai.core.host import actions, proof_step, snapshots
from scalai.core.host.actions import Level
from scalai.core.host.events import GroupOver, PiecesHere, RestorePlanned
from scalai.core.host.standby import Standby
from scalai.core.host.state import (
    Call,
    Finish,
    ForkServer,
    Group,
    Models,
    RankModel,
    RestoredRanks,
    Round,
    Steps,
    Want,
)
from scalai.core.host.step import Step
from scalai.core.job.function_proof import merged
from scalai.core.messages import commands, reports
from scalai.core.messages.worker_messages import (
    AtBrink,
    AwaitPieces,
    AwaitRound,
    Hello,
    Imports,
    Publish,
    RankFinished,
    RankRestored,
    RankStepped,
)
from scalai.core.tensors.collection import concatenate
from scalai.core.tensors.fingerprint import distinct_pieces
from scalai.core.tensors.holders import held_together

SERVER_S = 60.0
"""Longest wait of due workers for the fork server; then they import all themselves."""
ENDED = "this round of workers has ended."
UNHOOKED = (
    "THE SCRIPT TRAINS, BUT NOTHING CONNECTS IT TO THIS JOB: its state is not kept, and no change "
    "of resources can be made without losing it. Scripts of Megatron-LM, DeepSpeed, Trainer and "
    "Accelerate (these two with DeepSpeed) are connected by hooks; a loop of one's own is by "
    "scalai.elastic() and attach() (docs of scalai.runtime.session). Without --elastic the script "
    "runs as under torchrun."
)


def build(step: Step, command: commands.Build) -> None:
    """Start the next round's workers beside the present ones."""
    give_up(step)
    _heard(step, command.workers)
    step.change(standby=Round(command, Group.DUE))
    _start_due(step)


def _heard(step: Step, workers: commands.Workers) -> None:
    """Keep the round number: the next coordinator must not give it again."""
    last = max(step.state.last_round, workers.round)
    step.change(last_round=last)


def start(step: Step, command: commands.Start) -> None:
    """Begin a round, with its standby workers if there are any. Missing standby workers are a
    failure; those that are due start with it."""
    _heard(step, command.workers)
    if step.round is not None and step.round.is_ending:
        _gone(step, step.round, 0)
    standby, number = step.state.standby, command.workers.round
    if standby is not None and standby.number == number:
        step.change(round=standby, standby=None)
        step.change_round(command=command, awaiting={})
        if not standby.has_group:
            _start_due(step)
            return
        step.do(actions.BeginGroup(number))
        group_started(step, number)
        for _, call in sorted(standby.awaiting.items()):
            step.answer(call)
        if standby.is_complete(standby.models.published):
            _begin_restore(step)
        return
    give_up(step)
    proof_step.end(step)  # the next workers may need its memory
    step.change(round=Round(command, Group.NONE if command.is_built else Group.DUE))
    if command.is_built:
        step.fail("what was on standby is gone")
    _start_due(step)


def _start_due(step: Step) -> None:
    """Start due workers, once no older ones hold memory and the fork server is there."""
    present, standby = step.round, step.state.standby
    is_due = any(r is not None and r.group is Group.DUE for r in (present, standby))
    if not is_due or step.state.ending or _awaits_server(step):
        return
    if present is not None and present.group is Group.DUE:
        step.change_round(group=Group.RUNNING)
        step.do(actions.StartGroup(present.workers, is_standby=False))
    if standby is not None and standby.group is Group.DUE:
        step.change_of(standby.number, group=Group.RUNNING)
        models = Models() if present is None else present.models
        step.do(
            actions.StartGroup(
                standby.workers,
                is_standby=True,
                on_devices=models.uses_devices,
                brink=models.brink,
            )
        )


def _awaits_server(step: Step) -> bool:
    """Whether due workers wait for imports that are under way. Their own would begin later, and
    take the server's cores."""
    server = step.state.server
    if server is None or server.is_over:
        return False
    if server.awaited_since is None:
        if not server.is_last:
            _warm_up(step, server.imports, is_last=True)
        server = replace(server, is_last=True, awaited_since=step.now)
        step.change(server=server)
        step.log(Level.INFO, "event=warming: the next workers wait for the fork server's imports")
    assert server.awaited_since is not None
    return step.now - server.awaited_since < SERVER_S


def _warm_up(step: Step, imports: Imports, *, is_last: bool) -> None:
    step.change(server=ForkServer(imports, is_last))
    step.do(actions.WarmUp(imports, is_last))


def joined(step: Step, hello: Hello) -> None:
    """Start the fork server beside the first workers, if a core is free; else at their first
    step, or when other workers are due before."""
    current = step.of(hello.round)
    assert current is not None
    if hello.imports is None or step.state.server is not None:
        return
    if step.state.settings.cores > len(current.ranks):
        _warm_up(step, hello.imports, is_last=False)
    else:
        step.change(server=ForkServer(hello.imports, is_last=False))


def warmed(step: Step) -> None:
    """The fork server has imported all, or cannot fork: then the next workers start cold."""
    if step.state.server is not None:
        step.change(server=replace(step.state.server, is_over=True))
    _start_due(step)


def group_started(step: Step, number: int, level: Standby | None = None) -> None:
    """Report a plain job's round as stepped: nothing more is heard of it until its end."""
    if level is Standby.BRINK:
        step.change_of(number, is_at_brink=True)
    if step.is_present(number) and not step.state.settings.is_elastic:
        step.tell(reports.Stepped(number))


def group_not_started(step: Step, number: int, reason: str) -> None:
    """Handle workers that cannot start: the change is made without standby, or the round has
    failed."""
    if step.is_present(number):
        step.change_round(group=Group.NONE)
        step.fail(f"its workers cannot be started: {reason}")
    elif step.state.standby is not None and step.state.standby.number == number:
        step.change(standby=None)
        step.tell(reports.Built(number, reason))


def give_up(step: Step, number: int | None = None) -> None:
    """End standby workers: of any round, or of this one."""
    standby = step.state.standby
    if standby is None or number not in (None, standby.number):
        return
    if standby.has_group:
        step.end_group(standby.number, given_up=standby)
    step.change(standby=None)


def stop(step: Step, number: int, *, has_written: bool) -> None:
    """End the workers: after a drain they leave by themselves, and may flush their logs."""
    current = step.round
    if current is None or current.number != number:
        step.tell(reports.Stopped(number, 0))
        return
    if has_written and proof_step.holds(step):
        return
    grace_s = step.state.settings.exit_grace_s if has_written else 0.0
    end(step, grace_s)


def end(step: Step, grace_s: float) -> None:
    current = step.change_round(is_ending=True)
    if current.has_group:
        step.end_group(current.number, grace_s)
    elif current.number not in step.state.ending:
        _gone(step, current, 0)


def group_ended(step: Step, number: int, newest: int) -> None:
    """Handle the end of a round's last worker; the coordinator awaits only that of the present
    round."""
    present, ending = step.round, dict(step.state.ending)
    given_up = ending.pop(number, None)
    step.change(ending=ending)
    if given_up is not None:
        dismiss(step, given_up)
    if present is not None and present.number == number and present.is_ending:
        _gone(step, present, newest)
    _start_due(step)


def _gone(step: Step, ended: Round, newest: int) -> None:
    """End the present round. A host expelled from the job joins it again."""
    dismiss(step, ended)
    step.change(round=None)
    snapshots.give_back(step, ended)
    if step.state.is_rejoining:
        step.change(is_rejoining=False)
        step.do(actions.Rejoin())
    else:
        step.tell(reports.Stopped(ended.number, newest))


def dismiss(step: Step, ended: Round) -> None:
    """Answer the pending calls of ended workers with an error."""
    waiters = {call for _, call in ended.files.waiters}
    for call in sorted(ended.calls):
        if call in waiters:
            step.do(actions.AnswerCall(call))
        else:
            step.refuse(call, ENDED)


def poll(step: Step) -> None:
    """Look for ended workers, and for the end of a wait."""
    _start_due(step)
    current, standby = step.round, step.state.standby
    if standby is not None and standby.has_group:
        step.do(actions.PollGroup(standby.number))
    if current is None or current.stop is not None or current.emergency is not None:
        return
    if current.has_group:
        step.do(actions.PollGroup(current.number))


def group_over(step: Step, over: GroupOver) -> None:
    """Handle workers that ended by themselves."""
    standby, current = step.state.standby, step.round
    if step.state.proving is not None and step.state.proving.number == over.round:
        proof_step.end(step)
    elif standby is not None and standby.number == over.round:
        give_up(step)
        reason = "; ".join(over.failures) or "the script has ended"
        step.tell(reports.Built(over.round, reason))
    elif current is None or current.number != over.round:
        return
    elif over.failures:
        step.fail(
            "; ".join(over.failures), out_of_memory=over.out_of_memory, is_chance=over.is_chance
        )
    elif current.outcome is None:
        finished = reports.Finished(over.round)
        step.change_round(outcome=finished)
        step.tell(finished)


def refuse(step: Step, number: int, reason: str) -> None:
    """Report workers that cannot run the job: a retry would not help."""
    if step.is_present(number):
        step.fail(reason, is_refusal=True)
    else:
        give_up(step, number)
        step.tell(reports.Built(number, reason))


# ---------------------------------------------------------------------- what workers say


def await_round(step: Step, call: Call, request: AwaitRound) -> None:
    """Have a worker wait at the brink. All of the job's do, once one of them has to, whatever the
    level on this host: so theirs is a whole build."""
    current = step.of(request.round)
    assert current is not None
    if step.is_present(request.round):
        step.answer(call)
        return
    awaiting = {**current.awaiting, request.rank: call}
    step.change_of(request.round, awaiting=awaiting, is_at_brink=True)
    if current.is_complete(awaiting):
        step.tell(reports.Built(request.round))


def publish(step: Step, call: Call, report: Publish) -> None:
    """Record a worker's held and wanted pieces, after the build of its model."""
    current = step.of(report.round)
    assert current is not None
    models = current.models
    if models.is_unhooked:  # its first steps were on the way to this
        step.log(Level.INFO, f"event=hooked host={step.state.host} the script has connected itself")
        step.tell(reports.Hooked(report.round))
    want = Want(report.wanted, report.coordinate)
    model = RankModel(report.held, want, report.is_restoring, call)
    models = replace(
        models,
        published={**models.published, report.rank: model},
        facts={**models.facts, **report.facts.value()},
        uses_devices=models.uses_devices or report.uses_devices,
        brink=_brink_with(models, report),
        is_unhooked=False,
    )
    step.change_of(report.round, models=models)
    if not current.is_complete(models.published):
        return
    if step.is_present(report.round):
        _begin_restore(step)
    else:
        step.tell(reports.Built(report.round))


def _brink_with(models: Models, report: Publish) -> AtBrink | None:
    """Return the most memory of a worker at the brink; None: one cannot stop there."""
    last, others = report.brink, models.brink
    if last is None or not models.published:
        return last
    if others is None:
        return None
    return AtBrink(max(last.host, others.host), max(last.device, others.device))


def _begin_restore(step: Step) -> None:
    """Plan and fetch once all workers have published; without a generation to restore they go on at
    once."""
    current = step.present()
    models = current.models
    tables = [model.held.tensors for model in models.published.values()]
    names = sorted({tensor.name for table in tables for tensor in table})
    held = held_together(list(models.held().values()))
    step.do(actions.TellHeld(current.number, held))  # before the coordinator counts it
    step.tell(reports.Published(current.number, tuple(names)))
    if current.is_restoring:
        assert isinstance(current.command, commands.Start)
        wants = {rank: model.want for rank, model in models.published.items()}
        step.do(actions.FetchWanted(current.command, wants))
        return
    step.change_round(models=replace(models, is_proven=True))
    for model in models.published.values():
        step.answer(model.call)
    snapshots.reserve(step)


def planned(step: Step, found: RestorePlanned) -> None:
    """Answer the workers: they restore what this host holds, while the rest comes."""
    if not step.is_present(found.round):
        return
    current = step.present()
    step.change_round(
        restore=replace(
            current.restore,
            seconds={**current.restore.seconds, "plan": found.plan_s},
            bytes_local=found.bytes_local,
            bytes_remote=found.bytes_remote,
        )
    )
    for rank, model in current.models.published.items():
        step.answer(model.call, found.sources[rank])


def pieces_here(step: Step, found: PiecesHere) -> None:
    """Give the workers orders to read arrived pieces."""
    if not step.is_present(found.round):
        return
    restore = step.present().restore
    orders = {rank: (*restore.orders.get(rank, ()), order) for rank, order in found.orders.items()}
    _give_pieces(step, replace(restore, orders={**restore.orders, **orders}))


def await_pieces(step: Step, call: Call, request: AwaitPieces) -> None:
    """Have a worker wait for pieces of other hosts."""
    restore = step.present().restore
    _give_pieces(step, replace(restore, waiting={**restore.waiting, request.rank: call}))


def all_here(step: Step, number: int) -> None:
    """Tell the workers that no more pieces come."""
    if step.is_present(number):
        _give_pieces(step, replace(step.present().restore, has_all=True))
        _tell_restored(step)


def _give_pieces(step: Step, restore: RestoredRanks) -> None:
    orders, waiting = dict(restore.orders), dict[int, Call]()
    for rank, call in sorted(restore.waiting.items()):
        first, *later = orders.pop(rank, ()) or (None,)
        if first is None and not restore.has_all:
            waiting[rank] = call
            continue
        step.answer(call, first)
        if later:
            orders[rank] = tuple(later)
    step.change_round(restore=replace(restore, orders=orders, waiting=waiting))


def restored(step: Step, call: Call, report: RankRestored) -> None:
    """Record a worker's restore; it waits for the proof of the whole job's state."""
    current = step.present()
    if report.rank == current.ranks.start:
        step.log(Level.INFO, f"event=restored round={current.number} {report.note}")
    restore = replace(
        current.restore,
        ranks={**current.restore.ranks, report.rank: (report, call)},
        seconds=snapshots.longest(current.restore.seconds, report.seconds),
    )
    step.change_round(restore=restore)
    _tell_restored(step)


def _tell_restored(step: Step) -> None:
    """Report the restore once: all workers have restored, and what came is in the store."""
    current = step.present()
    restore = current.restore
    if not (restore.has_all and current.is_complete(restore.ranks)):
        return
    ranks = sorted(restore.ranks)
    wanted = concatenate([current.models.published[rank].want.pieces for rank in ranks])
    prints = np.concatenate([restore.ranks[rank][0].fingerprints for rank in ranks])
    try:
        rows, fingerprints = distinct_pieces(wanted, prints)
    except ProofError as error:
        step.tell(reports.Unproven(current.number, str(error)))
        return
    step.tell(
        reports.Restored(
            round=current.number,
            rows=rows,
            fingerprints=fingerprints,
            seconds=dict(restore.seconds),
            bytes_local=restore.bytes_local,
            bytes_remote=restore.bytes_remote,
        )
    )


def expect(step: Step, tensors: int) -> None:
    """Give orders: all workers of the job have published."""
    step.change_round(models=replace(step.present().models, tensors=tensors))
    snapshots.give_orders(step)


def proceed(step: Step) -> None:
    """Let workers train: the whole job's state is proven, and fetched pieces are as good as written
    ones."""
    current = step.present()
    if current.models.is_proven:
        return  # a new coordinator says so again
    generation = current.workers.generation
    assert generation is not None, "what was proven is of a generation"
    step.change_round(models=replace(current.models, is_proven=True))
    step.do(actions.TrustFetched(generation))
    for _, call in current.restore.ranks.values():
        step.answer(call)


def stepped(step: Step, report: RankStepped) -> None:
    """Record a worker's first step of the round."""
    server = step.state.server
    if report.imports is not None and (server is None or not server.is_last):
        _warm_up(step, report.imports, is_last=True)
    if proof_step.told(step, report) or not step.is_present(report.round):
        return
    current = step.present()
    numbers = merged(current.first.numbers, report.numbers)
    first = Steps(current.first.ranks | {report.rank}, numbers)
    step.change_round(first=first)
    if current.is_complete(first.ranks):
        step.tell(reports.Stepped(current.number, numbers))
        snapshots.reserve(step)


def finished(step: Step, request: RankFinished) -> None:
    """Record the end of a worker's script."""
    current = step.of(request.round)
    if current is not None:
        step.change_of(request.round, finished=current.finished | {request.rank})
    known = step.state.finish
    finish = Finish(max(known.step, request.step), request.ledger or known.ledger)
    step.change(finish=finish)


def unhooked(step: Step, number: int, rank: int) -> None:
    """Report a script that trains without hooks."""
    current = step.of(number)
    if current is None or current.models.is_unhooked:
        return
    step.change_of(number, models=replace(current.models, is_unhooked=True))
    step.log(Level.ERROR, f"event=unhooked rank={rank} {UNHOOKED}")
    step.tell(reports.Hooked(number, is_hooked=False))
