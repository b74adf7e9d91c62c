"""The register of a job whose agents agree by vote which coordinator it has: what a majority of the
witnesses remembers (``core.electorate``, ``core.witness``)."""

import logging
import random
import secrets
import time
from collections.abc import Callable, Iterable, Mapping

from scalai.core.electorate import (
    Electorate,
    Mandate,
    Record,
    Witness,
    following,
    is_told,
    key_of,
)
from scalai.core.errors import AbsentError, PeerError, ScalaiError
from scalai.core.witness import ClaimTerm, Known, ReadVote, Told, VoteRequest, WriteRecord
from scalai.launch.coordinator.ballots import Ballots
from scalai.launch.coordinator.leases import Entry

UNFIT_S = 60.0
"""For how long an agent that does not answer is no witness."""

log = logging.getLogger(__name__)

Wanted = Callable[[tuple[Witness, ...], Callable[[Witness], bool]], tuple[Witness, ...]]
"""Returns who should be the witnesses; is given those that are, and who must not be."""


class VoteRegister:
    """As ``Register``, for one thread at a time.

    Args:
        known: Whom to ask first, and the newest record that this process, or the one that has
            started it, has watched.
        token: The job's.
        wanted: Who should be the witnesses; is asked by a holder, and waits for nobody.
        agreed: Is told of an electorate by which others may look for a successor.
        about_to: Is told of one that the first majority has yet to take.
        is_kept: Keep connections to the witnesses.
        clock: Tells seconds.
    """

    def __init__(
        self,
        known: Known,
        token: bytes,
        *,
        wanted: Wanted | None = None,
        agreed: Callable[[Electorate], None] = lambda electorate: None,
        about_to: Callable[[Electorate], None] = lambda electorate: None,
        is_kept: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.known, self._clock = known, clock
        self._ballots = Ballots(token, is_kept=is_kept)
        self._wanted, self._agreed, self._about_to = wanted, agreed, about_to
        self._claimant = secrets.token_hex(8)
        self._mandate: Mandate | None = None
        self._told: Electorate | None = None
        self._unfit: dict[str, float] = {}
        self.gone = frozenset[str]()
        """Memories that were found to be lost, of those that were asked last."""

    @property
    def is_changing(self) -> bool:
        """Whether its holder should write again soon."""
        return self._mandate is not None and self._mandate.is_changing

    @property
    def is_alone(self) -> bool:
        """Whether only its holder's machine may have another one."""
        if self._mandate is None:
            return False
        electorate = self._mandate.record.electorate
        return electorate.is_off and not electorate.before

    # ------------------------------------------------------------------ of whoever looks

    def newest(self) -> Entry | None:
        """Return the newest entry that a majority knows; a holder's is its own, or of a higher term
        that it has heard of."""
        if self._mandate is None:
            self._read()
        return _entry(self.known.record)

    def glimpse(self) -> Entry | None:
        """Return the newest entry that the first witness knows which answers: where it says of a
        coordinator that is there, no majority is needed to follow that."""
        witnesses = list(self.known.electorate.everyone)
        random.shuffle(witnesses)
        for witness in witnesses[:3]:
            told, _ = self._ask((witness,), lambda w: ReadVote(w.host, w.memory), bool)
            if told:
                break
        return _entry(self.known.record)

    def claim(self, entry: Entry) -> bool:
        known = self.known
        if known.electorate.everyone:
            seen = key_of(known.record)
            told = self._ask_all(
                known.electorate,
                lambda w: ClaimTerm(w.host, w.memory, entry.term, self._claimant, seen),
                f"grants term {entry.term}",
            )
            if not _has_majority(known.electorate, told):
                return False
        record = Record(
            entry.term, entry.host, entry.port, entry.beat, entry.is_over, known.electorate
        )
        told = self._write(record)
        if not _has_majority(record.electorate, told):
            return False
        self._mandate = Mandate(record, is_agreed=True)
        self.known = Known(record.electorate, record, max(self.known.term, record.term))
        self._say_agreed()
        return True

    # ------------------------------------------------------------------ of a holder

    def renew(self, entry: Entry) -> None:
        """Write the next record, and change the electorate where that is wanted."""
        assert self._mandate is not None
        before = self._mandate
        mandate = following(before, self._fit(before))
        if entry.is_over:
            mandate = Mandate(
                Record(entry.term, entry.host, entry.port, mandate.record.beat, True,
                       before.record.electorate)
            )  # fmt: skip
        if mandate.back == Electorate() and not self._is_kept_here(mandate.record.electorate):
            mandate = following(before)
        self._mandate = mandate
        record = mandate.record
        told = self._write(record)
        if entry.is_over:
            return  # who could follow has its exit, and may have ended
        if _has_majority(record.electorate, told):
            self._mandate = Mandate(record, is_agreed=True)
            self._say_agreed()
            return
        if mandate.back is None:
            raise self._no_majority(record.electorate, told, "takes the record")
        log.warning("event=lease kind=vote %s", self._no_majority(record.electorate, told,
                    "takes the next witnesses; those before stay"))  # fmt: skip
        self._note_unfit(record.electorate.witnesses, told)
        self._mandate = following(mandate)
        if not mandate.back.everyone:
            self._is_kept_here(mandate.back)
        told = self._write(self._mandate.record)
        if not _has_majority(self._mandate.record.electorate, told):
            raise self._no_majority(self._mandate.record.electorate, told, "takes the record")
        self._mandate = Mandate(self._mandate.record, is_agreed=True)

    def _is_kept_here(self, electorate: Electorate) -> bool:
        """Whether the first electorate is noted where nobody was asked before: another coordinator
        of this machine must not begin without asking."""
        try:
            self._about_to(electorate)
        except (ScalaiError, OSError) as error:
            log.warning("event=lease kind=vote there is none: %s", error)
            return False
        return True

    def _fit(self, mandate: Mandate) -> tuple[Witness, ...] | None:
        """Return who should be the witnesses, once those of them that are new have answered."""
        if self._wanted is None or not mandate.is_agreed or mandate.is_changing:
            return None
        now, present = self._clock(), mandate.record.electorate.witnesses
        self._unfit = {m: until for m, until in self._unfit.items() if until > now}
        wanted = self._wanted(present, self._is_unfit)
        new = [w for w in wanted if w not in present]
        if new:
            told, _ = self._ask(new, lambda w: ReadVote(w.host, w.memory), lambda t: False)
            if not {w.memory for w in new} <= {t.memory for t in told}:
                self._note_unfit(new, told)
                return None
        return wanted

    def _note_unfit(self, asked: Iterable[Witness], told: list[Told]) -> None:
        there, until = {each.memory for each in told}, self._clock() + UNFIT_S
        for witness in asked:
            if witness.memory not in there:
                self._unfit[witness.memory] = until
                log.warning(
                    "event=lease kind=vote the agent of host %s does not answer at %s:%d: for %.0f "
                    "s it is no witness", witness.host, *witness.address, UNFIT_S,
                )  # fmt: skip

    def _is_unfit(self, witness: Witness) -> bool:
        return witness.memory in self._unfit

    def _say_agreed(self) -> None:
        assert self._mandate is not None
        electorate = self._mandate.record.electorate
        if is_told(self._mandate) and electorate != self._told:
            self._told = electorate
            self._agreed(electorate)

    # ------------------------------------------------------------------ asking

    def _read(self) -> None:
        """Ask until a majority of the newest electorate that is met has answered."""
        asked: list[Electorate] = []
        while self.known.electorate not in asked:
            electorate = self.known.electorate
            asked.append(electorate)
            try:
                self._ask_all(
                    electorate, lambda w: ReadVote(w.host, w.memory), "says who is the coordinator"
                )
            except PeerError:
                if self.known.electorate in asked:
                    raise

    def _write(self, record: Record) -> list[Told]:
        if not record.electorate.everyone:
            return []
        told, _ = self._ask(
            record.electorate.everyone,
            lambda w: WriteRecord(w.host, w.memory, record),
            lambda told: _has_majority(record.electorate, told),
        )
        return told

    def _ask_all(
        self, electorate: Electorate, request: Callable[[Witness], VoteRequest], what: str
    ) -> list[Told]:
        """Ask a whole electorate. Raises ``PeerError`` where no majority answers at all, also with
        a refusal."""
        told, _ = self._ask(
            electorate.everyone, request, lambda told: _has_majority(electorate, told)
        )
        there = {each.memory for each in told}
        if not electorate.has_majority(there):
            raise self._no_majority(electorate, told, what)
        return told

    def _ask(
        self,
        witnesses: Iterable[Witness],
        request: Callable[[Witness], VoteRequest],
        is_enough: Callable[[list[Told]], bool],
    ) -> tuple[list[Told], Mapping[Witness, PeerError]]:
        asked = {witness: request(witness) for witness in witnesses}
        told, silent = self._ballots.ask(asked, is_enough)
        for each in told:
            self.known = self.known.with_answer(each)
        absent = {w.memory for w, error in silent.items() if isinstance(error, AbsentError)}
        there = {each.memory for each in told}
        answered = {w.memory for w in asked if w not in silent}
        self.gone = frozenset(absent | (answered - there))
        return told, silent

    def _no_majority(self, electorate: Electorate, told: list[Told], what: str) -> PeerError:
        granted = {each.memory for each in told if each.is_granted}
        unheard = [
            f"{w.host} at {w.address[0]}:{w.address[1]}"
            for w in electorate.everyone
            if w.memory not in granted
        ]
        return PeerError(
            f"no majority of the {len(electorate.everyone)} witnesses {what}. Not heard, or "
            f"refusing: {', '.join(unheard)}."
        )

    def is_lost(self) -> bool:
        """Whether so many of the witnesses that were asked last are gone for good, their agents
        ended or started again, that no majority can ever be had of them."""
        electorate = self.known.electorate
        left = {w.memory for w in electorate.everyone} - self.gone
        return not electorate.has_majority(left)


def _has_majority(electorate: Electorate, told: Iterable[Told]) -> bool:
    return electorate.has_majority({each.memory for each in told if each.is_granted})


def _entry(record: Record | None) -> Entry | None:
    if record is None:
        return None
    return Entry(record.term, record.host, record.port, record.beat, record.is_over)
