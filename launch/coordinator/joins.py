"""Joins of agents: adopts or drops the parts of a host, or refuses the join."""

import time
from collections.abc import Collection, Iterable, Sequence
from functools import partial

from scalai.core.errors import EndedError, LayoutError, ProofError, UsageError
from scalai.core.job.membership import ENDED_BY_A_LOSS, Phase
from scalai.core.job.outlook import (
    Admittance,
    Situation,
    admit,
    admit_sealed,
    given_up_text,
    rival,
)
from scalai.core.job.remembered import Remembered, Underway
from scalai.core.messages import events
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.agent_events import Manifests
from scalai.launch.coordinator.calls import Join, Joined
from scalai.launch.coordinator.held_states import facts_of
from scalai.launch.coordinator.live_job import LiveJob
from scalai.launch.coordinator.members import Member
from scalai.runtime.calls import Peer
from scalai.store.generation import check_whole
from scalai.store.manifest import UNNUMBERED, HostManifest
from scalai.store.parts import snapshot_name
from scalai.store.places import check_host


class Admission:
    """Admits agents with the contents of their stores, or refuses them.

    Args:
        spec: The job; agents of another one are refused.
    """

    def __init__(self, spec: JobSpec, live: LiveJob) -> None:
        self._spec, self._live = spec, live

    def join(
        self, peer: Peer, join: Join, read: Manifests, spec: JobSpec, *, replaces: bool = False
    ) -> Joined:
        """Admit an agent.

        Args:
            read: Its manifests.
            spec: The job by its command line.
            replaces: It replaces another, lost agent of its host.

        Raises:
            UsageError: It may not join; with the reason and the way out.
        """
        host, slots, damaged = join.host, join.slots, join.damaged
        self._check(host, spec, replaces=replaces)
        live = self._live
        manifests = [read[part] for part in join.parts]
        self._count_term(join)
        if join.underway is not None:
            self._take_over(join.underway)
        remembered = self._recalled(join)
        aside = self._set_aside(host, manifests, spec)
        manifests = [part for part in manifests if part not in aside]
        now = self._situation()
        obsolete = [part.generation for part in manifests if self._is_obsolete(part, now)]
        chosen = self._chosen([read[part] for part in join.sealed], manifests, now)
        self._enter(peer, join)
        for number in [*(part.generation for part in (*manifests, *aside)), *dict(damaged)]:
            live.generations.count_from(number)
        live.log(f"event=join host={host} slots={slots}")
        dropped = self._note(host, aside, () if spec.is_fresh else damaged)
        manifests, refused = self._add(manifests, obsolete)
        dropped += refused
        kept = {part.generation for part in manifests}
        examined = {number: lines for number, lines in join.examined if number in kept}
        for number, lines in examined.items():
            live.note_examined(host, number, lines)
        renaming = self._take_sealed(host, chosen)
        live.limit()
        answer = self.answer()
        covered = live.recount()
        # A sealed state may prove incomplete; the job then begins without it.
        is_known = bool(live.generations.catalogue.lacking((), live.generations.survey()))
        has_parts = bool(manifests or covered or is_known)
        live.feed(
            events.HostJoined(
                host,
                slots,
                covered,
                has_parts,
                live.clock(),
                tuple(dropped),
                tuple(renaming),
                join.has_check,
                join.underway,
                join.last_round,
                remembered,
            )
        )
        live.count_damaged(host, examined)
        return answer

    def _add(
        self, manifests: Sequence[HostManifest], obsolete: Collection[int]
    ) -> tuple[list[HostManifest], list[int]]:
        """Add parts to their generations. Returns the added ones, and the numbers for the host to
        drop."""
        kept, refused = list[HostManifest](), list[int]()
        for part in manifests:
            self._live.sizing.learn(part.about, part.generation)
            if part.generation not in obsolete and self._is_of_use(part):
                kept.append(part)
            else:
                refused.append(part.generation)
        return kept, refused

    def _is_of_use(self, part: HostManifest) -> bool:
        """Whether a part counts. After a loss of all hosts a person may go back to a dropped
        one."""
        live = self._live
        may_go_back = live.state.states.has_lost_all
        return live.generations.add(part) or (may_go_back and live.generations.offer(part))

    def _count_term(self, join: Join) -> None:
        """Raise the term above any other known to the host. A new host may know another coordinator
        of the same term."""
        members = self._live.members
        is_ahead = join.term >= members.term and not members.has_had_host(join.host)
        is_ahead |= join.term > members.term
        members.term = max(members.term, join.term + is_ahead)

    def _enter(self, peer: Peer, join: Join) -> None:
        """Add the agent as a member; it replaces another one of its host."""
        live, host = self._live, join.host
        if host in live.members:
            live.log(f"event=replaced host={host} by another agent of it")
            live.forget(host)
        live.members.add(host, Member(peer, join.address, join.domain, live.clock))
        live.memory.tell(host)
        live.timeline.begin(f"host {host} joined", "joined")

    def _take_over(self, underway: Underway) -> None:
        """Continue the run of a lost coordinator's round."""
        live, over = self._live, self._live.state.takeover.pending
        newest = over.newest if over is not None else None
        if live.state.round == 0 and underway.round >= (newest or 0):
            live.take_over(underway.run)

    def _recalled(self, join: Join) -> Remembered | None:
        """A host's record of the job under a lost coordinator."""
        live, kept = self._live, join.remembered
        if kept is None:
            return None
        is_own = live.members.has_had_host(join.host)
        return live.memory.hear(kept.value, has_begun=live.state.round > 0, is_own=is_own)

    def answer(self) -> Joined:
        round = self._live.state.round
        return Joined(round, self._live.is_fresh and round == 0, self._live.members.term)

    def _set_aside(
        self, host: str, manifests: Sequence[HostManifest], spec: JobSpec
    ) -> list[HostManifest]:
        """Parts to set aside for a fresh job.

        Raises:
            UsageError: Only some hosts have ``--fresh``.
        """
        live, job = self._live, self._spec.job
        if spec.is_fresh and not live.is_fresh and not live.is_successor:
            raise UsageError(
                f"--fresh begins job {job!r} anew, but its coordinator was started without it (the "
                f"job is {live.state.phase.value}, round {live.state.round}). Leave it out to take "
                "part; to give the state up, stop all agents and the coordinator and start them "
                "with --fresh."
            )
        if not live.is_fresh:
            return []
        known = live.generations.catalogue
        old = [part for part in manifests if not known.is_known(facts_of(part))]
        if old and not spec.is_fresh:
            raise UsageError(
                f"job {job!r} begins anew (--fresh), but host {host!r} holds "
                f"{_described(old[-1])}. Start it with --fresh too, which gives that up, or "
                "stop the job and start it without."
            )
        return old

    def _note(
        self, host: str, aside: Iterable[HostManifest], damaged: Sequence[tuple[int, str]]
    ) -> list[int]:
        """Record parts set aside, and damage. Returns the numbers to drop at once."""
        live, dropped = self._live, list[int]()
        for part in aside:
            if live.generations.has(part.generation):  # the job will use this number itself
                dropped.append(part.generation)
            else:
                live.generations.set_aside(part.generation)
            live.log(
                f"event=fresh host={host} gives up {_described(part)}; it goes once the job "
                "has a state of its own"
            )
        unread = [reason for number, reason in damaged if number == UNNUMBERED]
        live.generations.note_unread(host, () if live.is_fresh else unread)
        for reason in unread:
            live.log(f"event=damaged host={host} what it had sealed last: {reason}")
        for number, reason in () if live.is_fresh else damaged:
            if number == UNNUMBERED:
                continue
            live.generations.note_damaged(host, number, reason)
            live.log(f"event=damaged host={host} generation={number}: {reason}")
        return dropped

    def _check(self, host: str, spec: JobSpec, *, replaces: bool) -> None:
        check_host(host)
        if host in self._live.members and not replaces:
            raise UsageError(
                f"an agent of host {host!r} is already in job {self._spec.job!r}. "
                "Give this one another --host-id, or stop the other."
            )
        difference = self._spec.difference(spec)
        if difference:
            raise UsageError(
                f"this agent brings another job: {difference}. Start all agents alike."
            )
        if self._live.state.phase is Phase.ENDED:
            step = self._live.finished_step
            if step is None:
                raise EndedError(f"job {self._spec.job!r} has ended. Start it anew.")
            raise UsageError(f"job {self._spec.job!r} has just finished at step {step}.")

    def _situation(self) -> Situation:
        live, job = self._live, self._live.state
        return Situation(
            self._spec.job, live.run, job.round, live.generations.catalogue,
            live.generations.survey(), job.newest_generation, live.is_fresh,
        )  # fmt: skip

    def _is_obsolete(self, part: HostManifest, now: Situation) -> bool:
        """Whether the job has passed the state of a joining host's part.

        Raises:
            UsageError: It belongs to another run and is further than this one, or was committed
                with other fingerprints.
        """
        verdict, why = admit(facts_of(part), now)
        if verdict is Admittance.REFUSED:
            raise UsageError(why)
        if verdict is Admittance.TAKEN:
            try:
                self._live.generations.check_stated(part)
            except ProofError as error:
                raise UsageError(str(error)) from error
        return verdict is Admittance.OBSOLETE

    def _chosen(
        self, sealed: Iterable[HostManifest], held: Sequence[HostManifest], now: Situation
    ) -> list[HostManifest]:
        """Sealed parts that may count; the others are logged. Changes nothing else.

        Raises:
            UsageError: The host has a whole state of another run, further than this one.
        """
        if now.is_fresh and now.round == 0:
            return []
        own, chosen = [facts_of(part) for part in held], list[HostManifest]()
        if why := rival(own, now):
            raise UsageError(why)
        for part in sealed:
            verdict, why = admit_sealed(facts_of(part), own, now, partial(self._is_whole, part))
            if verdict is Admittance.REFUSED:
                raise UsageError(why)
            if verdict is Admittance.TAKEN:
                chosen.append(part)
                continue
            self._live.log(
                f"event=note host {part.host} gives up what it had sealed at step {part.step} "
                f"({snapshot_name(part)}): the job goes on, or begins, without it"
            )
        return chosen

    def _is_whole(self, part: HostManifest) -> bool:
        """Whether a part and those of present hosts make a whole snapshot."""
        live = self._live
        others = live.generations.sealed_parts(snapshot_name(part), live.members.hosts())
        try:
            check_whole({**others, part.host: part}.values())
        except LayoutError:
            return False
        return True

    def _take_sealed(
        self, host: str, chosen: Iterable[HostManifest]
    ) -> list[tuple[int, tuple[str, ...]]]:
        """Adopt a returning host's sealed, uncommitted parts.

        They count before the next round is assigned. While others still write, they count with
        those parts; a round without this host has left them behind.

        Returns:
            Numbers of generations, with the hosts that must rename their part.
        """
        live = self._live
        for part in chosen:
            live.generations.add_sealed(part)
        renaming: list[tuple[int, tuple[str, ...]]] = [
            (number, (late,)) for late, number in live.generations.late()
        ]
        phase = live.state.phase
        ends_round = host in live.active() and phase in ENDED_BY_A_LOSS
        if ends_round or phase in (Phase.WAITING, Phase.STOPPING):
            number = live.recover()
            if number is not None:
                renaming.append((number, tuple(live.generations.parts(number))))
        return renaming


def _described(part: HostManifest) -> str:
    made = part.about.get("time")
    age_s = None if made is None else time.time() - float(made)
    return given_up_text(part.generation, part.step, age_s)
