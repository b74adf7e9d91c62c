"""Sources of preemption notices: each answers one question, asked repeatedly by ``notice_watch``.

Sources: AWS, "Spot Instance interruption notices" and "EC2 instance rebalance recommendations",
with IMDSv2; Google Cloud, "Preemption process" (``instance/preempted``); Azure, "Scheduled Events".
"""

import json
import math
import os
import stat
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

from scalai.core.errors import PeerError, StoreError
from scalai.launch.agent.metadata import Answer, ask
from scalai.launch.config.elastic_config import NoticeSource

Notices = Mapping[str, float | None]
"""Seconds left by notice; None: unknown."""

GCP_S = 30.0
"""Seconds a Google host has after its notice."""
LEAST_S = 5.0
"""Smallest time left; past times may come from another clock."""
TOKEN_S = 21600
EPOCH = 1e9
"""From here on a file's number is seconds since 1970, below it seconds left."""
MOST_FILE_BYTES = 256
AZURE_TAKES = ("Preempt", "Terminate", "Reboot", "Redeploy")
"""Events that clear the memory; a Freeze is only a pause."""

_OK, _UNAUTHORIZED, _NOT_FOUND = 200, 401, 404


class FileNotice:
    """A file that appears, with the seconds left since then, or the time, as optional content.

    Args:
        path: Path of the file.
        default_s: Seconds left for a file without content.
    """

    def __init__(self, path: str, default_s: float) -> None:
        self._path, self._default_s = path, default_s
        self._seen: tuple[object, float] | None = None
        self.problem = ""
        """Description of content without a time."""

    def read(self) -> Notices:
        """Return the present notices.

        Raises:
            OSError: The file's existence is unknown.
        """
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            self._seen, self.problem = None, ""
            return {}
        identity = (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)
        if self._seen is None or self._seen[0] != identity:
            self._seen = identity, time.monotonic() + self._left_s(found.st_mode)
        return {f"file:{self._path}": max(0.0, self._seen[1] - time.monotonic())}

    def _left_s(self, mode: int) -> float:
        self.problem, text = "", ""
        try:
            text = self._text() if stat.S_ISREG(mode) else ""
            if not text:
                return self._default_s
            return max(LEAST_S, _seconds(text))
        except (OSError, ValueError) as error:
            self.problem = (
                f"{self._path} is there, and says no time that is understood ({error}): expected "
                "seconds, or a time such as 2030-01-31T12:00:00Z. It counts as a notice of "
                f"{self._default_s:.0f} s."
            )
            return self._default_s

    def _text(self) -> str:
        descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            content = file.read(MOST_FILE_BYTES + 1)
        if len(content) > MOST_FILE_BYTES:
            raise ValueError(f"more than {MOST_FILE_BYTES} bytes")
        return content.decode().strip()


def _seconds(text: str) -> float:
    """Return the seconds that a text leaves. Raises ``ValueError``."""
    try:
        number = float(text)
    except ValueError:
        return _until(text, time.time())
    if not math.isfinite(number) or number < 0:
        raise ValueError(repr(text))
    return number - time.time() if number >= EPOCH else number


def _until(text: str, now: float) -> float:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} names no zone")
    return moment.timestamp() - now


class AwsNotice:
    """A spot host's interruption, and the earlier rebalance recommendation."""

    def __init__(self, address: str) -> None:
        self._address, self._token = address, ""

    def read(self) -> Notices:
        """Return the present notices. Raises ``PeerError``."""
        found: dict[str, float | None] = {}
        action = self._get("/latest/meta-data/spot/instance-action")
        if action is not None:
            said = _object(action)
            left_s = _left_s(said.get("time"), action, _iso)
            found[f"aws {said.get('action', 'interruption')}"] = left_s
        if self._get("/latest/meta-data/events/recommendations/rebalance") is not None:
            found["aws rebalance recommendation"] = None
        return found

    def _get(self, path: str) -> Answer | None:
        for _ in range(2):
            if not self._token:
                self._token = self._new_token()
            answer = ask(self._address, path, {"X-aws-ec2-metadata-token": self._token})
            if answer.status != _UNAUTHORIZED:
                return _there(answer, f"{self._address}{path}")
            self._token = ""
        raise PeerError(f"{self._address}{path}: refuses a token that it has just given.")

    def _new_token(self) -> str:
        path, header = "/latest/api/token", "X-aws-ec2-metadata-token-ttl-seconds"
        answer = ask(self._address, path, {header: str(TOKEN_S)}, "PUT")
        token = answer.text.strip()
        if answer.status != _OK or not token.isascii() or not token.isprintable() or not token:
            raise PeerError(f"{self._address}{path}: status {answer.status} and no token (IMDSv2).")
        return token


class GcpNotice:
    """A spot or preemptible host's notice: 30 s before its end."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._since: float | None = None

    def read(self) -> Notices:
        """Return the present notices. Raises ``PeerError``."""
        path = "/computeMetadata/v1/instance/preempted"
        answer = ask(self._address, path, {"Metadata-Flavor": "Google"})
        found, where = _there(answer, f"{self._address}{path}"), f"{self._address}{path}"
        word = "FALSE" if found is None else found.text.strip()
        if found is not None and found.headers.get("metadata-flavor") != "Google":
            raise PeerError(f"{where}: no answer of Google's metadata server.")
        if word not in ("TRUE", "FALSE"):
            raise PeerError(f"{where}: {word[:40]!r}; expected TRUE or FALSE.")
        if word == "FALSE":
            self._since = None
            return {}
        self._since = time.monotonic() if self._since is None else self._since
        return {"gcp preempted": max(0.0, self._since + GCP_S - time.monotonic())}


class AzureNotice:
    """Scheduled events of this host; the server also lists others of its scale set."""

    def __init__(self, address: str) -> None:
        self._address, self._name = address, ""

    def read(self) -> Notices:
        """Return the present notices. Raises ``PeerError``."""
        path = "/metadata/scheduledevents?api-version=2020-07-01"
        answer = self._get(path)
        if answer is None:
            return {}
        found: dict[str, float | None] = {}
        events = _object(answer).get("Events", [])
        for event in events if isinstance(events, list) else ():
            if not isinstance(event, dict) or event.get("EventType") not in AZURE_TAKES:
                continue
            hosts = event.get("Resources", [])
            if not isinstance(hosts, list) or self._own_name() not in map(str, hosts):
                continue
            key = f"azure {event['EventType']} {event.get('EventId', '')}".strip()
            if event.get("NotBefore") or event.get("EventStatus") != "Started":
                found[key] = _left_s(event.get("NotBefore"), answer, _rfc)
            else:
                found[key] = LEAST_S
        return found

    def _own_name(self) -> str:
        if not self._name:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            answer = self._get(path)
            if answer is None or not answer.text.strip():
                raise PeerError(f"{self._address}{path}: does not say what this host is called.")
            self._name = answer.text.strip()
        return self._name

    def _get(self, path: str) -> Answer | None:
        return _there(ask(self._address, path, {"Metadata": "true"}), f"{self._address}{path}")


def _there(answer: Answer, where: str) -> Answer | None:
    """Return the answer; None: not found. Raises ``PeerError`` for any other status."""
    if answer.status == _NOT_FOUND:
        return None
    if answer.status != _OK:
        hint = ", and is not followed elsewhere" if 300 <= answer.status < 400 else ""
        raise PeerError(f"{where}: answers with status {answer.status}{hint}.")
    return answer


def _object(answer: Answer) -> dict[str, Any]:
    try:
        found = json.loads(answer.text)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"the metadata server says {answer.text[:40]!r}, no JSON.") from error
    if not isinstance(found, dict):
        raise PeerError(f"the metadata server says {answer.text[:40]!r}, no JSON object.")
    return found


def _iso(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _rfc(text: str) -> datetime:
    return parsedate_to_datetime(text)


def _left_s(text: object, answer: Answer, read: Callable[[str], datetime]) -> float:
    """Return the seconds until a server's time, by its own clock if known."""
    try:
        moment = read(str(text))
        if moment.tzinfo is None:
            raise ValueError("no zone")
        at = moment.timestamp()
    except (ValueError, OverflowError, TypeError) as error:
        raise PeerError(f"the metadata server says the time {text!r}, which is none.") from error
    return max(LEAST_S, at - (time.time() if answer.at is None else answer.at))


Question = FileNotice | AwsNotice | GcpNotice | AzureNotice


def question_of(source: NoticeSource, default_s: float) -> Question:
    """Return the question for a source; signals have none."""
    match source.kind:
        case "file":
            return FileNotice(source.where, default_s)
        case "aws":
            return AwsNotice(source.where)
        case "gcp":
            return GcpNotice(source.where)
        case "azure":
            return AzureNotice(source.where)
        case _:
            raise StoreError(f"nobody asks {source}.")
