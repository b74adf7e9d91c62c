"""Messages as they come out at the other end of a connection."""

from typing import TypeVar

from scalai.runtime.codec import decode, encode

T = TypeVar("T")


def travelled(message: T) -> T:
    """Return what arrives where this is sent."""
    return decode(encode(message), type(message))
