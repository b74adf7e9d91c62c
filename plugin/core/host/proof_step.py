"""A step behind the workers' stop, without its update: its numbers are reported, and nobody waits
long. The state is sealed by then; no fate of these workers is a failure."""

from dataclasses import replace

from scalai.core.host import actions, snapshots
from scalai.core.host.events import GroupSeen
from scalai.core.host.state import Round
from scalai.core.host.step import Step
from scalai.core.job.function_proof import PROOF_S, merged
from scalai.core.messages import reports
from scalai.core.messages.worker_messages import RankStepped


def told(step: Step, report: RankStepped) -> bool:
    """Record a worker's report of the step behind its stop; False: it is its first step."""
    current = step.of(report.round)
    if current is None or current.stop is None or not current.stop.proves:
        return False
    if not current.may_write:
        return False
    proof = current.proof
    ranks, numbers = proof.ranks | {report.rank}, report.numbers
    if proof.ranks:
        numbers = merged(proof.numbers, numbers)
    step.change_of(report.round, proof=replace(proof, ranks=ranks, numbers=numbers))
    if current.is_complete(ranks):
        step.tell(reports.Stepped(report.round, numbers))
    return True


def holds(step: Step) -> bool:
    """Whether the present round, due to end, still makes the step.

    With standby workers that have their models, or none to come to this host, it continues beside
    the next round; else its memory may be needed, and the next round waits for it.
    """
    current = step.present()
    stop = current.stop
    if stop is None or not stop.proves:
        return False
    if not current.has_group or _is_over(current, frozenset()):
        _told_no_more(step, current)
        return False
    proof = replace(current.proof, until=step.now + PROOF_S)
    current = step.change_round(proof=proof)
    standby = step.state.standby
    has_models = standby is not None and standby.has_group and not standby.is_at_brink
    if not has_models and (standby is not None or not step.state.leave.is_asked):
        return True
    end(step)  # of an earlier change
    step.change(proving=current, round=None)
    snapshots.give_back(step, current)
    step.tell(reports.Stopped(current.number, stop.step))
    return True


def _is_over(current: Round, ended: frozenset[int]) -> bool:
    return current.is_complete(current.proof.ranks | current.lost | ended)


def watch(step: Step, seen: GroupSeen | None) -> None:
    """End a round after its step, or after too long."""
    current, aside = step.round, step.state.proving
    if current is not None and current.proof.until and not current.is_ending:
        ended = frozenset(seen.ended if seen is not None else ())
        if _is_over(current, ended) or step.now >= current.proof.until:
            step.change_round(is_ending=True, proof=replace(current.proof, until=0.0))
            _told_no_more(step, current)
            step.end_group(current.number, _grace_s(step, current))
    if aside is not None and step.now >= aside.proof.until:
        end(step)
    elif aside is not None:
        step.do(actions.PollGroup(aside.number))


def _grace_s(step: Step, current: Round) -> float:
    """Workers that have reported the step leave by themselves."""
    return step.state.settings.exit_grace_s if current.is_complete(current.proof.ranks) else 0.0


def end(step: Step) -> None:
    """End the workers beside the present round."""
    if (aside := step.state.proving) is not None:
        _told_no_more(step, aside)
        step.end_group(aside.number, given_up=aside)
        step.change(proving=None)


def _told_no_more(step: Step, ended: Round) -> None:
    """Report that no more ranks will answer. One rank's numbers stand for all."""
    if not ended.is_complete(ended.proof.ranks):
        step.tell(reports.Stepped(ended.number, ended.proof.numbers))
