"""Parts of messages between the processes of a job; the messages themselves are frozen dataclasses
(``worker_messages``, ``commands``, ``reports``), written as bytes by ``runtime.codec``."""

import json
from dataclasses import dataclass
from typing import Generic, TypeVar

from scalai.core.jsonable import Json

Answer = TypeVar("Answer")
Message = TypeVar("Message")


class Request(Generic[Answer]):
    """A message with an ``Answer``."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class JsonText:
    """Values of a script, a person or a framework, outside of our types: JSON as text, so that
    whole numbers of any size stay exact."""

    text: str

    @classmethod
    def of(cls, value: Json) -> "JsonText":
        """Write a value down as it is now."""
        return cls(json.dumps(value, separators=(",", ":")))

    def value(self) -> Json:
        """Return the value. Raises ``ValueError`` if the text is no JSON."""
        try:
            return json.loads(self.text)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error


class Named(Generic[Message]):
    """One of several kinds of messages, sent with the name of its kind: ``Named[A | B]``. Equal if
    the messages are."""

    __slots__ = ("message",)

    def __init__(self, message: Message) -> None:
        self.message = message

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and bool(self.message == other.message)

    def __hash__(self) -> int:
        return hash(self.message)

    def __repr__(self) -> str:
        return f"Named({self.message!r})"


class Shared(Generic[Message]):
    """A part of messages common to many receivers: sent compressed, with the digest of its bytes,
    and written once. Equal if the values are."""

    __slots__ = ("value", "written")

    def __init__(self, value: Message) -> None:
        self.value = value
        self.written: tuple[bytes, bytes] | None = None
        """Digest and bytes, once somebody has sent it or it has arrived (``runtime.codec``)."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shared) and bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return f"Shared({self.value!r})"
