"""One step of the law in progress: the state so far, and the actions."""

from dataclasses import replace
from typing import Any

from scalai.core.host import actions
from scalai.core.host.actions import Action, Level
from scalai.core.host.state import Call, Group, HostState, Round
from scalai.core.job.endings import kind_of
from scalai.core.messages.reports import Report, WorkersFailed


class Step:
    """Collects the consequences of one event. It lives for one call of the pure function
    ``law.advance``."""

    def __init__(self, state: HostState) -> None:
        self.state = state
        self.due: list[Action] = []

    @property
    def round(self) -> Round | None:
        return self.state.round

    @property
    def now(self) -> float:
        return self.state.now

    def change(self, **values: Any) -> None:
        """Change fields of the state."""
        self.state = replace(self.state, **values)

    def present(self) -> Round:
        """The present round, which must exist."""
        assert self.state.round is not None
        return self.state.round

    def change_round(self, **values: Any) -> Round:
        """Change fields of the present round, and return it."""
        changed = replace(self.present(), **values)
        self.change(round=changed)
        return changed

    def change_of(self, number: int, **values: Any) -> None:
        """Change fields of this round: present, standby or proof_step."""
        if self.state.round is not None and self.state.round.number == number:
            self.change_round(**values)
        elif self.state.standby is not None and self.state.standby.number == number:
            self.change(standby=replace(self.state.standby, **values))
        elif self.state.proving is not None and self.state.proving.number == number:
            self.change(proving=replace(self.state.proving, **values))

    def of(self, number: int) -> Round | None:
        """This round, if present, standby or proving; else None."""
        rounds = (self.state.round, self.state.standby, self.state.proving)
        return next((r for r in rounds if r is not None and r.number == number), None)

    def is_present(self, number: int) -> bool:
        """Whether this is the present round and not ending."""
        current = self.state.round
        return current is not None and current.number == number and not current.is_ending

    def end_group(
        self, number: int, grace_s: float = 0.0, *, given_up: Round | None = None
    ) -> None:
        """Begin the end of a round's workers. ``given_up``: the round, if the state no longer has
        it."""
        if number not in self.state.ending:
            self.change_of(number, group=Group.NONE)
            self.change(ending={**self.state.ending, number: given_up})
            self.do(actions.EndGroup(number, grace_s))

    def do(self, *due: Action) -> None:
        self.due += due

    def tell(self, report: Report) -> None:
        self.due.append(actions.SendReport(report))

    def log(self, level: Level, text: str) -> None:
        self.due.append(actions.Log(level, text))

    def answer(self, call: Call, value: object = None) -> None:
        """Answer a pending call."""
        for found in (self.state.round, self.state.standby, self.state.proving):
            if found is not None and call in found.calls:
                self.change_of(found.number, calls=found.calls - {call})
                self.due.append(actions.AnswerCall(call, value))
                return

    def refuse(self, call: Call, reason: str) -> None:
        self.due.append(actions.AnswerCall(call, error=reason))

    def fail(
        self,
        reason: str,
        *,
        out_of_memory: bool = False,
        is_chance: bool = False,
        is_refusal: bool = False,
    ) -> None:
        """Report once that the present round cannot go on. ``is_chance``: by a signal, so the
        degrees are not to blame."""
        current = self.state.round
        if current is None or current.failure is not None or current.is_ending:
            return
        failure = WorkersFailed(current.number, reason, out_of_memory, is_chance, is_refusal)
        self.change_round(outcome=failure)
        kind = kind_of(reason)
        self.log(Level.ERROR, f"event=failed round={current.number} kind={kind!r} {reason}")
        self.tell(failure)
