"""Every message of the protocol survives its way over the wire, and nothing else passes for one."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.errors import MessageError
from scalai.core.job.remembered import KeptAssignment
from scalai.core.messages import commands, reports
from scalai.core.messages import worker_messages as words
from scalai.core.messages.shared import JsonText, Named, Shared
from scalai.core.messages.worker_messages import ReadOrder, WriteOrder
from scalai.core.tensors.collection import MAX_NDIM, Collection, Tensor
from scalai.core.tensors.holders import Pieces, SourceList
from scalai.core.tensors.replicas import Ring
from scalai.launch.agent import data_plane
from scalai.launch.coordinator import calls
from scalai.launch.coordinator import person_calls as asked
from scalai.runtime.codec import decode, encode
from support.wire import travelled

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
ORDER = ReadOrder(("/\udce9",), *([COLUMN, BOXES, BOXES] + [COLUMN] * 2 + [BOXES] * 2))
SOURCES = SourceList(
    3, 7, ("a", "b"), (("10.0.0.1", 5), ("h", 6)), (3, 0), bytes(64), ("w", "v"), b"\x80\x00",
    (Tensor("param/e", (0, 2), "BF16"),), TEXT, TEXT, {"tp0": 0, "tp1": 1},
)  # fmt: skip
COLUMNS = st.just(COLUMN)
NUMBERS = st.integers(0, 2**63 - 1)
SHARED: list[Any] = [commands.Command, reports.Report, words.WorkerRequest]
UNIONS: list[Any] = [
    *SHARED, calls.CoordinatorRequest, data_plane.Request, data_plane.Answer,
    asked.PersonCall,
    words.Welcome | words.Source | WriteOrder | calls.Joined | calls.CommandsDue,
]  # fmt: skip
KINDS: list[Any] = list(dict.fromkeys(kind for union in UNIONS for kind in get_args(union)))


def messages(kind: Any) -> "st.SearchStrategy[Any]":
    """Return any message of a kind, by the types of its fields."""
    return st.from_type(kind)


def _mapping(kind: Any) -> "st.SearchStrategy[Any]":
    return st.dictionaries(*map(st.from_type, get_args(kind)), max_size=2)


def _inner(make: Any) -> Any:
    return lambda kind: st.from_type(get_args(kind)[0]).map(make)


OF_TYPES: dict[Any, Any] = {
    int: NUMBERS, str: st.sampled_from(["", "ä", "/caf\udce9"]), object: st.none() | NUMBERS,
    Mapping: _mapping, Shared: _inner(Shared), Named: _inner(Named),
    Tensor: st.just(ROWS.tensors[0]),
    Collection: st.just(ROWS), SourceList: st.just(SOURCES), JsonText: st.just(TEXT),
    Ring: st.just(Ring(("a", "b"), ("x", "y"), 1, ("b",))), ReadOrder: st.just(ORDER),
    Pieces: st.just(Pieces("r-1-2", 7, ROWS, PRINTS)),
    reports.Restored: st.builds(
        reports.Restored, NUMBERS, st.just(ROWS), st.just(PRINTS), st.just({"plan": 0.1}), NUMBERS,
        NUMBERS,
    ),
    data_plane.Fetch: st.builds(
        data_plane.Fetch, st.just("a"), NUMBERS, st.just(COLUMN), st.just(PRINTS[: len(COLUMN)]),
        st.just(BOXES), st.just(BOXES),
    ),
}  # fmt: skip
for each, of_type in OF_TYPES.items():
    st.register_type_strategy(each, of_type)


def is_same(one: Any, two: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and np.array_equal(one, two) and two.flags.writeable
    if isinstance(one, Shared):
        return isinstance(two, Shared) and is_same(one.value, two.value)
    if isinstance(one, Named):
        return is_same(one.message, two.message)
    if isinstance(one, dict):
        return is_same(tuple(one.items()), tuple(two.items()))
    if isinstance(one, tuple):
        return len(one) == len(two) and all(map(is_same, one, two))
    if is_dataclass(one):
        return type(one) is type(two) and all(
            is_same(getattr(one, field.name), getattr(two, field.name)) for field in fields(one)
        )
    return bool(one == two) or one != one


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=10, deadline=None)
@given(st.data())
def test_every_message_arrives_as_it_was_sent(kind: Any, data: st.DataObject) -> None:
    """Also where a text is no UTF-8: names of files are bytes, and errors repeat them."""
    message = data.draw(messages(kind))
    assert is_same(message, travelled(message))


@pytest.mark.parametrize("union", UNIONS, ids=[str(number) for number in range(len(UNIONS))])
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_every_kind_of_message_is_known_by_its_name(union: Any, data: st.DataObject) -> None:
    kinds = get_args(union)
    assert len({kind.__name__ for kind in kinds}) == len(kinds)
    message = Named(data.draw(messages(union)))
    assert is_same(message, decode(encode(message), Named[union]))


@given(st.binary(max_size=200))
def test_bytes_are_a_message_or_an_error(data: bytes) -> None:
    for kind in (Named[commands.Command], Named[reports.Report], words.Source):
        try:
            decode(data, kind)
            decode(b"\xc1" + data, kind)
        except MessageError as error:
            assert "Do the versions differ" in str(error)


@settings(deadline=None)
@given(st.sampled_from(KINDS).flatmap(messages), st.data())
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
    publish = words.Publish(1, 1, True, ROWS, ROWS, "tp0", TEXT, False)
    restored = reports.Restored(1, ROWS, PRINTS, {}, 0, 0)
    for message, change, why in (
        (publish, {"held": replace(ROWS, tensor=np.array([0, 0, 9]))}, "a row names tensor 9"),
        (publish, {"held": replace(ROWS, tensor=np.array([0, -4, 1]))}, "a row names tensor -4"),
        (restored, {"fingerprints": PRINTS[:2]}, "fingerprints of 3 pieces"),
    ):
        given = {field.name: getattr(message, field.name) for field in fields(message)}
        with pytest.raises(MessageError, match=why):
            decode(encode({**given, **change}), type(message))


@pytest.mark.parametrize(
    "message", [reports.Moved(1, 1 << 70), Named(object()), np.zeros(1, np.float32)],
    ids=["large", "object", "float32"],
)  # fmt: skip
def test_what_no_message_can_hold_is_an_error_of_our_own(message: Any) -> None:
    with pytest.raises(MessageError, match="a fault of Scalai's own"):
        encode(message)


@pytest.mark.parametrize("samples", [None, 0.5, 1024.0, np.float64(3), 2**60])
def test_samples_are_any_number_or_not_known(samples: float | None) -> None:
    """A script counts them as it likes, and a converted checkpoint may not say."""
    source = words.Source(ORDER, 1, samples, TEXT, TEXT)
    part = words.RankWritten(1, 2, 8, (0,), "tp0", TEXT, TEXT, samples, {})
    for message in (source, part):
        again = travelled(message).consumed_samples
        assert again == samples and type(again) in (type(samples), float)


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
from hypothesis import Phase, find, settings
from scalai.core.messages.shared import Named
from scalai.runtime.codec import decode, encode
from runtime.test_codec import KINDS, messages

once = settings(max_examples=1, phases=[Phase.generate], database=None)
of_all = [find(messages(kind), lambda found: True, settings=once) for kind in KINDS]
sys.setswitchinterval(1e-6)
for message in of_all:
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
