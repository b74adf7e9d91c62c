"""Torch's file format without torch: a ZIP of a pickle and raw storages, read and laid out.

Members are stored, not compressed, so a tensor's elements lie at a known byte of the file and are
never read here.

Source: torch/serialization.py and caffe2/serialize/inline_container.cc of torch 2.13. Differs in:
checksums of storages are written as 0, as torch does under ``set_crc32_options(False)``.
"""

import io
import pickle
import struct
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import index
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from scalai.converters import pickles
from scalai.converters.bounded import open_regular
from scalai.converters.pickles import Call, Foreign, foreign
from scalai.core.errors import RefusedError, ScalaiError, is_memory_short
from scalai.core.tensors.dtypes import BITS, FROM_STORAGE, ITEM_BYTES, STORAGES, Bits
from scalai.core.tensors.region import Index, row_major

MAX_PICKLE_BYTES = 1 << 30
MAX_VALUE_BYTES = 64 << 20
"""Most bytes of a tensor carried as a value."""
MAX_VALUES_BYTES = 4 << 30
"""The same of all tensors of a tree, and of all objects of a checkpoint: they are in memory."""
MAX_VERSION = 10
"""``kMaxSupportedFileFormatVersion`` of torch 2.13."""

UNREADABLE = (
    OSError, zipfile.BadZipFile, struct.error, LookupError, RuntimeError, ValueError,
    OverflowError, EOFError,
)  # fmt: skip
"""Errors of ``zipfile``; RuntimeError for a member marked as encrypted, or of an unknown method."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: element ``i`` lies at byte ``begin + sum(i * stride) * item size``.

    ``storage``: its storage; None: unknown.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: Index
    begin: int
    storage: "Storage | None" = field(default=None, repr=False, compare=False)

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("a tensor is given a state")


@dataclass(frozen=True, eq=False, slots=True)
class NewTensor:
    """A tensor to be written, contiguous. ``content`` are its bytes; None: filled in later."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes | None = None

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Storage:
    """The bytes of tensors.

    Attributes:
        path, record: The file, and the storage's name there.
        crc: The CRC-32 of its bytes; 0: none was taken.
        device: Its device during the save, as ``cuda:1``.
    """

    path: Path
    record: str
    dtype: str
    begin: int
    size_bytes: int
    crc: int
    device: str

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("a storage is given a state")

    def check(self, data: memoryview) -> None:
        """Compare the bytes with their CRC-32.

        Args:
            data: Bytes of the file.

        Raises:
            RefusedError: They differ.
        """
        if self.crc and zlib.crc32(data[self.begin : self.begin + self.size_bytes]) != self.crc:
            raise RefusedError(
                f"{self.path}: {self.record} is not what its CRC-32 was taken of. The file is "
                "damaged: copy it again, or use another checkpoint."
            )


def read_archive(
    path: Path, begin: int = 0, size_bytes: int | None = None, *, trust: bool = False
) -> Any:
    """Return the content of a file, or of a part of it: tensors as ``StoredTensor``, classes inert.

    Args:
        path: The file.
        begin, size_bytes: The part; returned offsets count from the file's start.
        trust: As for ``pickles.loads``.

    Raises:
        RefusedError: Not torch's format, damaged, truncated, or with a forbidden class.
    """
    try:
        with open_regular(path) as file:
            window = FileWindow(file, begin, size_bytes)
            return _read(window, path, begin, trust)
    except ScalaiError:
        raise
    except UNREADABLE as error:
        if is_memory_short(error):
            raise
        raise RefusedError(
            f"{path} is damaged or truncated: no whole torch archive at byte {begin} "
            f"({type(error).__name__}: {error}). Use another checkpoint."
        ) from error


def read_archive_bytes(data: bytes, where: Path, *, trust: bool = False) -> Any:
    """Return the content of an archive in memory, its tensors with their bytes.

    Args:
        where: Its file, for errors.

    Raises:
        RefusedError: As ``read_archive``; or a tensor is large.
    """
    try:
        window = FileWindow(io.BytesIO(data), 0, len(data))
        return with_content(_read(window, where, 0, trust), memoryview(data))
    except ScalaiError:
        raise
    except UNREADABLE as error:
        if is_memory_short(error):
            raise
        raise RefusedError(
            f"{where} is damaged: no whole torch archive ({type(error).__name__}: {error}). Use "
            "another checkpoint."
        ) from error


def check_members(file: IO[bytes], name: str) -> None:
    """Compare all members of a file that is copied unread with their checksums; a file of another
    format has none.

    Raises:
        RefusedError: One differs, or the file begins as an archive and does not end as one;
            ``name`` is its name in the message.
    """
    try:
        if file.read(4) != b"PK\3\4" and not zipfile.is_zipfile(file):
            return
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                with archive.open(member) as opened:
                    if not member.CRC:
                        continue
                    while opened.read(1 << 20):
                        pass
    except UNREADABLE as error:
        raise RefusedError(
            f"{name} is damaged ({error}). Copy it again, or use another checkpoint."
        ) from error


def with_content(value: Any, data: memoryview) -> Any:
    """Return a tree with the bytes of its tensors, in row-major order: for few and small ones. What
    a tree has several times is made once.

    Args:
        value: Result of ``read_archive``.
        data: The file's bytes.

    Raises:
        RefusedError: The tensors are large, or damaged; or the tree is too deep.
    """
    try:
        return _Carried(data).filled(value)
    except RecursionError as error:
        raise RefusedError("a tree of values is too deep, or contains itself: damaged") from error


class _Carried:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._made: dict[int, Any] = {}
        """Results by the ids of a tree's parts, all of which the tree keeps alive."""
        self._checked: set[Storage] = set()
        self._bytes = 0

    def filled(self, value: Any) -> Any:
        if not isinstance(value, StoredTensor | dict | list | tuple):
            return value
        if id(value) not in self._made:
            self._made[id(value)] = self._new(value)
        return self._made[id(value)]

    def _new(self, value: Any) -> Any:
        if isinstance(value, StoredTensor):
            return self._tensor(value)
        if isinstance(value, list | tuple):
            return type(value)(self.filled(entry) for entry in value)
        new = {key: self.filled(entry) for key, entry in value.items()}
        if isinstance(value, OrderedDict):
            new = type(value)(new.items())
            new.__dict__.update(value.__dict__)  # a module's state_dict has versions
        return new

    def _tensor(self, tensor: StoredTensor) -> NewTensor:
        item = ITEM_BYTES[tensor.dtype]
        size_bytes = prod(tensor.shape) * item
        self._bytes += size_bytes
        if size_bytes > MAX_VALUE_BYTES or self._bytes > MAX_VALUES_BYTES:
            where = "" if tensor.storage is None else f"{tensor.storage.path}: "
            raise RefusedError(
                f"{where}a tensor of {size_bytes} bytes, {self._bytes} with those before it, lies "
                f"where no parameter belongs (client_state?), and at most {MAX_VALUE_BYTES} are "
                f"carried as a value, {MAX_VALUES_BYTES} of all. Save it elsewhere."
            )
        if tensor.storage is not None and tensor.storage not in self._checked:
            tensor.storage.check(self._data)
            self._checked.add(tensor.storage)
        strides = [item * step for step in tensor.stride]
        view: Bits = np.ndarray(tensor.shape, BITS[item], self._data, tensor.begin, strides)
        return NewTensor(tensor.dtype, tensor.shape, view.tobytes())


class FileWindow(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: BinaryIO, begin: int, size_bytes: int | None) -> None:
        self._file, self._begin = file, begin
        self.size_bytes = file.seek(0, 2) - begin if size_bytes is None else size_bytes
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self.size_bytes)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self.size_bytes - self._at, 0)
        size = left if size < 0 else min(size, left)
        if size > MAX_PICKLE_BYTES:
            raise zipfile.BadZipFile(f"a directory or a pickle of {size} bytes")
        self._file.seek(self._begin + self._at)
        data = self._file.read(size)
        self._at += len(data)
        return data


def _read(window: FileWindow, path: Path, begin: int, trust: bool) -> Any:
    with zipfile.ZipFile(window) as archive:
        members = {name.filename.partition("/")[2]: name for name in archive.infolist()}
        for member in members.values():
            is_plain = member.compress_type == zipfile.ZIP_STORED and not member.volume
            if not is_plain or member.compress_size != member.file_size:
                raise RefusedError(
                    f"{path}: {member.filename} is compressed; torch stores plainly. "
                    "Or its directory is damaged: use another checkpoint."
                )
        sizes = [member.file_size for member in archive.infolist()]
        if len(members) != len(sizes) or sum(sizes) > window.size_bytes:
            raise RefusedError(
                f"{path} has {len(sizes)} members of {len(members)} names, {sum(sizes)} bytes by "
                f"its directory in a file of {window.size_bytes}. Use another checkpoint."
            )
        byteorder = members.get("byteorder")
        if byteorder is not None and _content(window, byteorder) != b"little":
            raise RefusedError(f"{path} is big-endian, which is not supported.")
        version = int(_content(window, members["version"])) if "version" in members else 1
        if version > MAX_VERSION:
            raise RefusedError(
                f"{path} is of version {version} of torch's format, and at most {MAX_VERSION} is "
                "read. Use a later release of Scalai, or save with torch up to 2.13."
            )
        if members["data.pkl"].file_size > MAX_PICKLE_BYTES:
            raise RefusedError(f"{path} has a pickle of {members['data.pkl'].file_size} bytes.")
        data = _content(window, members["data.pkl"])

    def storage(pid: Any) -> Storage:
        kind, cls, key, device, numel = pid
        name = cls.path[1] if isinstance(cls, type) and issubclass(cls, Foreign) else str(cls)
        if kind != "storage" or name not in FROM_STORAGE:
            raise RefusedError(f"{path} holds a storage {pid!r} of an unknown kind.")
        member, dtype = members[f"data/{key}"], FROM_STORAGE[name]
        start = member_begin(window, member)
        if start + member.file_size > window.size_bytes:
            raise zipfile.BadZipFile(f"{member.filename} ends beyond the file")
        if member.file_size < numel * ITEM_BYTES[dtype]:
            raise RefusedError(
                f"{path}: storage {key} has {member.file_size} bytes for {numel} elements of "
                f"{dtype}. Use another checkpoint."
            )
        return Storage(
            path, member.filename, dtype, begin + start, member.file_size, member.CRC, str(device)
        )

    return pickles.loads(data, str(path), classes=REBUILDERS, persistent=storage, trust=trust)


def _content(window: FileWindow, member: zipfile.ZipInfo) -> bytes:
    """Return a member's bytes, compared with their checksum; 0 is none, of a save without them. Not
    by ``zipfile``, which takes 0 for a checksum."""
    window.seek(member_begin(window, member))
    data = window.read(member.file_size)
    if len(data) < member.file_size or (member.CRC and zlib.crc32(data) != member.CRC):
        raise zipfile.BadZipFile(f"Bad CRC-32 for {member.filename!r}")
    return data


def member_begin(window: FileWindow, member: zipfile.ZipInfo) -> int:
    """Return the first byte of a member's content, behind its local header."""
    window.seek(member.header_offset)
    header = window.read(30)
    if header[:4] != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"no local header of {member.filename}")
    name, extra = struct.unpack("<HH", header[26:30])
    return member.header_offset + 30 + int(name) + int(extra)


def _rebuilt(storage: Storage, offset: int, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    item = ITEM_BYTES[storage.dtype]
    (offset,), shape, stride = _sizes((offset,)), _sizes(shape), _sizes(stride)
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    is_inside = min((offset, *shape, *stride)) >= 0 and (last + 1) * item <= storage.size_bytes
    # Strides of 0 make many elements of few.
    if prod(shape) and not (is_inside and prod(shape) * item <= storage.size_bytes):
        raise RefusedError(
            f"a tensor {list(shape)} reaches beyond its storage of {storage.size_bytes} bytes"
        )
    return StoredTensor(storage.dtype, shape, stride, storage.begin + offset * item, storage)


def _sizes(value: Any) -> tuple[int, ...]:
    return tuple(map(index, value.args[0] if isinstance(value, Foreign) else value))


def _with_attributes(rebuild: Callable[..., Any], _: Any, args: Any, __: Any) -> Any:
    """Stand in for ``torch._tensor._rebuild_from_type_v2``: a tensor with Python attributes, as
    DeepSpeed's buffers of stage 3 and Megatron's masters have them."""
    return rebuild(*args)


def _data(data: Any, *_: Any) -> Any:
    """Stand in for makers of a parameter from a tensor."""
    return data


def _size(sizes: Any = ()) -> tuple[Any, ...]:
    return tuple(sizes)


REBUILDERS: Mapping[tuple[str, str], Call] = {
    (module, name): Call(module, name, function)
    for module, name, function in (
        ("torch._tensor", "_rebuild_from_type_v2", _with_attributes),
        ("torch._utils", "_rebuild_tensor_v2", _rebuilt),
        ("torch._utils", "_rebuild_parameter", _data),
        ("torch._utils", "_rebuild_parameter_with_state", _data),
        ("torch", "Size", _size),
    )
}


ALIGNMENT = 64


@dataclass(frozen=True, eq=False, slots=True)
class ArchiveLayout:
    """A file's layout: its known bytes, and the places of the rest.

    ``fixed`` are (offset, bytes) in order, ``begin`` [tensors] the offset of each tensor without
    content, in the order of the pickle.
    """

    fixed: tuple[tuple[int, bytes], ...]
    tensors: tuple[NewTensor, ...]
    begin: tuple[int, ...]
    size_bytes: int


def lay_out_archive(value: Any, name: str = "archive") -> ArchiveLayout:
    """Lay out a file that torch reads as ``value``, with a tensor for each ``NewTensor``."""
    tensors: list[NewTensor] = []

    def reduce(obj: Any) -> Any:
        if isinstance(obj, StoredTensor):
            raise RefusedError(
                f"a tensor {obj.dtype}{list(obj.shape)} lies within an object of a class, where "
                "none is carried. Save without it."
            )
        if not isinstance(obj, NewTensor):
            return None
        tensors.append(obj)
        key = _Key(len(tensors) - 1, obj.dtype, prod(obj.shape))
        shape = tuple(obj.shape), row_major(obj.shape)
        return foreign("torch._utils", "_rebuild_tensor_v2"), (
            key, 0, *shape, False, OrderedDict(),
        )  # fmt: skip

    def persistent(obj: Any) -> Any:
        if not isinstance(obj, _Key):
            return None
        storage = foreign("torch", STORAGES[obj.dtype])
        return "storage", storage, str(obj.number), "cpu", obj.numel

    data = pickles.dumps(value, reduce=reduce, persistent=persistent)
    writer = _Zip(name)
    writer.add("data.pkl", data)
    writer.add("byteorder", sys.byteorder.encode())
    begin = [writer.reserve(f"data/{n}", tensor) for n, tensor in enumerate(tensors)]
    writer.add("version", b"3\n")
    size_bytes = writer.close()
    open_ = [number for number, tensor in enumerate(tensors) if tensor.content is None]
    return ArchiveLayout(
        tuple(_joined(writer.fixed)),
        tuple(tensors[number] for number in open_),
        tuple(begin[number] for number in open_),
        size_bytes,
    )


def content_of(archive: ArchiveLayout) -> bytes:
    """Return the bytes of a file whose tensors all have their content."""
    assert not archive.tensors
    data = bytearray(archive.size_bytes)
    for at, part in archive.fixed:
        data[at : at + len(part)] = part
    return bytes(data)


def _joined(fixed: Sequence[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Yield contiguous bytes as one: a target may have very many small files."""
    begin, parts, end = 0, [b""], 0
    for at, data in fixed:
        if at != end:
            yield begin, b"".join(parts)
            begin, parts = at, []
        parts.append(data)
        end = at + len(data)
    yield begin, b"".join(parts)


@dataclass(frozen=True, slots=True)
class _Key:
    """A storage to be written."""

    number: int
    dtype: str
    numel: int


class _Zip:
    """Lays out a ZIP file, with ZIP64 fields if needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._at = 0
        self._members: list[tuple[bytes, int, int, int]] = []
        self.fixed: list[tuple[int, bytes]] = []

    def add(self, name: str, data: bytes) -> None:
        begin = self._begin(name, len(data), zlib.crc32(data))
        self.fixed.append((begin, data))

    def reserve(self, name: str, tensor: NewTensor) -> int:
        """Add a tensor's member; returns the offset of its bytes."""
        if tensor.content is not None:
            self.add(name, tensor.content)
            return self._at - len(tensor.content)
        return self._begin(name, tensor.size_bytes, 0)

    def _begin(self, name: str, size: int, crc: int) -> int:
        path = f"{self._name}/{name}".encode()
        # As torch does: padded in an extra field "FB", so that the data are aligned.
        fields = b"" if size < 0xFFFFFFFF else struct.pack("<HHQQ", 1, 16, size, size)
        bare = self._at + 30 + len(path) + len(fields) + 4
        padding = -bare % ALIGNMENT
        extra = fields + b"FB" + struct.pack("<H", padding) + b"Z" * padding
        short = min(size, 0xFFFFFFFF)
        header = struct.pack(
            "<4sHHHHHIIIHH", b"PK\x03\x04", 45 if fields else 20, 0, 0, 0, 0, crc, short, short,
            len(path), len(extra),
        )  # fmt: skip
        self._members.append((path, self._at, size, crc))
        self.fixed.append((self._at, header + path + extra))
        begin = self._at + len(header) + len(path) + len(extra)
        self._at = begin + size
        return begin

    def close(self) -> int:
        """Add the directory at the end; returns the size of the file."""
        directory = b"".join(self._entry(*member) for member in self._members)
        count, at, size = len(self._members), self._at, len(directory)
        end = struct.pack(
            "<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, at
        ) + struct.pack("<4sIQI", b"PK\x06\x07", 0, at + size, 1)
        short = struct.pack(
            "<4sHHHHIIH", b"PK\x05\x06", 0, 0, min(count, 0xFFFF), min(count, 0xFFFF),
            min(size, 0xFFFFFFFF), min(at, 0xFFFFFFFF), 0,
        )  # fmt: skip
        is_large = count >= 0xFFFF or at + size >= 0xFFFFFFFF
        tail = directory + (end if is_large else b"") + short
        self.fixed.append((at, tail))
        return at + len(tail)

    def _entry(self, path: bytes, offset: int, size: int, crc: int) -> bytes:
        values = [size, size] * (size >= 0xFFFFFFFF) + [offset] * (offset >= 0xFFFFFFFF)
        extra = struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values) if values else b""
        short = min(size, 0xFFFFFFFF)
        version = 45 if values else 20
        return struct.pack(
            "<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", version, version, 0, 0, 0, 0, crc, short, short,
            len(path), len(extra), 0, 0, 0, 0, min(offset, 0xFFFFFFFF),
        ) + path + extra  # fmt: skip
