"""What tells a file behind a URL from its later self, of what its file system says of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from scalai.remote.patience import ChangedError

_TAGS = (
    "ETag", "etag", "md5", "md5Hash", "checksum", "version_id", "generation",
)  # fmt: skip
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "Last-Modified", "created")


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a file. Two that are equal are of the same bytes, as far as can be known.

    Attributes:
        size_bytes: None where nobody says.
        tags: Its tags and times, as they are given.
        mtime: Seconds since 1970 of its last change, 0 where nobody says.
    """

    size_bytes: int | None
    tags: tuple[str, ...]
    mtime: float = field(default=0.0, compare=False)


def facts_of(info: Mapping[str, Any]) -> Facts:
    """Return what a file system's ``info`` says of a file."""
    # A weak tag has a W/ before it, which some servers leave out of some answers.
    tags = tuple(
        str(info[name]).removeprefix("W/")
        for name in (*_TAGS, *_TIMES)
        if info.get(name) is not None
    )
    size = info.get("size")
    return Facts(size if isinstance(size, int) else None, tags, _mtime(info))


def check_same(was: Facts, now: Facts) -> None:
    """Raise ``ChangedError`` where a file is another one than it was."""
    if was != now:
        raise ChangedError(
            f"size and tags were {(was.size_bytes, *was.tags)}, and are "
            f"{(now.size_bytes, *now.tags)}"
        )


def _mtime(info: Mapping[str, Any]) -> float:
    for name in _TIMES:
        value = info.get(name)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, datetime):
            return value.timestamp()
        if name == "Last-Modified" and value is not None:
            try:
                return parsedate_to_datetime(str(value)).timestamp()
            except ValueError:
                return 0.0
    return 0.0
