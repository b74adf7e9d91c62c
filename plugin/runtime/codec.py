"""Messages as bytes: MessagePack by msgspec, checked against the types of the messages'
dataclasses.

Arrays travel as their bytes, unions of messages with their kind's name (``Named``), parts equal for
many receivers compressed (``Shared``). The wire format is known only here.
"""

import hashlib
import json
import os
import threading
import zlib
from collections.abc import Mapping
from functools import cache
from math import prod
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from scalai.core.errors import MessageError
from scalai.core.messages.shared import Named, Shared

T = TypeVar("T")

_DTYPES: Mapping[str, str] = {"int64": "<i8", "uint64": "<u8"}
"""Element types of arrays in messages, and their encoding: 8 bytes, little-endian."""
SHARED_BYTES = 1 << 30
"""Largest shared part, unpacked."""
_AS_JSON = b"\xc1"
"""First byte of a message written as JSON, for text outside of UTF-8, such as a path. No
MessagePack begins so."""
_BUILDING = threading.Lock()
"""Held while msgspec first examines the types of a message. It stores its knowledge on the class
before it is complete (0.22); a thread decoding by it then would end the process. A fork waits too,
so that no child keeps the lock for good."""
os.register_at_fork(
    before=_BUILDING.acquire,
    after_in_parent=_BUILDING.release,
    after_in_child=_BUILDING.release,
)
_DECODERS: "dict[Any, msgspec.msgpack.Decoder[Any]]" = {}


def encode(message: object) -> bytes:
    """Return a message as bytes.

    Raises:
        MessageError: It holds an unsendable value, such as a whole number above 64 bits.
    """
    try:
        try:
            return msgspec.msgpack.encode(message, enc_hook=_written)
        except UnicodeEncodeError:
            plain = msgspec.to_builtins(message, enc_hook=_written)
            return _AS_JSON + json.dumps(plain).encode()
    except (
        msgspec.MsgspecError, TypeError, ValueError, OverflowError, NotImplementedError,
        RecursionError,
    ) as error:  # fmt: skip
        raise MessageError(
            f"a {type(message).__name__} cannot be sent ({error}). This is a fault of Scalai's own."
        ) from error


def decode(data: bytes, kind: type[T]) -> T:
    """Read a message of a known kind.

    Raises:
        MessageError: The bytes are none; has the reason.
    """
    try:
        if data[:1] == _AS_JSON:
            return _converted(json.loads(data[1:]), kind)
        message: T = _decoder(kind).decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        name = getattr(kind, "__name__", str(kind))
        raise MessageError(f"what came is no {name} ({error}). Do the versions differ?") from error
    return message


def convert(data: object, kind: type[T]) -> T:
    """Return a dataclass made of plain values, such as JSON's, checked against its types.

    Raises:
        MessageError: They do not fit; has the reason.
    """
    try:
        return _converted(data, kind)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise MessageError(
            f"what is given is no {kind.__name__} ({error}). Do the versions differ?"
        ) from error


def _decoder(kind: Any) -> "msgspec.msgpack.Decoder[Any]":
    found = _DECODERS.get(kind)
    if found is None:
        with _BUILDING:
            found = _DECODERS[kind] = msgspec.msgpack.Decoder(kind, dec_hook=_read)
    return found


def _converted(data: object, kind: type[T]) -> T:
    _decoder(kind)  # from then on msgspec knows all of its types
    return msgspec.convert(data, kind, dec_hook=_read)


def _written(value: Any) -> Any:
    if _is_array(type(value)):
        if value.dtype.name not in _DTYPES:
            raise ValueError(f"no message holds an array of {value.dtype.name}")
        return value.shape, value.astype(_DTYPES[value.dtype.name]).tobytes()
    if isinstance(value, Named):
        return type(value.message).__name__, value.message
    if isinstance(value, Shared):
        if value.written is None:
            content = zlib.compress(encode(value.value))
            value.written = hashlib.sha256(content).digest(), content
        return value.written
    for plain in (str, int, float):  # subclasses, such as numpy's float64
        if isinstance(value, plain):
            return getattr(plain, f"__{plain.__name__}__")(value)
    raise NotImplementedError(f"no message holds a {type(value).__name__}")


def _read(kind: Any, data: Any) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if _is_array(origin):
        (element,) = get_args(arguments[1])
        return _array(data, _DTYPES[element.__name__])
    if origin is Named:
        return Named(_named(data, arguments[0]))
    if origin is Shared:
        return _shared(data, arguments[0])
    if kind is object:  # plain values of any kind
        return data
    raise NotImplementedError(f"no message holds a {kind}")


def _is_array(kind: Any) -> bool:
    """True for numpy's array, by name: a question to a job needs no numpy."""
    return (kind.__module__, kind.__name__) == ("numpy", "ndarray") if kind else False


def _named(data: Any, kinds: Any) -> Any:
    name, content = msgspec.convert(data, tuple[str, Any])
    found = _by_name(kinds).get(name)
    if found is None:
        raise ValueError(f"{name!r} is no kind of message that is expected here")
    return _converted(content, found)


@cache
def _by_name(kinds: Any) -> Mapping[str, Any]:
    return {kind.__name__: kind for kind in get_args(kinds) or (kinds,)}


def _shared(data: Any, kind: Any) -> Shared[Any]:
    digest, content = msgspec.convert(data, tuple[bytes, bytes])
    if hashlib.sha256(content).digest() != digest:
        raise ValueError("a shared part has another digest than it says")
    unpacking = zlib.decompressobj()
    try:
        plain = unpacking.decompress(content, SHARED_BYTES)
    except zlib.error as error:
        raise ValueError(f"a shared part cannot be unpacked ({error})") from error
    if not unpacking.eof or unpacking.unused_data:
        raise ValueError(f"a shared part is cut off, or has over {SHARED_BYTES} bytes")
    shared = Shared(decode(plain, kind))
    shared.written = digest, content
    return shared


def _array(data: Any, dtype: str) -> Any:
    import numpy as np

    shape, content = msgspec.convert(data, tuple[tuple[int, ...], bytes])
    if min(shape, default=0) < 0 or prod(shape) * np.dtype(dtype).itemsize != len(content):
        raise ValueError(f"{len(content)} bytes are no array of shape {list(shape)}")
    # A copy: the bytes are read-only.
    return np.frombuffer(content, dtype).reshape(shape).copy()
