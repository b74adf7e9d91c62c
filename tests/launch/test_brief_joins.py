"""Thousands of hosts that join name each other: what one has brought the others leave out."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

import pytest

from scalai.core.errors import MessageError, UsageError
from scalai.core.job.remembered import Remembered, Run
from scalai.core.job.underway import Underway
from scalai.core.messages.shared import JsonText, Request, Shared
from scalai.launch.agent import joining
from scalai.launch.coordinator import brief_joins
from scalai.launch.coordinator.brief_joins import BriefJoins
from scalai.launch.coordinator.calls import Join, JoinBriefly, Joined, StoreIdentity
from scalai.runtime.codec import encode
from scalai.runtime.framing import MAX_FRAME_BYTES
from scalai.runtime.pieces import MOST_BYTES, cut, digest_of
from support.wire import travelled

HOSTS = tuple(f"node-{number:04d}.rack-{number % 64:02d}" for number in range(2048))
WORKERS = tuple((host, 8) for host in HOSTS)
DEGREES = {"tp": 8, "pp": 8, "dp": 256}
NAMES = ",".join(f'"{host}"' for host in HOSTS)


def manifest(host: str, number: int) -> bytes:
    """Return what a part of a generation is like: its own rows between what all name."""
    rows = ",".join(
        f'["{crc32(f"{host}{number}{row}".encode()):x}",{row * 4096}]' for row in range(12)
    )
    return (
        f'{{"digest":"{crc32(host.encode()):064x}","host":"{host}","generation":{number},'
        f'"about":{{"hosts":[{NAMES}],"world_size":16384}},"rows":[{rows}],'
        f'"committed":{{"hosts":[{NAMES}],"fingerprints":{{}}}}}}'
    ).encode()


def join_of(place: int) -> Join:
    host, text = HOSTS[place], JsonText.of({"command": "line"})
    known = Remembered(3, 9, text, 2048, 3, 0, 0, Run(WORKERS, DEGREES, 1), (), (7,))
    its = Underway(
        run="r", round=4, workers=WORKERS, degrees=DEGREES, micro_batch_size=1, generation=7,
        newest=place, is_proven=True, is_stepping=True, is_hooked=True, stop=None,
        has_arrived=False, is_writing=False, is_sealed=False, is_failed=False, is_finished=False,
        every=10,
    )  # fmt: skip
    return Join(
        "j", host, f"i{place}", StoreIdentity("boot", place, 1), 8, ("10.0.0.1", place),
        (manifest(host, 7), manifest(host, 8)), (), (), text, underway=its, last_round=4, term=3,
        remembered=Shared(known),
    )  # fmt: skip


@dataclass
class Wire:
    """A coordinator at the other end, and how many bytes it was sent."""

    briefs: BriefJoins = field(default_factory=BriefJoins)
    sent_bytes: int = 0
    joined: list[Any] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def call(self, request: Request[Joined]) -> Joined:
        with self.lock:
            self.sent_bytes += len(encode(request))
        came: Any = travelled(request)
        if isinstance(came, JoinBriefly):
            came = self.briefs.read(came)
            if isinstance(came, tuple):
                return Joined(0, False, 1, came)
        self.joined.append(came)
        return Joined(4, False, 4)


def test_thousands_of_joins_are_short_but_the_first() -> None:
    wire = Wire()
    requests = [join_of(place) for place in range(0, len(HOSTS), 16)]
    full = len(encode(requests[0]))
    joining.join(wire.call, requests[0])
    first, wire.sent_bytes = wire.sent_bytes, 0
    for request in requests[1:]:
        joining.join(wire.call, request)
    assert wire.joined == requests
    assert full > 200_000 and first < 1.2 * full
    assert wire.sent_bytes / len(requests[1:]) < 0.1 * full


def test_many_that_join_at_one_moment_do_not_all_bring_what_one_brings() -> None:
    wire, requests = Wire(), [join_of(place) for place in range(24)]
    full = len(encode(requests[0]))
    threads = [
        threading.Thread(target=joining.join, args=(wire.call, request)) for request in requests
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert sorted(each.host for each in wire.joined) == [each.host for each in requests]
    assert wire.sent_bytes < (2 + 0.1 * len(requests)) * full


def test_where_the_one_that_was_asked_does_not_bring_it_another_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(brief_joins, "BRING_S", 0.05)
    wire, pieces = Wire(), cut(encode(join_of(0)))
    asked = JoinBriefly("j", HOSTS[0], "i0", tuple(map(digest_of, pieces)), ())
    assert wire.briefs.read(asked) == tuple(range(len(pieces)))
    joining.join(wire.call, join_of(0))
    assert wire.joined == [join_of(0)]


def test_where_nothing_is_kept_joins_are_sent_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()
    monkeypatch.setattr(BriefJoins, "_bring", lambda self, pieces: None)
    monkeypatch.setattr(brief_joins, "BRING_S", 0.0)
    joining.join(wire.call, join_of(3))
    assert wire.joined == [join_of(3)]


def test_what_is_kept_is_bounded_and_what_is_named_often_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = len(encode(join_of(0)))
    monkeypatch.setattr(brief_joins, "KEPT_BYTES", full + 30_000)
    wire = Wire()
    for place in range(0, 400, 4):
        joining.join(wire.call, join_of(place))
        assert sum(map(len, wire.briefs._pieces.values())) <= full + 30_000
    assert wire.sent_bytes < 20 * full


def refused(change: Callable[[JoinBriefly], JoinBriefly]) -> None:
    pieces = cut(encode(join_of(0)))
    whole = JoinBriefly("j", HOSTS[0], "i0", tuple(map(digest_of, pieces)), tuple(pieces))
    BriefJoins().read(change(whole))


def test_a_join_in_anothers_name_or_of_nonsense_is_refused() -> None:
    with pytest.raises(UsageError, match="joins as"):
        refused(lambda whole: replace(whole, host="other"))
    with pytest.raises(UsageError, match="no digest"):
        refused(lambda whole: replace(whole, digests=(b"x", *whole.digests)))
    with pytest.raises(MessageError):
        refused(lambda whole: replace(whole, digests=whole.digests[1:]))


def test_a_join_that_names_a_piece_again_and_again_takes_no_memory() -> None:
    piece = bytes(MOST_BYTES)
    names = (digest_of(piece),) * (MAX_FRAME_BYTES // MOST_BYTES + 1)
    with pytest.raises(UsageError, match="at most"):
        refused(lambda whole: replace(whole, digests=names, brought=(piece,)))


@pytest.mark.parametrize("data", [b"", b"x", bytes(100_000), encode(join_of(1))])
def test_pieces_make_up_the_message_and_none_is_long(data: bytes) -> None:
    pieces = cut(data)
    assert b"".join(pieces) == data
    assert all(0 < len(piece) <= MOST_BYTES for piece in pieces)
