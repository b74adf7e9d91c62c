"""A job as it goes on: events are fed to the rules of membership, and the actions that these return
are carried out."""

import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

from scalai.core import actions, events
from scalai.core import membership as m
from scalai.core.errors import LayoutError
from scalai.core.resize import advance
from scalai.launch.gathering import Gathering
from scalai.launch.generations import Generations, check_whole
from scalai.launch.job import JobSpec
from scalai.launch.roster import Roster
from scalai.launch.sizing import Sizing
from scalai.launch.starter import Starter
from scalai.launch.timeline import Timeline

Json = Any


class LiveJob:
    """The job's state, and what belongs to it in the coordinator. One thread at a time calls it.

    Args:
        spec: What the job is.
        interface: The address at which workers meet.
        say: Takes log lines.
        wake: Is called when commands wait for agents.
    """

    def __init__(
        self,
        spec: JobSpec,
        interface: str,
        say: Callable[[str], None],
        wake: Callable[[], None],
    ) -> None:
        self._say = say
        self._run = secrets.token_hex(4)  # so that deposits of two runs have different names
        self._last_number = 0
        self._degrees_before: str | None = None
        self.sizing = Sizing(spec)
        self.roster = Roster(wake)
        self.generations = Generations()
        self.timeline = Timeline(spec.report_dir, self.log)
        self.told = Gathering()
        """What hosts have told about the present round."""
        self.source: int | None = None
        """The generation that the present round began from."""
        self.exit_code = 0
        self._starter = Starter(self._run, interface, self.roster, self.generations)
        resize = spec.config.resize
        self.state = m.Job(
            assign=self.sizing.assign(),
            settle_s=spec.settle_s,
            max_hosts=spec.max_hosts,
            failures_left=spec.max_restarts,
            has_durable_dir=spec.durable_dir is not None,
            is_elastic=spec.is_elastic,
            build_timeout_s=0.0 if resize.build_ahead == "never" else resize.build_timeout_s,
        )

    def active(self) -> frozenset[str]:
        """Return the hosts that are present and have workers in the current round."""
        return m.active(self.state)

    def command(self, hosts: Iterable[str], **command: Json) -> None:
        """Queue a command for those of the hosts that take part."""
        self.roster.command(hosts, command)

    def log(self, text: str) -> None:
        newest = self.state.newest_generation
        number = newest.number if newest else 0
        self._say(f"generation={number} round={self.state.round} {text}")

    # ------------------------------------------------------------------ what changes beside events

    def lose(self, host: str) -> None:
        """An agent is gone without a word."""
        self.roster.remove(host)
        self.generations.forget(host)
        self.timeline.begin(f"host {host} is lost")
        self.feed(events.HostLost(host, self.generations.covered(), time.monotonic()))

    def count_from(self, number: int) -> None:
        """A generation of this number exists: new ones get higher numbers."""
        self._last_number = max(self._last_number, number)

    def commit(self, name: str) -> int:
        """Number the parts of a deposit: from now on they are a generation."""
        self._last_number += 1
        self.generations.commit(self._last_number, name)
        parts = self.generations.parts(self._last_number).values()
        self.timeline.note(bytes_deposited=sum(part.size_bytes for part in parts))
        self.sizing.learn(next(iter(parts)).about)
        self.limit()
        return self._last_number

    def limit(self) -> None:
        """What ``sizing`` has learned holds from the next assignment on."""
        self.state = m.replace_assign(self.state, self.sizing.assign())

    def recount(self) -> None:
        """What hosts hold has changed, and with it which generations are whole."""
        self.state = m.replace_generations(self.state, self.generations.covered())

    # ------------------------------------------------------------------ events in, actions out

    def feed(self, event: events.Event) -> None:
        """Let the rules decide about an event, and do what they say."""
        was = self.state.phase
        self.state, due = advance(self.state, event)
        if self.state.phase is not was:
            self._entered(was, self.state.phase)
        for action in due:
            self._perform(action)
        if self.state.phase is m.Phase.RUNNING and self.state.changed_at is None:
            self.timeline.forget()

    def _entered(self, was: m.Phase, now: m.Phase) -> None:
        line = self.timeline
        if was is m.Phase.RUNNING and now in (m.Phase.BUILDING, m.Phase.PREPARING):
            line.phase("detect", line.since("event"))
            line.mark("detected")
        if was is m.Phase.BUILDING:
            line.phase("build", line.since("detected"))
        if now is m.Phase.PREPARING:
            line.mark("preparing")
        elif now is m.Phase.DRAINING:
            self.told.deposits.clear()
        elif now is m.Phase.COMMITTING:
            deposit = self.told.slowest_deposit("deposit")
            proof = self.told.slowest_deposit("deposit_proof")
            line.phase("drain", max(0.0, line.since("preparing") - deposit))
            line.phase("deposit", deposit, deposit_proof_s=round(proof, 6))
            line.mark("sealed")

    def _perform(self, action: actions.Action) -> None:
        match action:
            case actions.Build(ahead):
                self._build(ahead)
            case actions.GiveUp(round):
                self._starter.give_up()
                self.command(self.roster.hosts(), command="give_up", round=round)
            case actions.Prepare(hosts, stop):
                self.command(hosts, command="prepare", stop=stop)
            case actions.Agree(hosts, stop):
                self.command(hosts, command="agree", stop=stop)
            case actions.Withdraw(hosts):
                self.command(hosts, command="withdraw")
            case actions.Judge(hosts):
                self._judge(hosts)
            case actions.Commit(hosts, generation):
                name = self.generations.name(generation)
                self.command(hosts, command="commit", generation=generation, deposit=name)
            case actions.Hurry(hosts):
                self.command(hosts, command="hurry")
            case actions.StopWorkers(hosts, reason, has_deposited):
                self.log(f"event=stop_workers reason={reason!r}")
                self.command(
                    hosts, command="stop", round=self.state.round, has_deposited=has_deposited
                )
            case actions.StartRound():
                self._start(action)
            case actions.Release():
                self._release(action)
            case actions.SaveDurable(hosts, generation):
                self.command(hosts, command="save", generation=generation)
            case actions.Exit(hosts, code, reason):
                self.exit_code = code
                self.log(f"event=exit code={code} reason={reason!r}")
                self.command(hosts, command="exit", code=code, reason=reason)
            case actions.Say(text):
                self.log(f"event=note {text}")

    def _judge(self, hosts: Iterable[str]) -> None:
        name = f"{self._run}-{self.state.round}-{self.state.stop}"
        parts = self.generations.deposited(name, hosts)
        try:
            if not parts:
                raise LayoutError("no host has a deposit.")
            check_whole(parts.values())
        except LayoutError as error:
            self.log(f"event=deposit_incomplete step={self.state.stop} {error}")
            self.feed(events.Judged(False))
            return
        number = self.commit(name)
        self.feed(events.Judged(True, self.state.stop, number, frozenset(parts)))

    def _build(self, ahead: m.Ahead) -> None:
        self.log(f"event=build {ahead.assignment.reason!r} round_ahead={ahead.round}")
        newest = self.state.newest_generation
        self._starter.build(ahead, newest.number if newest else None)

    def _start(self, action: actions.StartRound) -> None:
        assignment = action.assignment
        self.timeline.note(
            round=action.round,
            generation=action.generation,
            step=0 if action.generation is None else self.generations.step(action.generation),
            before=self._degrees_before,
            after=str(assignment.degrees),
            workers=dict(assignment.workers),
            why=assignment.reason,
        )
        # After a commit the old workers were stopped: their end is part of the relaunch.
        self.timeline.mark_first("committed")
        self._degrees_before = str(assignment.degrees)
        self.log(f"event=round {assignment.reason!r} generation={action.generation}")
        self._prepare_round(action)
        self._starter.start(action)

    def _prepare_round(self, action: actions.StartRound) -> None:
        """Leave behind what the earlier round left: its answers, steps, deposits and whatever was
        newer than the generation that the job goes on from."""
        self.source = action.generation
        self.told = Gathering()
        everyone = self.roster.hosts()
        for host in everyone:
            self.roster[host].newest = 0
        self.command(everyone, command="discard")
        self.generations.forget_deposits()
        for number in self.generations.go_back_to(action.generation):
            self.command(self.roster.hosts(), command="drop", generation=number)
        if action.steps_lost:
            self.timeline.note(steps_lost=action.steps_lost)
            self.log(f"event=went_back steps_lost={action.steps_lost}")

    def _release(self, action: actions.Release) -> None:
        if self.state.phase is m.Phase.RUNNING and self.timeline.has_round:
            self.timeline.phase("first_step", self.timeline.since("proven"))
            report = self.timeline.close()
            self.log(f"event=resized total_s={report['total_s']:.3f} degrees={report.get('after')}")
        if action.keep is not None:
            for number in self.generations.keep(action.keep):
                self.command(self.roster.hosts(), command="drop", generation=number)
        for host in action.leaving:
            self.command(
                [host], command="exit", code=0, reason="drained: the job goes on without this host"
            )
            self.roster.release(host)
            self.generations.forget(host)
        if action.leaving:
            self.recount()
