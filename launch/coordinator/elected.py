"""Who was elected as the coordinator of a job whose agents vote, as far as this machine can tell by
the electorate that the last coordinator here has noted."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from scalai.core.electorate import Electorate
from scalai.core.errors import PeerError
from scalai.core.witness import Known
from scalai.launch.config.endpoint import split_endpoint
from scalai.launch.coordinator.calls import Moved
from scalai.launch.coordinator.leases import LEASE_S, Entry, Watch
from scalai.launch.coordinator.votes import VoteRegister
from scalai.runtime.calls import Channel

SEARCH_S = 60.0
LOOK_S = 0.5
KNOCK_S = 1.0
KNOCK_WAIT_S = 2.0
WAIT = (
    "This host begins nothing that those may be going on with. Bring them back, or name the host "
    "that has the coordinator now by --coordinator; if the job runs nowhere any more, start it "
    "once with --coordinator-lease none on all hosts, or remove"
)
NOBODY = Known(Electorate())

log = logging.getLogger(__name__)


def find_elected(
    kept: Known, token: bytes, note: str, is_here: Callable[[str], bool]
) -> tuple[Entry | None, Known]:
    """Return who is the coordinator and answers; else None, and what the next one claims its term
    by.

    Args:
        kept: Whom to ask.
        note: The file that says so.
        is_here: Whether an address is one of this machine. Where a coordinator had gone on without
            a vote, another one can only begin on its machine.

    Raises:
        PeerError: No majority answers within the time, and may live.
    """
    register, deadline = VoteRegister(kept, token), time.monotonic() + SEARCH_S
    watch, has_said = Watch(register), False
    while True:
        try:
            entry, unchanged_s = watch.look()
        except PeerError as error:
            if register.is_lost():
                log.warning(
                    "event=electorate_lost: the agents that %s names have ended, so the job begins "
                    "without a vote until there are three hosts", note,
                )  # fmt: skip
                return None, replace(NOBODY, term=register.known.term)
            if time.monotonic() > deadline:
                raise PeerError(f"{error} {WAIT} {note}.") from error
            if not has_said:
                log.warning("event=waiting_for_majority for %.0f s: %s", SEARCH_S, error)
                has_said = True
        else:
            known = register.known
            if entry is not None and entry.is_over:
                return None, replace(known, electorate=Electorate())
            is_its_own = entry is not None and is_here(entry.host)
            if entry is None or (unchanged_s > LEASE_S if not known.is_off else is_its_own):
                return None, known
            with suppress(PeerError):
                Channel(entry.address, token).close()
                return entry, known
            if time.monotonic() > deadline and known.is_off:
                raise PeerError(
                    f"the coordinator at {entry.host}:{entry.port} does not answer, and went on "
                    f"without a vote. {WAIT} {note}."
                )
            if time.monotonic() > deadline and unchanged_s < LEASE_S / 2:
                raise PeerError(
                    f"the coordinator at {entry.host}:{entry.port} is renewed, and does not answer "
                    f"here within {SEARCH_S:.0f} s: is this host cut off from it? {WAIT} {note}."
                )
        time.sleep(LOOK_S)


def forward(
    endpoint: str | None, moved: Moved, token: bytes, is_here: Callable[[str], bool]
) -> None:
    """Tell, from now on, whoever begins as this job's coordinator at the named address that it has
    one here: a host that was lost and is started again knows of no vote."""
    if endpoint is None or is_here(split_endpoint(endpoint)[0]):
        return
    address = split_endpoint(endpoint)

    def knock() -> None:
        while True:
            time.sleep(KNOCK_S)
            with suppress(PeerError):
                there = Channel(address, token, call_s=KNOCK_WAIT_S, connect_s=KNOCK_WAIT_S)
                try:
                    there.call(moved)
                finally:
                    there.close()

    threading.Thread(target=knock, name="forward", daemon=True).start()
