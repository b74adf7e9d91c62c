"""A host that was told to leave: by a signal, or by whoever says that it will be taken away. It
drains; what it was told may be withdrawn; and it does not stay for ever."""

from collections.abc import Mapping

from scalai.core.host.actions import Level
from scalai.core.host.events import GroupSeen, Noticed
from scalai.core.host.state import HostState
from scalai.core.host.step import Step
from scalai.core.messages import reports

SIGNAL = "a signal"
SAME_S = 3.0
"""Deadlines of one source that differ by less are one."""


def asked(step: Step) -> None:
    """A signal: drain, within the drain timeout. A second one says nothing new."""
    if step.state.leaving_at is None:
        step.change(leaving_at=step.now)
        _tell(step, SIGNAL)


def noticed(step: Step, event: Noticed) -> None:
    """A source says, perhaps again, when this host will be taken away."""
    notices, by = step.state.notices, _by(step, event.left_s)
    if event.source in notices and _is_same(notices[event.source], by):
        return
    when = "at some time" if event.left_s is None else f"in {event.left_s:.0f} s"
    step.log(
        Level.WARNING,
        f"event=notice host={step.state.host} source={event.source!r}: this host will be taken "
        f"away {when}; it drains",
    )
    before = _final(step.state.notices)
    step.change(notices={**notices, event.source: by})
    is_new = not notices and step.state.leaving_at is None
    if is_new or _final(step.state.notices) != before:
        _tell(step, event.source)


def withdrawn(step: Step, source: str) -> None:
    """A source says that this host stays; what others have said holds on."""
    if source not in step.state.notices:
        return
    notices = {name: by for name, by in step.state.notices.items() if name != source}
    step.change(notices=notices)
    others = [*sorted(notices), *([SIGNAL] if step.state.leaving_at is not None else [])]
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
    """The host has joined again: what it was told holds on."""
    if step.state.leaving_at is not None:
        _tell(step, SIGNAL)
    elif step.state.notices:
        _tell(step, min(step.state.notices))


def is_over(step: Step, seen: GroupSeen | None) -> bool:
    """Whether the host leaves without a goodbye, because its time is over. The time of a save that
    it waits for is its own where a signal has told it to leave, as long as the workers look for the
    save's end; a host that is taken away has no time of its own."""
    by = _final(step.state.notices)
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
    state, patience_s = step.state, step.state.settings.drain_timeout_s
    if state.leaving_at is None:
        return False
    if seen is not None and seen.save is not None:
        if seen.looks != state.save_looks:
            step.change(leaving_at=step.now)
        step.change(save_looks=seen.looks)
    assert step.state.leaving_at is not None
    if step.now - step.state.leaving_at <= patience_s:
        return False
    step.log(
        Level.ERROR, f"event=drain_timeout after_s={patience_s:.0f}: leaving without a goodbye"
    )
    step.change(exit=1)
    return True


def _tell(step: Step, source: str) -> None:
    state = step.state
    final, soft = _final(state.notices), _soft(state)
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
    """Return when the host will be taken away: the soonest that a source has said."""
    return min((by for by in notices.values() if by is not None), default=None)


def _soft(state: HostState) -> float | None:
    """Return when a host leaves that a signal has told to."""
    return None if state.leaving_at is None else state.leaving_at + state.settings.drain_timeout_s
