"""Every message of the protocol survives its way over the wire, and nothing else passes for one."""

import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalai.core.dataset.ledger import Lost
from scalai.core.errors import MessageError
from scalai.core.job.function_proof import Numbers
from scalai.core.job.remembered import KeptAssignment, KeptFailure, Remembered
from scalai.core.messages import commands, reports
from scalai.core.messages import worker_messages as words
from scalai.core.messages.shared import JsonText, Named, Shared
from scalai.core.messages.worker_messages import ReadOrder, WriteOrder
from scalai.core.tensors.collection import MAX_NDIM, Collection, Tensor
from scalai.core.tensors.fingerprint import Committed
from scalai.core.tensors.holders import Pieces, SourceList
from scalai.core.tensors.replicas import Ring
from scalai.launch.agent import data_plane
from scalai.launch.coordinator import calls
from scalai.launch.coordinator import person_calls as asked
from scalai.launch.coordinator.named_once import BroughtPart
from scalai.runtime.codec import decode, encode
from support.wire import travelled
from support.wire_words import start, workers

DEADLINE_S = 60.0
ROWS = Collection(
    (Tensor("param/w", (4, 6), "F32"), Tensor("step", (), "F32")),
    np.array([0, 0, 1]),
    np.array([[0] * 6, [0, 0, 0, 0, 0, 3], [0] * 6]),
    np.array([[1, 1, 1, 1, 4, 3], [1, 1, 1, 1, 4, 3], [1] * 6]),
)
PRINTS = np.array([2**64 - 1, 0, 7], np.uint64)
COLUMN, BOXES = np.arange(2), np.arange(2 * MAX_NDIM).reshape(2, MAX_NDIM)
TEXT = JsonText.of({"large": 1 << 200, "text": "ä\udc80", "none": None, "nan": float("inf")})
ORDER = WriteOrder(3, "/dev/shm/x", (0, 1), (64, 128))
MANIFEST = b'{"digest": "x"}'
PIECES = Pieces("r-1-2", 7, ROWS, PRINTS)
SOURCES = Shared(
    SourceList(
        3, 7, ("a", "b"), (("10.0.0.1", 5), ("h", 6)), (3, 0), bytes(64), ("w", "v"),
        b"\x80\x00", (Tensor("param/e", (0, 2), "BF16"),), TEXT, TEXT, {"tp0": 0, "tp1": 1},
    )
)  # fmt: skip
RAN = KeptAssignment((("a", 2), ("b", 0)), {"tp": 2}, None, "full")
LOST = (Lost("r-1", 2, 9),)
KNOWN = Remembered(2, 7, TEXT, 4, 1, 3, 1, RAN, (KeptFailure(RAN, "no"),), (3, 4), LOST)
PARTS: list[Any] = [
    commands.Remember(Shared(KNOWN)),
    *(commands.Build(workers(facts=TEXT)), commands.GiveUp(2), commands.Expect(1, 5)),
    start(sources=SOURCES, is_built=True),
    *(kind(1) for kind in (commands.Proceed, commands.Withdraw, commands.TakeSnapshot)),
    *(commands.Freeze(1), commands.Rescue(1, 8)),
    *(commands.Prepare(1, 8), commands.Agree(1, 8), commands.LogStacks(), commands.Discard()),
    commands.Commit(3, "r-1-2", Shared(("a", "b")), {"param/w": 2**64 - 1}),
    *(commands.CheckHealth(4, "it joins"), reports.HealthChecked(4, False, "no device")),
    *(commands.Commit(3, "r-1-2", None, {}), commands.Stop(1, True), commands.Look()),
    *(kind(3) for kind in (commands.Drop, commands.Save, commands.Doubt, commands.Retire)),
    commands.Examine(3),
    *(commands.Knock(4, (("b", ("10.0.0.2", 5)),)), reports.Knocked(4, ("b",))),
    commands.DropSnapshot("r-1-8"),
    *(commands.Archive(1, 3, True), commands.FinishArchive(2, 3), reports.Archived(1, 9, "no")),
    commands.Replicate(4, SOURCES, Shared(Ring(("a", "b"), ("x", "y"), 1, True, ("b",)))),
    commands.Space(1, 20, 5),
    *(commands.Exit(0, "done", False, commands.Ending(9, None)), commands.Exit(75, "saved")),
    *(reports.Built(1), reports.NotBuilt(1, "no"), reports.Prepared(1, 8, 7)),
    *(reports.Held(1, 8, "a save"), reports.Stopped(1, 8)),
    *(reports.Arrived(1, 8), reports.Arrived(1, 8, "'w' on ranks [0, 1]")),
    *(kind(1) for kind in (reports.Stepped, reports.Unhooked, reports.Hooked, reports.Finished)),
    *(reports.Frozen(1, (8, 9)), reports.Rescued(1, 8), reports.Skipped(1, "r-1-8")),
    *(reports.Replicated(4, 16, "full", True, 8), reports.Replicated(4, 0)),
    *(reports.Committed(3), reports.Saved(), reports.Saved("full")),
    reports.Sealed(1, "stop", "r-1-8", MANIFEST, {"snapshot": 0.5}),
    *(reports.Sealed(1, "stop", "r-1-8"), reports.WorkersFailed(1, "killed", False, True, False)),
    *(reports.Published(1, ("param/w",)), reports.Moved(1, 1 << 40), reports.Grown(MANIFEST)),
    reports.Holding(1, ROWS, 1 << 40),
    reports.Restored(1, ROWS, PRINTS, {"plan": 0.1}, 5, 6),
    *(reports.Unproven(1, "it differs"), reports.Doubted(3, None), reports.Doubted(3, MANIFEST)),
    reports.Suspected(3, ("a", "b"), "it differs"),
    *(reports.Examined(3, ("w",), "/d"), reports.Examined(3, (), "/d", MANIFEST)),
    reports.Attached((MANIFEST,), ((4, "torn"),)),
    *(reports.Leaving("file:/n", 30.0, True), reports.Leaving(), reports.Staying()),
    reports.Slots(4),
    *(words.Hello(1, 2), words.Publish(1, 2, True, ROWS, ROWS, "tp0", TEXT, False)),
    *(words.AwaitSlot(1, 2), words.BeginSnapshot(1, 2, "stop", 8), words.Stand(1, 2, 8, 6)),
    words.BeginSnapshot(1, 2, "stop", 8, (5, 2**64 - 1)),
    words.RankWritten(1, 2, 8, (2**64 - 1, 0), "tp0", TEXT, JsonText.of(None), 7, {"proof": 1.0}),
    *(words.RankRestored(1, 2, PRINTS, {}, "note"), words.RankFinished(1, 2, 8, JsonText("{}"))),
    words.RankUnwritten(1, 2, 8, "full"),
    words.RankStepped(1, 2, 8, words.Imports(("torch",), ("/lib",))),
    *(words.RankStepped(1, 2, 8, None), words.RankRefused(1, 2, "no"), words.RankUnhooked(1, 2)),
    *(words.AwaitFreeze(1, 2), words.RankFrozen(1, 2, None, "torn"), words.RankFailed(1, 2, "no")),
    calls.Poll("j", "a", "i", 1, 2, 3, reports.Stalled((1, 3), 8, 2.5, 60.0), 1.0),
    calls.Poll("j", "a", "i", 1, 2, 3, None, 1.0, ((8, 5.25, 2.0), (9, 5.0, float("inf")))),
    words.RankStepped(1, 2, 8, None, Numbers(5.0, None, True, "float16", "f", "dropout", 0.5)),
    words.RankStepped(1, 2, 8, None, Numbers(5.0, norms={"experts": 0.1}, is_random=True)),
    calls.Bye("j", "a", "i"),
    calls.Join("j", "a", "i", calls.StoreIdentity("b", 1, 2), 2, ("h", 1),
               (BroughtPart(MANIFEST, 0, -1),), (), (),
               TEXT, remembered=Shared(KNOWN), hosts=(("a", "b"),)),
    *(calls.Tell("j", "a", "i", 1, Named(reports.Leaving())), calls.Farewell("j", "a", "i")),
    *(asked.Status("j"), asked.Scale(4, None, "tp2", True), asked.Resume(3, False)),
    asked.ReadSpec(),
    *(data_plane.ReadPieces("a", 1, 9), data_plane.Fetch("a", 1, COLUMN, BOXES, BOXES)),
    *(data_plane.ReadRankStates("a", 1, ("tp0",)), data_plane.RankStates(TEXT)),
    data_plane.PiecesHeld(PIECES, Committed(("a", "b"), {"param/w": 2**64 - 1})),
    *(data_plane.PiecesHeld(PIECES, None), data_plane.Parts(2), data_plane.Refused("no", True)),
]  # fmt: skip
ANSWERS: list[Any] = [
    words.Welcome({"tp": 2}, None, 5, True, True, None, True, TEXT, TEXT), ORDER,
    calls.Joined(1, False, 1),
    words.Source(ReadOrder(("/x",), *([COLUMN, BOXES, BOXES] + [COLUMN] * 2 + [BOXES] * 2)), 1, 2,
                 TEXT, TEXT),
    calls.Commands(2, 7, (Named(commands.LogStacks()), Named(commands.Drop(3))), 1.0),
]  # fmt: skip
UNIONS = (
    commands.Command, reports.Report, words.WorkerRequest, calls.CoordinatorRequest,
    data_plane.Request, data_plane.Answer,
)  # fmt: skip


def is_same(one: Any, two: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and np.array_equal(one, two)
    if isinstance(one, Shared):
        return isinstance(two, Shared) and is_same(one.value, two.value)
    if is_dataclass(one):
        return type(one) is type(two) and all(
            is_same(getattr(one, field.name), getattr(two, field.name)) for field in fields(one)
        )
    return bool(one == two)


@pytest.mark.parametrize("message", [*PARTS, *ANSWERS], ids=lambda found: type(found).__name__)
def test_every_message_arrives_as_it_was_sent(message: Any) -> None:
    again = travelled(message)
    assert is_same(again, message)
    for field in fields(message):
        if isinstance(getattr(message, field.name), np.ndarray):
            assert getattr(again, field.name).flags.writeable


@pytest.mark.parametrize("union", UNIONS, ids=[str(number) for number in range(len(UNIONS))])
def test_every_kind_of_message_is_tried_here_and_known_by_its_name(union: Any) -> None:
    kinds = get_args(union)
    assert len({kind.__name__ for kind in kinds}) == len(kinds)
    examples = {type(message): message for message in PARTS}
    for kind in kinds:
        found = decode(encode(Named(examples[kind])), Named[union])
        assert type(found.message) is kind


@given(st.binary(max_size=200))
def test_bytes_are_a_message_or_an_error(data: bytes) -> None:
    for kind in (Named[commands.Command], Named[reports.Report], words.Source):
        try:
            decode(data, kind)
            decode(b"\xc1" + data, kind)
        except MessageError as error:
            assert "Do the versions differ" in str(error)


@given(st.sampled_from(PARTS), st.data())
def test_a_message_with_one_byte_changed_is_a_message_or_an_error(
    message: Any, data: st.DataObject
) -> None:
    whole = bytearray(encode(message))
    if whole:
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at] ^= data.draw(st.integers(1, 255))
    try:
        decode(bytes(whole), type(message))
    except MessageError:
        pass


def test_columns_that_do_not_fit_together_are_refused() -> None:
    wrong = replace(ROWS, tensor=np.array([0, 0, 9]))
    sent = encode({
        "rank": 1, "round": 1, "is_restoring": True, "held": wrong, "wanted": ROWS, "facts": TEXT,
        "uses_devices": False, "coordinate": "tp0",
    })  # fmt: skip
    with pytest.raises(MessageError, match="a row names tensor 9"):
        decode(sent, words.Publish)
    sent = encode({
        "round": 1, "rows": ROWS, "fingerprints": PRINTS[:2], "seconds": {}, "bytes_local": 0,
        "bytes_remote": 0,
    })  # fmt: skip
    with pytest.raises(MessageError, match="fingerprints of 3 pieces"):
        decode(sent, reports.Restored)


def test_what_no_message_can_hold_is_an_error_of_our_own() -> None:
    with pytest.raises(MessageError, match="a fault of Scalai's own"):
        encode(reports.Moved(1, 1 << 70))
    with pytest.raises(MessageError, match="a fault of Scalai's own"):
        encode(reports.Slots(object()))  # type: ignore[arg-type]
    with pytest.raises(MessageError, match="a fault of Scalai's own"):
        encode(np.zeros(1, np.float32))


@pytest.mark.parametrize("samples", [None, 0.5, 1024.0, np.float64(3), 2**60])
def test_samples_are_any_number_or_not_known(samples: float | None) -> None:
    """A script counts them as it likes, and a converted checkpoint may not say."""
    columns = [COLUMN, BOXES, BOXES] + [COLUMN] * 2 + [BOXES] * 2
    source = words.Source(ReadOrder(("/x",), *columns), 1, samples, TEXT, TEXT)
    part = words.RankWritten(1, 2, 8, (0,), "tp0", TEXT, TEXT, samples, {})
    for message in (source, part):
        again = travelled(message).consumed_samples
        assert again == samples and type(again) in (type(samples), float)


@pytest.mark.parametrize("message", [
    reports.WorkersFailed(1, "no file /caf\udce9"),
    commands.Commit(3, "\ud800", Shared(("\udce9",)), {"w": 2**64 - 1}),
    Named(commands.Exit(1, "/caf\udce9", True, commands.Ending(9, None))),
    WriteOrder(3, "/caf\udce9", (0, 1), (64, 128)),
    words.Imports(("torch",), ("/caf\udce9",)),
    reports.Attached((MANIFEST, b"\xff\x00"), ((4, "/caf\udce9"),)),
    words.Source(ReadOrder(("/\udce9",), *([COLUMN, BOXES, BOXES] + [COLUMN] * 2 + [BOXES] * 2)),
                 1, 2, TEXT, TEXT),
], ids=lambda found: type(found).__name__)  # fmt: skip
def test_text_that_is_no_utf_8_arrives_as_it_was_sent(message: Any) -> None:
    """Names of files are bytes, and errors repeat them."""
    kind = Named[commands.Command] if isinstance(message, Named) else type(message)
    assert is_same(decode(encode(message), kind), message)


def test_kinds_of_numbers_and_text_travel_as_what_they_are_kinds_of() -> None:
    class Loud(str):
        def __str__(self) -> str:
            return "another"

    sent = words.RankRestored(1, 2, PRINTS, {"restore": np.float64(0.5)}, Loud("note"))
    again = travelled(sent)
    assert type(again.seconds["restore"]) is float and again.seconds == {"restore": 0.5}
    assert type(again.note) is str and again.note == "note"


FIRST_WORDS = """
import sys, threading
from scalai.core.messages.shared import Named
from scalai.runtime.codec import decode, encode
from runtime.test_codec import PARTS

sys.setswitchinterval(1e-6)
for message in PARTS:
    data, kind = encode(Named(message)), Named[type(message)]
    together = threading.Barrier(16)

    def read():
        together.wait()
        decode(data, kind)

    threads = [threading.Thread(target=read) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@pytest.mark.fault
def test_threads_may_read_the_first_message_of_a_kind_all_at_once() -> None:
    # A message that nobody has read before, in a process of its own: it may end by a signal.
    tests = Path(__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-c", FIRST_WORDS], cwd=tests, timeout=DEADLINE_S, check=False
    )
    assert run.returncode == 0


def test_a_round_recomputes_nothing_that_has_no_name() -> None:
    with pytest.raises(MessageError):
        decode(
            encode({"workers": [], "degrees": {}, "micro_batch_size": 2, "recompute": "some"}),
            KeptAssignment,
        )
