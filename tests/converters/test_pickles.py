"""Pickles are read without their classes and written back under the same names."""

import argparse
import datetime
import os
import pathlib
import pickle
import signal
import subprocess
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.converters import pickles, torch_archive
from scalai.converters.pickles import Array, Call, Foreign
from scalai.converters.torch_archive import (
    NewTensor,
    Storage,
    StoredTensor,
    lay_out_archive,
    read_archive,
)
from scalai.core.errors import RefusedError

pytestmark = pytest.mark.fault

PLAIN = {
    "set": {1, 2}, "range": range(3), "complex": 1j, "bytes": b"\x00\xff", "none": None,
    "ordered": OrderedDict(a=1), "default": defaultdict(list, {1: [2]}),
    "namespace": argparse.Namespace(lr=0.1, betas=(0.9, 0.95)), "path": Path("/some/where"),
    "scalar": np.float64(1.5),
}  # fmt: skip


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_are_what_they_were(protocol: int) -> None:
    value = pickles.loads(pickle.dumps(PLAIN, protocol), "file")
    assert value == PLAIN
    mine = OrderedDict(mine=Path("x"))  # of the classes themselves, beside what stands for them
    assert pickle.loads(pickles.dumps([value, mine])) == [PLAIN, mine]


def test_an_enum_stays_a_stand_in_and_is_itself_again_where_it_is_known() -> None:
    data = pickle.dumps({"exit_signal": signal.SIGTERM}, protocol=2)
    value = pickles.loads(data, "file")
    assert isinstance(value["exit_signal"], pickles.Foreign)
    assert pickle.loads(pickles.dumps(value)) == {"exit_signal": signal.SIGTERM}


@pytest.mark.parametrize("name", ["builtins\neval", "builtins\ngetattr", "os\nsystem", "io\nopen"])
def test_what_could_run_something_is_refused(name: str) -> None:
    data = b"c" + name.encode() + b"\n."
    with pytest.raises(RefusedError, match="--trust-pickle"):
        pickles.loads(data, "file")


@pytest.mark.parametrize(
    "name", ["torch.utils.collect_env\nrun", "torch.storage\n_load_from_bytes", "torch.hub\nload"]
)
def test_a_function_of_a_known_package_may_be_named_and_not_called(name: str) -> None:
    """What is written back is called by whoever loads it."""
    value = pickles.loads(b"c" + name.encode() + b"\n.", "file")
    assert issubclass(value, pickles.Foreign)
    with pytest.raises(RefusedError, match=r"file calls torch\..*--trust-pickle"):
        pickles.loads(b"c" + name.encode() + b"\n(S'id'\ntR.", "file")


def test_a_device_may_be_made_and_what_is_trusted_too() -> None:
    assert pickles.loads(b"ctorch\ndevice\n(S'cpu'\ntR.", "file").args == ("cpu",)
    call = b"ctorch.trusted\ncall\n(S'id'\ntR."
    with pytest.raises(RefusedError):
        pickles.loads(call, "file")
    assert pickles.loads(call, "file", trust=True).args == ("id",)
    with pytest.raises(RefusedError):
        pickles.loads(call, "a file that is not trusted, behind it")


@pytest.mark.parametrize("name", ["torch\nfloat32", "argparse\nNamespace", "pathlib\nPosixPath"])
def test_a_pickle_cannot_change_a_class(name: str) -> None:
    """It could be given the name of a function, under which it would be written back."""
    data = b"c" + name.encode() + b"\n(N}S'path'\n(S'os'\nS'system'\ntstb."
    with pytest.raises(RefusedError, match="damaged pickle"):
        pickles.loads(data, "file")
    assert pickles.foreign("torch", "float32").path == ("torch", "float32")


def test_a_short_deque_of_a_long_range_is_refused() -> None:
    data = b"ccollections\ndeque\n(c__builtin__\nxrange\n(L1000000000000L\ntRI1\ntR."
    with pytest.raises(RefusedError, match="a deque of a range"):
        pickles.loads(data, "file")
    assert pickles.loads(pickle.dumps(deque([1, 2], 3), 2), "file") == deque([1, 2], 3)


def test_sets_are_written_alike_whatever_the_hash_seed() -> None:
    code = (
        "from scalai.converters import pickles\n"
        "print(pickles.dumps({'a': set('some words'), 'b': frozenset('others')}).hex())"
    )
    written = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed},
            check=True, capture_output=True, text=True, timeout=60,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(written) == 1
    assert pickle.loads(bytes.fromhex(written.pop()))["a"] == set("some words")


ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3), np.asfortranarray(np.ones((2, 3), np.int64)),
    np.array([True, False]), np.array(["ab", "c"]), np.array(3, np.uint8), np.zeros((0, 4)),
    np.arange(3, dtype=">f4"), np.array(["ab", "c"], ">U2"), np.array(["", ""]),
    np.asfortranarray(np.array([[1, "a", None], [2.5, b"\0", np.float32(3)]], object)),
    np.zeros((2, 0), object),
]  # fmt: skip


@pytest.mark.parametrize("array", ARRAYS, ids=str)
def test_an_array_of_numpy_comes_back_as_numpy_reads_it(array: np.ndarray) -> None:
    data = pickle.dumps({"rng": array}, 2)
    value, array = pickles.loads(data, "file"), pickle.loads(data)["rng"]
    again = pickle.loads(pickles.dumps(value))["rng"]
    for back in (again, value["rng"].array()):
        assert back.dtype == array.dtype and back.shape == array.shape
        assert np.array_equal(back, array) and back.flags.f_contiguous == array.flags.f_contiguous
        assert [*map(type, back.flat)] == [*map(type, array.flat)]


@pytest.mark.parametrize("text", [np.str_(""), np.bytes_(b""), np.str_("a")], ids=repr)
def test_a_text_of_numpy_may_be_empty(text: Any) -> None:
    value = pickles.loads(pickle.dumps([text], 2), "file")
    for back in (*value, *pickle.loads(pickles.dumps(value))):
        assert type(back) is type(text) and back == text


RECONSTRUCT, SCALAR = (value.__reduce__()[0] for value in (np.zeros(1), np.float64(0)))


class Reduced:
    """An object that is pickled as it says."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


def array_of(dtype: object, shape: object = (4,), data: object = b"A" * 32) -> Reduced:
    return Reduced(RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, shape, dtype, False, data))


POINTERS = Reduced(np.dtype, ("O8", False, True), (3, "|", None, None, None, -1, -1, 0))
DOUBLE = np.dtype("f8")
EMPTY = (3, "<", None, None, None, 0, 4, 8)
HOSTILE = {
    "objects whose pointers are bytes of the file": array_of(POINTERS),
    "objects that are no plain ones": np.array([{}], dtype=object),
    "objects as bytes": array_of(np.dtype("O")),
    "numbers as objects": array_of(DOUBLE, (4,), [1.0] * 4),
    "more places than objects": array_of(np.dtype("O"), (3,), [1, 2]),
    "text beyond Unicode, the other way": array_of(np.dtype(">U4"), (2,), b"\xff" * 32),
    "empty texts without end": array_of(
        Reduced(np.dtype, ("U0", False, True), EMPTY), (9**9,), b""
    ),
    "a scalar that is a pointer": Reduced(SCALAR, (POINTERS, b"A" * 8)),
    "a record": np.zeros(2, [("a", "f4"), ("b", "O")]),
    "a dtype with another state": Reduced(np.dtype, ("f8",), (3, "<", None, None, None, 99, 1, 63)),
    "a dtype that is an expression": Reduced(np.dtype, ("f8,O",)),
    "more elements than bytes": array_of(DOUBLE, (5,)),
    "a negative size": array_of(DOUBLE, (-2, -2)),
    "more dimensions than there are": array_of(DOUBLE, (4, *[1] * 80)),
    "text beyond Unicode": array_of(np.dtype("U4"), (2,), b"\xff" * 32),
    "a truth value of 2": array_of(np.dtype("b1"), (1,), b"\2"),
    "an array of another kind": Reduced(RECONSTRUCT, (np.ndarray, (9,), b"d")),
    "a day 255": Reduced(datetime.datetime, (b"\x07\xe6\x01" + b"\xff" * 7,)),
}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_no_library_is_given_a_state_that_is_not_its_own(value: object) -> None:
    """numpy takes what a file says for pointers: the reader died of what lay there."""
    data = pickle.dumps({"args": value}, 2)
    with pytest.raises(RefusedError, match="file"):
        pickles.loads(data, "file")


# A grammar of pickles: whatever may be named is called, given states, attributes and items.
NAMES = [
    *((module, cls.__name__) for module, kinds in pickles.PLAIN.items() for cls in kinds),
    *pickles.SEALED_BY_NAME, *pickles.CALLS, *pickles.NUMPY, ("numpy", "ndarray"),
    *torch_archive.REBUILDERS, *sorted(pickles.INERT), ("torch", "device"),
    ("torch", "FloatStorage"), ("megatron.core.x", "Class"), ("torch.hub", "load"),
]  # fmt: skip
ATTRIBUTES = [
    "__class__", "__defaults__", "__kwdefaults__", "__code__", "__dict__", "__call__", "__new__",
    "__setstate__", "path", "is_callable", "args", "state", "items", "update", "dtype", "begin",
    "_function", "size_bytes", "storage", "x",
]  # fmt: skip
TEXTS = ["f4", "O8", "b1", "U4", "V8", "|", "<", "latin1", "storage", "0", "cpu", *ATTRIBUTES]


def words(value: object) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def together(parts: list[bytes]) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def called(callee: bytes, arguments: bytes) -> bytes:
    return callee + arguments + b"R"


def given_state(made: bytes, state: bytes) -> bytes:
    return made + state + b"b"


ANY_NAME = st.sampled_from(NAMES).map(lambda name: f"c{name[0]}\n{name[1]}\n".encode())
ANY_TEXT = st.sampled_from(TEXTS).map(words)
ANY_NUMBER = st.sampled_from([0, 1, 3, 4, -1, 2**31, 2**62, True]).map(words)
REBUILD_TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"
STORAGE = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x04tQ"
A_DTYPE = st.builds(
    given_state,
    st.sampled_from(["f4", "f4", "f4", "O8", "U4", "U0"]).map(
        lambda name: called(b"cnumpy\ndtype\n", words((name, False, True)))
    ),
    st.one_of(
        st.sampled_from(
            [
                words((3, *order, -1, -1, flags))
                for order in (("<", *[None] * 3), (">", *[None] * 3), ("|", *[None] * 3))
                for flags in (0, 0, 63)
            ]
        ),
        st.sampled_from([words((3, order, None, None, None, 16, 4, 8)) for order in "<>"]),
        st.just(words(EMPTY)),
        st.lists(st.one_of(ANY_NUMBER, ANY_TEXT), min_size=8, max_size=8).map(together),
    ),
)  # fmt: skip
AN_ARRAY = st.builds(
    lambda dtype, shape, data: given_state(
        called(b"cnumpy._core.multiarray\n_reconstruct\n", b"cnumpy\nndarray\nK\0\x85"
               + words(b"b") + b"\x87"),
        b"(K\1" + shape + dtype + b"\x89" + data + b"t",
    ),
    A_DTYPE,
    st.sampled_from([words(shape) for shape in [(4,), (2, 2), (-2, -2), (0,), 4]]),
    st.sampled_from(
        [words(data) for data in (b"A" * 16, b"A" * 16, b"A" * 32, "A" * 16, [1, None, "a", 2.5])]
    ),
)  # fmt: skip
A_TENSOR = st.builds(
    lambda offset, shape: called(REBUILD_TENSOR, together([STORAGE, offset, *shape])),
    st.sampled_from([words(offset) for offset in (0, 0, 1, -1)]),
    st.sampled_from([[words((2, 2)), words((2, 1))], [words((1,)), words((1,))]]),
)
LEAVES = st.one_of(
    ANY_NAME, ANY_TEXT, ANY_NUMBER, A_DTYPE, AN_ARRAY, A_TENSOR,
    st.sampled_from([STORAGE, *map(words, (None, list(), dict(), 1.5, b"A" * 8, (), (0,)))]),
)  # fmt: skip


def grown(inner: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    several = st.lists(inner, max_size=4).map(together)
    items = st.lists(st.builds(bytes.__add__, ANY_TEXT, inner), max_size=2).map(
        lambda parts: b"}(" + b"".join(parts) + b"u"
    )
    callee = st.one_of(ANY_NAME, ANY_NAME, inner)
    one = st.one_of(
        st.builds(called, callee, several), ANY_NAME, A_DTYPE, AN_ARRAY, A_TENSOR, inner
    )
    states = st.one_of(items, items.map(lambda state: b"N" + state + b"\x86"), several, inner)
    return st.one_of(
        several, items, one,
        st.builds(given_state, one, states),
        st.builds(lambda callee, arguments: callee + arguments + b"\x81", callee, several),
        st.builds(lambda at, key, value: at + key + value + b"s", one, inner, inner),
        st.builds(lambda at, value: at + value + b"a", one, inner),
    )  # fmt: skip


INERT = (
    type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, Call,
    datetime.date, datetime.timedelta, datetime.timezone, np.number, np.bool_, np.str_, np.bytes_,
    pathlib.PurePath, Storage, StoredTensor, dict, list, tuple, set, frozenset, deque, Foreign,
    argparse.Namespace, type,
)  # fmt: skip
CLASSES = {*pickles.SEALED, *(cls for kinds in pickles.PLAIN.values() for cls in kinds)}
REST = {
    **PLAIN, "deque": deque([1], 2), "array": ARRAYS[0], "date": datetime.date(2026, 1, 2),
    "time": datetime.datetime(2026, 1, 2, 3),
}  # fmt: skip
WHOLE = (
    b"\x80\x02"
    + together(
        [
            words(REST),
            b"ctorch\nSize\n((K\x01K\x02ttR",
            b"ctorch\nSize\n)R",
            b"ctorch._utils\n_rebuild_parameter\n(K\x05K\x06tR",
            b"ccollections\ndeque\n)R",
            b"c_codecs\nencode\nX\x01\0\0\0a\x85R",
        ]
    )
    + b"."
)
READ = pickles.loads(WHOLE, "file", classes=torch_archive.REBUILDERS)


def parts_of(value: object) -> Iterator[object]:
    """Yield all objects that a value is made of."""
    seen, left = set[int](), [value]
    while left:
        if id(left[-1]) in seen:
            left.pop()
            continue
        found = left.pop()
        seen.add(id(found))
        yield found
        if isinstance(found, dict):
            left += [*found, *found.values()]
        if isinstance(found, list | tuple | set | frozenset | deque):
            left += found
        if isinstance(found, Foreign):
            left += [found.args, found.state]
        elif isinstance(found, argparse.Namespace | OrderedDict):
            left.append(vars(found))


def check_read(bodies: Iterable[bytes]) -> None:
    """Read pickles one after the other: they build inert values, and are read alike afterwards."""
    storage = Storage(Path("file"), "0", "F32", 64, 16, 0, "cpu")
    known: dict[str, Any] = {
        "classes": torch_archive.REBUILDERS,
        "persistent": lambda _: storage,
    }
    for body in bodies:
        try:
            value = pickles.loads(b"\x80\2" + body + b".", "file", **known)
        except RefusedError:
            continue
        for part in parts_of(value):
            assert isinstance(part, INERT) or type(part) is object, type(part)
            if isinstance(part, type):
                assert issubclass(part, Foreign) or part in CLASSES
            if isinstance(part, OrderedDict):
                assert not any(hasattr(OrderedDict, name) for name in vars(part))
            if isinstance(part, StoredTensor):
                assert 64 <= part.begin < 80
            if isinstance(part, Array):
                assert all(isinstance(item, pickles.ITEMS) for item in part.array().flat)
    assert (storage.begin, storage.size_bytes) == (64, 16)
    assert pickles.loads(WHOLE, "file", **known) == READ


MADE = {
    **{".".join(name): f"c{name[0]}\n{name[1]}\n".encode() for name in NAMES},
    "storage": STORAGE,
    "tensor": called(REBUILD_TENSOR, together([STORAGE, *map(words, (0, (4,), (1,)))])),
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_no_state_alters_what_a_name_stands_for(made: bytes) -> None:
    """A function's defaults held for all files that were read later."""
    values = words(None), words(1.5), b"ctorch\ndevice\n"
    attributes = [b"}" + words(name) + value + b"s" for name in ATTRIBUTES for value in values]
    states = [*attributes, *(b"N" + state + b"\x86" for state in attributes), words((0,) * 8)]
    objects = made, called(made, b")"), made + b")\x81"
    check_read(given_state(found, state) for found, state in product(objects, states))


@given(st.lists(st.recursive(LEAVES, grown, max_leaves=6), min_size=1, max_size=12))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_whatever_a_pickle_names_it_alters_nothing_and_builds_nothing_but_inert_values(
    some: list[bytes],
) -> None:
    check_read(some)


TORCH = """
import sys, torch
value = torch.load(sys.argv[1], weights_only=False)
assert value["dtype"] is torch.bfloat16, value
assert torch.equal(value["tensor"], torch.arange(6.0).view(2, 3)), value
assert value["scalar"].shape == () and value["scalar"].item() == 7
torch.save({"view": torch.arange(10.0).view(2, 5)[:, 1:3], "half": torch.ones(3).bfloat16(),
            "parameter": torch.nn.Parameter(torch.zeros(2))}, sys.argv[2])
"""


def test_torch_reads_our_archives_and_we_read_torchs(tmp_path: Path) -> None:
    content = np.arange(6, dtype=np.float32).tobytes()
    archive = lay_out_archive(
        {
            "dtype": pickles.foreign("torch", "bfloat16"),
            "tensor": NewTensor("F32", (2, 3)),
            "scalar": NewTensor("I64", (), np.int64(7).tobytes()),
        }
    )
    data = bytearray(archive.size_bytes)
    for at, part in archive.fixed:
        data[at : at + len(part)] = part
    data[archive.begin[0] : archive.begin[0] + len(content)] = content
    assert archive.begin[0] % 64 == 0
    ours, theirs = tmp_path / "ours.pt", tmp_path / "theirs.pt"
    ours.write_bytes(data)
    subprocess.run([sys.executable, "-c", TORCH, ours, theirs], check=True, timeout=60)
    value = read_archive(theirs)
    view = value["view"]
    assert (view.dtype, view.shape, view.stride) == ("F32", (2, 2), (5, 1))
    raw = theirs.read_bytes()
    assert np.frombuffer(raw, np.float32, 2, view.begin).tolist() == [1.0, 2.0]
    assert value["half"].dtype == "BF16"
    assert isinstance(value["parameter"], StoredTensor)


def test_archives_beyond_four_gigabytes_are_read_too(tmp_path: Path) -> None:
    archive = lay_out_archive([NewTensor("U8", (5 << 30,)), NewTensor("U8", (3,))])
    path = tmp_path / "sparse.pt"
    with open(path, "wb") as file:
        file.truncate(archive.size_bytes)
        for at, part in archive.fixed:
            file.seek(at)
            file.write(part)
    large, small = read_archive(path)
    assert (large.shape, large.begin) == ((5 << 30,), archive.begin[0])
    assert (small.shape, small.begin) == ((3,), archive.begin[1])
    assert small.begin > 5 << 30


def test_trusted_classes_stay_stand_ins_and_are_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = pickle.dumps(Reduced(os.system, ("echo run > /tmp/this-must-not-be",)))
    value = pickles.loads(data, "file", trust=True)
    assert isinstance(value, pickles.Foreign)
    assert value.path == ("posix", "system")
    assert "class=posix.system" in caplog.text
    assert not Path("/tmp/this-must-not-be").exists()
