"""A host's leave, by signal or removal notice: it drains, the notice may be withdrawn, and its stay
has a limit."""

from collections.abc import Mapping
from dataclasses import replace

from scalai.core.host.actions import Level
from scalai.core.host.events import GroupSeen, Noticed
from scalai.core.host.state import HostState
from scalai.core.host.step import Step
from scalai.core.messages import reports

SIGNAL = "a signal"
SAME_S = 3.0
"""Smallest difference between two deadlines of one source, in seconds."""


def asked(step: Step) -> None:
    """Drain on a signal, within the drain timeout. A second signal changes nothing."""
    if step.state.leave.since is None:
        step.change(leave=replace(step.state.leave, since=step.now))
        _tell(step, SIGNAL)


def noticed(step: Step, event: Noticed) -> None:
    """Handle a source's notice of removal, perhaps a repeated one."""
    leave, by = step.state.leave, _by(step, event.left_s)
    notices = leave.notices
    if event.source in notices and _is_same(notices[event.source], by):
        return
    when = "at some time" if event.left_s is None else f"in {event.left_s:.0f} s"
    step.log(
        Level.WARNING,
        f"event=notice host={step.state.host} source={event.source!r}: this host will be taken "
        f"away {when}; it drains",
    )
    now = {**notices, event.source: by}
    step.change(leave=replace(leave, notices=now))
    if not leave.is_asked or _final(now) != _final(notices):
        _tell(step, event.source)


def withdrawn(step: Step, source: str) -> None:
    """Drop one source's notice; those of others hold."""
    leave = step.state.leave
    if source not in leave.notices:
        return
    notices = {name: by for name, by in leave.notices.items() if name != source}
    step.change(leave=replace(leave, notices=notices))
    others = [*sorted(notices), *([SIGNAL] if leave.since is not None else [])]
    what = f"it leaves all the same, because of {', '.join(others)}" if others else "it stays"
    step.log(
        Level.WARNING,
        f"event=notice_withdrawn host={step.state.host} source={source!r}: {what}",
    )
    if others:
        _tell(step, others[0])
    else:
        step.tell(reports.Staying())


def tell_again(step: Step) -> None:
    """Repeat the notice after a new join."""
    leave = step.state.leave
    if leave.is_asked:
        _tell(step, min(leave.notices) if leave.since is None else SIGNAL)


def is_over(step: Step, seen: GroupSeen | None) -> bool:
    """Whether the host's time is over; it then leaves without a goodbye.

    After a signal, a save in flight stops the clock as long as the workers look for its end. A
    removal notice allows no extra time.
    """
    by = _final(step.state.leave.notices)
    if by is not None and step.now > by:
        step.log(
            Level.ERROR,
            "event=notice_over: the time is over after which this host is taken away: leaving "
            "without a goodbye",
        )
        step.change(exit=1)
        return True
    return _has_drained_too_long(step, seen)


def _has_drained_too_long(step: Step, seen: GroupSeen | None) -> bool:
    leave, patience_s = step.state.leave, step.state.settings.drain_timeout_s
    since = leave.since
    if since is None:
        return False
    if seen is not None and seen.save is not None:
        if seen.looks != leave.save_looks:
            since = step.now
        step.change(leave=replace(leave, since=since, save_looks=seen.looks))
    if step.now - since <= patience_s:
        return False
    step.log(
        Level.ERROR, f"event=drain_timeout after_s={patience_s:.0f}: leaving without a goodbye"
    )
    step.change(exit=1)
    return True


def _tell(step: Step, source: str) -> None:
    state = step.state
    final, soft = _final(state.leave.notices), _soft(state)
    is_final = final is not None and (soft is None or final <= soft)
    by = final if is_final else soft
    left_s = None if by is None else max(0.0, by - step.now)
    step.tell(reports.Leaving(source, left_s, is_final))


def _by(step: Step, left_s: float | None) -> float | None:
    return None if left_s is None else step.now + left_s


def _is_same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) < SAME_S


def _final(notices: Mapping[str, float | None]) -> float | None:
    """Soonest removal time."""
    return min((by for by in notices.values() if by is not None), default=None)


def _soft(state: HostState) -> float | None:
    """End of a signalled host's drain timeout."""
    since = state.leave.since
    return None if since is None else since + state.settings.drain_timeout_s
