"""Who tells a host that it will be taken away, as ``--preemption`` names them."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from scalai.core.errors import UsageError

METADATA = "http://169.254.169.254"
"""The address at which AWS, GCP and Azure answer a host about itself."""
CLOUDS = ("aws", "gcp", "azure")
_EXPECTED = "signal, file:PATH, aws, gcp or azure (the last three also with @http://HOST:PORT)"


@dataclass(frozen=True, slots=True)
class NoticeSource:
    """A source of ``kind`` signal, file, aws, gcp or azure, and ``where`` it is: a path, or the
    address of a metadata server."""

    kind: str
    where: str = ""

    def __str__(self) -> str:
        if self.kind == "file":
            return f"file:{self.where}"
        return self.kind if self.where in ("", METADATA) else f"{self.kind}@{self.where}"


def parse_source(text: str) -> NoticeSource:
    """Read one source.

    Raises:
        UsageError: It is none.
    """
    if text == "signal":
        return NoticeSource("signal")
    kind, _, path = text.partition(":")
    if kind == "file" and path:
        return NoticeSource("file", path)
    kind, at, address = text.partition("@")
    if kind not in CLOUDS or (at and not _is_address(address)):
        raise UsageError(f"a preemption source {text!r} is none of {_EXPECTED}.")
    return NoticeSource(kind, address.rstrip("/") if at else METADATA)


def _is_address(text: str) -> bool:
    try:
        found = urlsplit(text)
        is_whole = found.scheme == "http" and bool(found.hostname) and (found.port or 80) > 0
    except ValueError:
        return False
    return is_whole and found.path in ("", "/") and not found.query and found.username is None
