"""Commits of a host: what was sealed gets its number; where the store has no room for that, it is
tried again."""

from scalai.core.host import actions, snapshots
from scalai.core.host.step import Step
from scalai.core.messages import commands, reports
from scalai.core.messages import events as job_events


def commit(step: Step, command: commands.Commit) -> None:
    """Make the sealed snapshot of this name the generation of this number, and report it."""
    late = {**step.state.late, command.generation: (command.snapshot, command.committed)}
    step.change(late=late)
    snapshots.settled(step, command.snapshot)
    step.do(
        actions.TryCommit(command.generation, command.snapshot, command.committed, is_again=False)
    )


def done(step: Step, generation: int) -> None:
    """It has its number."""
    late = {number: each for number, each in step.state.late.items() if number != generation}
    step.change(late=late, generations=step.state.generations | {generation})
    step.tell(job_events.Committed(step.state.host, generation))
    snapshots.reserve(step)


def waits(step: Step, generation: int) -> None:
    """There was no room: what is sealed stays, and is tried again."""
    snapshots.reserve(step)


def nothing(step: Step, generation: int, found: str) -> None:
    """The snapshot is not here. Where it had to make way for later ones, the coordinator learns
    that this host holds nothing of it."""
    if generation not in step.state.late:
        return
    snapshot, _ = step.state.late[generation]
    late = {number: each for number, each in step.state.late.items() if number != generation}
    step.change(late=late)
    if snapshots.was_given_up(step, snapshot):
        step.tell(reports.Doubted(generation, None))
        step.tell(job_events.Committed(step.state.host, generation))
        return
    step.fail(
        f"generation {generation} cannot be committed here: snapshot {snapshot!r} is not {found}"
    )


def drop(step: Step, generation: int) -> None:
    """Let go of a generation. What there was no room for yet is committed no more: the job has left
    it behind, and would not know that it takes room."""
    snapshot, _ = step.state.late.get(generation, ("", None))
    late = {number: each for number, each in step.state.late.items() if number != generation}
    step.change(late=late)
    step.do(actions.Drop(generation, snapshot))


def retry(step: Step) -> None:
    """Commit what there was no room for, where there is some now."""
    for generation, (snapshot, committed) in step.state.late.items():
        step.do(actions.TryCommit(generation, snapshot, committed, is_again=True))


def forget(step: Step) -> None:
    """The job goes on without this host: what has a number and is not committed is reported as
    sealed when it joins again, and the coordinator says what becomes of it."""
    step.change(late={})


def discard(step: Step) -> None:
    """Give up what was sealed and not committed, but for what has a number: the job goes on without
    it."""
    step.do(actions.DiscardSealed(frozenset(snapshot for snapshot, _ in step.state.late.values())))


def holds(step: Step, generations: frozenset[int]) -> None:
    """The store holds others than before: there may be room."""
    step.change(generations=generations)
    snapshots.reserve(step)
