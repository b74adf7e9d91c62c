"""The coordinator: one small process a job, which feeds events to the rules of membership and
carries their actions out.

It holds no tensor. Agents call it (``join``, ``poll``, ``tell``); commands to an agent wait in a
queue that its ``poll`` empties. Its host is the one that must not die; any agent may drain, the
first one too.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from scalai.core import actions, events
from scalai.core import membership as m
from scalai.core.errors import LayoutError, ProofError, UsageError
from scalai.core.membership import active, staying
from scalai.core.resize import advance
from scalai.launch.gathering import Gathering, Restored
from scalai.launch.generations import Generations, check_whole, deposit_name
from scalai.launch.job import JobSpec
from scalai.launch.roster import Agent, Roster
from scalai.launch.sizing import Sizing
from scalai.launch.starter import Starter
from scalai.launch.timeline import Timeline
from scalai.runtime.messages import Address, Peer, Server
from scalai.store.manifest import HostManifest, manifest_from_message

POLL_S = 1.0
Json = Any


class Coordinator:
    """Membership, generation numbers and the workers' rendezvous store of one job.

    Args:
        spec: What the job is; agents that bring another one are refused.
        address: Where to listen: (interface, port), port 0 for a free one.
        token: The job's secret; who does not have it is not listened to.
        say: Takes log lines.
        alone_s: How long it waits for a first or another agent before it ends.
    """

    def __init__(
        self,
        spec: JobSpec,
        address: tuple[str, int],
        token: bytes,
        say: Callable[[str], None],
        alone_s: float = 60.0,
    ) -> None:
        self._alone_s = alone_s
        self._spec = spec
        self._sizing = Sizing(spec)
        self._say = say
        self._changed = threading.Condition()
        self._roster = Roster()
        self._generations = Generations()
        self._run = secrets.token_hex(4)  # so that deposits of two runs have different names
        self._source: int | None = None
        self._last_number = 0
        self._timeline = Timeline(spec.report_dir, self._log)
        resize = spec.config.resize
        self._job = m.Job(
            assign=self._sizing.assign(),
            settle_s=spec.settle_s,
            max_hosts=spec.max_hosts,
            failures_left=spec.max_restarts,
            has_durable_dir=spec.durable_dir is not None,
            is_elastic=spec.is_elastic,
            build_timeout_s=0.0 if resize.build_ahead == "never" else resize.build_timeout_s,
        )
        self._told = Gathering()
        self._exit_code = 0
        self._degrees_before: str | None = None
        self._starter = Starter(self._run, address[0], self._roster, self._generations)
        self._server = Server(address, token, self._handle, self._gone)

    @property
    def address(self) -> Address:
        return self._server.address

    def run(self) -> int:
        """Serve until the job has ended and every agent has been told, or until nobody has been
        there for long. Returns the job's exit code."""
        alone_since = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait(0.1)
                for host in self._roster.silent():
                    self._lose(host)
                now = time.monotonic()
                self._feed(events.Ticked(now, self._roster.newest()))
                if self._job.phase is m.Phase.ENDED and not self._roster.has_commands():
                    break
                if self._roster.hosts():
                    alone_since = now
                elif now - alone_since > self._alone_s:
                    self._exit_code = 1
                    self._log(f"event=exit code=1 reason='no agent for {self._alone_s:.0f} s'")
                    break
        time.sleep(0.2)  # the last answers are on their way
        self._server.close()
        return self._exit_code

    # ------------------------------------------------------------------ calls

    def _handle(self, peer: Peer, method: str, arguments: Mapping[str, Json]) -> Json:
        calls: Mapping[str, Callable[..., Json]] = {
            "join": self._join,
            "poll": self._poll,
            "tell": self._tell,
            "status": self._status,
            "scale": self._scale,
            "spec": self._read_spec,
        }
        if method not in calls:
            raise UsageError(f"{method!r} is not a call of the coordinator.")
        with self._changed:
            answer = calls[method](peer, **arguments)
            self._changed.notify_all()
        return answer

    def _gone(self, peer: Peer) -> None:
        with self._changed:
            for host in self._roster.left(peer):
                self._lose(host)
            self._changed.notify_all()

    def _lose(self, host: str) -> None:
        self._roster.remove(host)
        self._generations.forget(host)
        self._timeline.begin(f"host {host} is lost")
        self._feed(events.HostLost(host, self._generations.covered(), time.monotonic()))

    def _read_spec(self, peer: Peer) -> Json:
        return self._spec.to_json()

    def _join(
        self, peer: Peer, host: str, slots: int, address: list[Json], parts: list[Json],
        sealed: list[Json], spec: Json,
    ) -> Json:  # fmt: skip
        if host in self._roster:
            raise UsageError(
                f"an agent of host {host!r} is already in job {self._spec.job!r}. "
                "Give this one another --host-id, or stop the other."
            )
        difference = self._spec.difference(JobSpec.from_json(spec))
        if difference:
            raise UsageError(
                f"this agent brings another job: {difference}. Start all agents alike."
            )
        if self._job.phase is m.Phase.ENDED:
            raise UsageError(f"job {self._spec.job!r} has ended. Start it anew.")
        manifests = [manifest_from_message(part, host) for part in parts]
        obsolete = [part.generation for part in manifests if self._is_obsolete(part)]
        self._roster.add(host, Agent(peer, (str(address[0]), int(address[1]))))
        self._timeline.begin(f"host {host} joined")
        self._last_number = max([self._last_number, *(part.generation for part in manifests)])
        self._log(f"event=join host={host} slots={slots}")
        for part in manifests:
            self._sizing.learn(part.about)
            if part.generation in obsolete or not self._generations.add(part):
                self._command([host], command="drop", generation=part.generation)
                manifests = [kept for kept in manifests if kept is not part]
        self._take_sealed(host, [manifest_from_message(part, host) for part in sealed])
        self._job = m.replace_assign(self._job, self._sizing.assign())
        covered = self._generations.covered()
        has_parts = bool(manifests or covered)
        self._feed(events.HostJoined(host, slots, covered, has_parts, time.monotonic()))
        return {"round": self._job.round}

    def _is_obsolete(self, part: HostManifest) -> bool:
        """Whether a joining host's part is of a state that the job has passed.

        Raises:
            UsageError: It is of another run of the job, and further than this one.
        """
        newest = self._job.newest_generation
        if self._generations.is_known(part) or (
            self._job.round == 0 and not self._generations.is_foreign(part)
        ):
            return False
        if newest is not None and part.step <= newest.step:
            return True
        raise UsageError(
            f"host {part.host!r} holds generation {part.generation} of step {part.step} of another "
            f"run of job {self._spec.job!r}; this run has begun without it"
            f"{f' and is at step {newest.step}' if newest else ''}. To go on from that state, stop "
            "this run and start all hosts together; to give it up, run scalai clean on that host."
        )

    def _take_sealed(self, host: str, sealed: Iterable[HostManifest]) -> None:
        """A host that comes back may bring what it had sealed, and not committed, when it died."""
        for part in sealed:
            self._generations.deposit(part)
        for late, name, number in self._generations.late():
            self._command([late], command="commit", generation=number, deposit=name)
        found = self._generations.whole_deposit() if self._job.phase is m.Phase.WAITING else None
        if found is not None:
            number = self._commit(found)
            self._log(f"event=recovered committed={number}")
            hosts = self._generations.parts(number)
            self._command(hosts, command="commit", generation=number, deposit=found)

    def _poll(self, peer: Peer, host: str, round: int, newest: int) -> Json:
        agent = self._roster.find(host)
        if agent is None:
            raise UsageError(f"host {host!r} is not in the job (any more).")
        agent.heard()
        if round == self._job.round:
            agent.newest = newest
        if not agent.has_commands:
            self._changed.wait(POLL_S)
        agent.heard()
        return agent.take()

    def _tell(self, peer: Peer, host: str, event: str, **facts: Json) -> Json:
        handlers: Mapping[str, Callable[..., None]] = {
            "built": lambda host, round: self._feed(events.Built(host, round)),
            "not_built": lambda host, round, reason: self._feed(
                events.NotBuilt(host, round, reason)
            ),
            "prepared": self._on_prepared,
            "sealed": self._on_sealed,
            "committed": self._on_committed,
            "stopped": self._on_stopped,
            "failed": self._on_failed,
            "published": self._on_published,
            "grown": self._on_grown,
            "restored": self._on_restored,
            "stepped": self._on_stepped,
            "finished": lambda host, round: self._feed(events.Finished(host, round)),
            "saved": lambda host: self._feed(events.Saved(host)),
            "unsaved": lambda host, reason: self._feed(events.NotSaved(host, reason)),
            "leaving": self._on_leaving,
            "slots": self._on_slots,
        }
        if host not in self._roster:
            return None  # it was released or lost in between
        handlers[event](host, **facts)
        return None

    def _status(self, peer: Peer) -> Json:
        job = self._job
        newest = job.newest_generation
        return {
            "job": self._spec.job,
            "phase": job.phase.value,
            "round": job.round,
            "world_size": job.current.degrees.world_size if job.current else 0,
            "degrees": str(job.current.degrees) if job.current else None,
            "reason": job.current.reason if job.current else None,
            "hosts": {h: {"slots": s} for h, s in staying(job)},
            "workers": dict(job.current.workers) if job.current else {},
            "generation": newest.number if newest else None,
            "generation_step": newest.step if newest else None,
            "step": self._roster.newest(),
            "restarts_left": job.failures_left,
            "last_resize": self._timeline.reports[-1] if self._timeline.reports else None,
        }

    def _scale(
        self, peer: Peer, nproc: int | None, nnodes: int | None, degrees: str | None, dry_run: bool
    ) -> Json:
        assign = self._sizing.scaled(nproc, nnodes, degrees)
        hosts = staying(self._job)
        target = assign(hosts, self._job.current.degrees if self._job.current else None)
        if target is None:
            raise UsageError(
                f"no valid degrees for --nproc {nproc} --nnodes {nnodes} --degrees {degrees} on "
                f"the hosts {dict(hosts)}. Run scalai-run --check-elastic for the worlds that are "
                "valid."
            )
        if not dry_run:
            self._sizing.rescale(nproc, nnodes, degrees)
            self._timeline.begin("scale")
            self._feed(events.Rescaled(self._sizing.assign(), time.monotonic(), nnodes))
        return {
            "degrees": str(target.degrees),
            "workers": dict(target.workers),
            "reason": target.reason,
        }

    # ------------------------------------------------------------------ what agents tell

    def _on_prepared(self, host: str, stop: int, newest: int) -> None:
        self._feed(events.Prepared(host, stop, newest))

    def _on_sealed(
        self, host: str, round: int, reason: str, part: Json, seconds: dict[str, float]
    ) -> None:
        """A host's deposit is sealed; ``part`` None: it has nothing (its workers died before they
        wrote)."""
        parts: Mapping[str, HostManifest] = {}
        if part is not None:
            parts = self._generations.deposit(manifest_from_message(part, host))
        if reason == "stop":
            self._told.deposits[host] = seconds
            self._feed(events.Deposited(host, round))
            return
        hosts = tuple(sorted(active(self._job)))
        if part is not None and round == self._job.round and set(parts) >= set(hosts):
            step, name = parts[host].step, deposit_name(parts[host])
            try:
                check_whole(parts.values())
            except LayoutError as error:
                self._log(f"event={reason} step={step} refused: {error}")
                return
            number = self._commit(name)
            self._log(f"event={reason} committed={number} step={step}")
            self._feed(events.Snapshotted(hosts, step, number))

    def _on_committed(self, host: str, generation: int) -> None:
        self._feed(events.Committed(host, generation))
        if self._job.phase is m.Phase.STOPPING:
            self._timeline.phase("commit", self._timeline.since("sealed"), generation=generation)
            self._timeline.mark("committed")

    def _on_stopped(self, host: str, round: int, newest: int) -> None:
        self._feed(events.Stopped(host, round, newest))

    def _on_failed(self, host: str, round: int, reason: str, out_of_memory: bool = False) -> None:
        current = self._job.current
        if out_of_memory and current is not None and self._job.phase is m.Phase.STARTING:
            self._sizing.exclude(current)
            self._job = m.replace_assign(self._job, self._sizing.assign())
            reason += f"; {current.degrees} is not tried again"
        self._timeline.begin(reason)
        self._feed(events.WorkersFailed(host, round, reason))

    def _on_published(self, host: str, round: int, tensors: list[Json]) -> None:
        """A host's workers have built their models and said what they hold."""
        if round != self._job.round:
            return
        self._told.tensors[host] = frozenset(name for name, *_ in tensors)
        if set(self._told.tensors) >= active(self._job):
            count = len(self._told.names())
            self._timeline.phase("relaunch", self._timeline.since("committed"), tensors=count)
            self._command(active(self._job), command="expect", tensors=count)

    def _on_grown(self, host: str, part: Json) -> None:
        """A host fetched what its workers need: it holds that from now on."""
        self._generations.add(manifest_from_message(part, host))
        self._job = m.replace_generations(self._job, self._generations.covered())

    def _on_restored(self, host: str, round: int, **told: Json) -> None:
        if round != self._job.round or self._source is None:
            return
        self._told.restored[host] = Restored.from_json(**told)
        if not set(self._told.restored) >= active(self._job):
            return
        for name in ("plan", "move", "restore"):
            self._timeline.phase(name, self._told.slowest(name))
        self._timeline.note(
            page_fault_s=self._told.slowest("page_fault"),
            bytes_local=sum(entry.bytes_local for entry in self._told.restored.values()),
            bytes_remote=sum(entry.bytes_remote for entry in self._told.restored.values()),
        )
        self._prove(self._source)

    def _prove(self, number: int) -> None:
        """Compare what was restored with what was deposited, and let the workers go on."""
        began = time.monotonic()
        rows, fingerprints = self._told.rows()
        try:
            self._generations.prove(number, rows, fingerprints)
        except (ProofError, LayoutError) as error:
            reason = f"the restored state is not the deposited one: {error}"
            self._feed(events.WorkersFailed("any", self._job.round, reason))
            return
        took = self._told.slowest("proof") + time.monotonic() - began
        self._timeline.phase("proof", took, generation=number, proven=len(rows.tensors))
        self._timeline.mark("proven")
        self._command(active(self._job), command="proceed")

    def _on_stepped(self, host: str, round: int) -> None:
        self._feed(events.Stepped(host, round))

    def _on_leaving(self, host: str) -> None:
        self._timeline.begin(f"host {host} drains")
        self._log(f"event=leaving host={host}")
        self._feed(events.HostLeaving(host, time.monotonic()))

    def _on_slots(self, host: str, slots: int) -> None:
        self._timeline.begin(f"host {host} has {slots} devices")
        self._feed(events.SlotsChanged(host, slots, time.monotonic()))

    # ------------------------------------------------------------------ events in, actions out

    def _feed(self, event: events.Event) -> None:
        was = self._job.phase
        self._job, due = advance(self._job, event)
        if self._job.phase is not was:
            self._entered(was, self._job.phase)
        for action in due:
            self._perform(action)
        if self._job.phase is m.Phase.RUNNING and self._job.changed_at is None:
            self._timeline.forget()

    def _entered(self, was: m.Phase, now: m.Phase) -> None:
        line = self._timeline
        if was is m.Phase.RUNNING and now in (m.Phase.BUILDING, m.Phase.PREPARING):
            line.phase("detect", line.since("event"))
            line.mark("detected")
        if was is m.Phase.BUILDING:
            line.phase("build", line.since("detected"))
        if now is m.Phase.PREPARING:
            line.mark("preparing")
        elif now is m.Phase.DRAINING:
            self._told.deposits.clear()
        elif now is m.Phase.COMMITTING:
            deposit = self._told.slowest_deposit("deposit")
            proof = self._told.slowest_deposit("deposit_proof")
            line.phase("drain", max(0.0, line.since("preparing") - deposit))
            line.phase("deposit", deposit, deposit_proof_s=round(proof, 6))
            line.mark("sealed")

    def _perform(self, action: actions.Action) -> None:
        match action:
            case actions.Build(ahead):
                self._build(ahead)
            case actions.GiveUp(round):
                self._starter.give_up()
                self._command(self._roster.hosts(), command="give_up", round=round)
            case actions.Prepare(hosts, stop):
                self._command(hosts, command="prepare", stop=stop)
            case actions.Agree(hosts, stop):
                self._command(hosts, command="agree", stop=stop)
            case actions.Withdraw(hosts):
                self._command(hosts, command="withdraw")
            case actions.Judge(hosts):
                self._judge(hosts)
            case actions.Commit(hosts, generation):
                name = self._generations.name(generation)
                self._command(hosts, command="commit", generation=generation, deposit=name)
            case actions.Hurry(hosts):
                self._command(hosts, command="hurry")
            case actions.StopWorkers(hosts, reason, has_deposited):
                self._log(f"event=stop_workers reason={reason!r}")
                self._command(
                    hosts, command="stop", round=self._job.round, has_deposited=has_deposited
                )
            case actions.StartRound():
                self._start(action)
            case actions.Release():
                self._release(action)
            case actions.SaveDurable(hosts, generation):
                self._command(hosts, command="save", generation=generation)
            case actions.Exit(hosts, code, reason):
                self._exit_code = code
                self._log(f"event=exit code={code} reason={reason!r}")
                self._command(hosts, command="exit", code=code, reason=reason)
            case actions.Say(text):
                self._log(f"event=note {text}")

    def _judge(self, hosts: Iterable[str]) -> None:
        name = f"{self._run}-{self._job.round}-{self._job.stop}"
        parts = self._generations.deposited(name, hosts)
        try:
            if not parts:
                raise LayoutError("no host has a deposit.")
            check_whole(parts.values())
        except LayoutError as error:
            self._log(f"event=deposit_incomplete step={self._job.stop} {error}")
            self._feed(events.Judged(False))
            return
        number = self._commit(name)
        self._feed(events.Judged(True, self._job.stop, number, frozenset(parts)))

    def _commit(self, name: str) -> int:
        """Number the parts of a deposit: from now on they are a generation."""
        self._last_number += 1
        self._generations.commit(self._last_number, name)
        parts = self._generations.parts(self._last_number).values()
        self._timeline.note(bytes_deposited=sum(part.size_bytes for part in parts))
        self._sizing.learn(next(iter(parts)).about)
        self._job = m.replace_assign(self._job, self._sizing.assign())
        return self._last_number

    def _start(self, action: actions.StartRound) -> None:
        assignment = action.assignment
        self._timeline.note(
            round=action.round,
            generation=action.generation,
            step=0 if action.generation is None else self._generations.step(action.generation),
            before=self._degrees_before,
            after=str(assignment.degrees),
            workers=dict(assignment.workers),
            why=assignment.reason,
        )
        # After a commit the old workers were stopped: their end is part of the relaunch.
        self._timeline.mark_first("committed")
        self._degrees_before = str(assignment.degrees)
        self._log(f"event=round {assignment.reason!r} generation={action.generation}")
        self._prepare_round(action)
        self._starter.start(action)
        self._changed.notify_all()

    def _build(self, ahead: m.Ahead) -> None:
        self._log(f"event=build {ahead.assignment.reason!r} round_ahead={ahead.round}")
        newest = self._job.newest_generation
        self._starter.build(ahead, newest.number if newest else None)
        self._changed.notify_all()

    def _prepare_round(self, action: actions.StartRound) -> None:
        """Leave behind what the earlier round left: its answers, steps, deposits and whatever was
        newer than the generation that the job goes on from."""
        self._source = action.generation
        self._told = Gathering()
        everyone = self._roster.hosts()
        for host in everyone:
            self._roster[host].newest = 0
        self._command(everyone, command="discard")
        self._generations.forget_deposits()
        for number in self._generations.go_back_to(action.generation):
            self._command(self._roster.hosts(), command="drop", generation=number)
        if action.steps_lost:
            self._timeline.note(steps_lost=action.steps_lost)
            self._log(f"event=went_back steps_lost={action.steps_lost}")

    def _release(self, action: actions.Release) -> None:
        if self._job.phase is m.Phase.RUNNING and self._timeline.has_round:
            self._timeline.phase("first_step", self._timeline.since("proven"))
            report = self._timeline.close()
            self._log(
                f"event=resized total_s={report['total_s']:.3f} degrees={report.get('after')}"
            )
        if action.keep is not None:
            for number in self._generations.keep(action.keep):
                self._command(self._roster.hosts(), command="drop", generation=number)
        for host in action.leaving:
            self._command(
                [host], command="exit", code=0, reason="drained: the job goes on without this host"
            )
            self._roster.release(host)
            self._generations.forget(host)
        if action.leaving:
            self._job = m.replace_generations(self._job, self._generations.covered())

    def _command(self, hosts: Iterable[str], **command: Json) -> None:
        self._roster.command(hosts, command)
        self._changed.notify_all()

    def _log(self, text: str) -> None:
        newest = self._job.newest_generation
        self._say(f"generation={newest.number if newest else 0} round={self._job.round} {text}")
