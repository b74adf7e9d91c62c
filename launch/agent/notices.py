"""Preemption notices: each source answers one question, asked repeatedly in its own thread; a
hanging one delays neither others nor the agent.

Sources: AWS, "Spot Instance interruption notices" and "EC2 instance rebalance recommendations",
with IMDSv2; Google Cloud, "Preemption process" (``instance/preempted``); Azure, "Scheduled Events";
Slurm, scontrol(1) "show node" and squeue(1) ``%L``.
"""

import io
import json
import logging
import math
import os
import random
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from scalai.core.errors import PeerError, ScalaiError, StoreError, UsageError
from scalai.launch.command_runner import CommandRunner, NoAnswerError
from scalai.launch.config import slurm
from scalai.launch.config.elastic_config import NoticeSource

log = logging.getLogger(__name__)

# ------------------------------------------------------------------ metadata servers

TIMEOUT_S = 3.0
"""Seconds for a question, from the connection to the answer's last byte."""
MOST_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A server's answer: status and text; ``at``: its own time in seconds since 1970, None: not
    stated."""

    status: int
    text: str
    at: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def ask(address: str, path: str, headers: Mapping[str, str], method: str = "GET") -> HttpAnswer:
    """Ask a cloud's metadata server at ``address`` (``http://HOST:PORT``) over HTTP. Blocks.

    Trusts it little: a total deadline, a size limit, no proxy, no redirects. The caller judges the
    status.

    Raises:
        PeerError: There is no answer in time, or it is invalid, too long, or not text.
    """
    end = time.monotonic() + TIMEOUT_S
    parts = urlsplit(address)
    assert parts.hostname is not None, "parse_source has looked"
    host, port = parts.hostname, parts.port or 80
    lines = [
        f"{method} {path} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close",
        "Accept-Encoding: identity", *(f"{name}: {value}" for name, value in headers.items()),
        *(["Content-Length: 0"] if method != "GET" else []),
    ]  # fmt: skip
    try:
        with socket.create_connection((host, port), TIMEOUT_S) as connection:
            connection.settimeout(_left(end))
            connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
            return _answer(connection, end, method)
    except (OSError, HTTPException, ValueError) as error:
        raise PeerError(f"{address}{path}: {error or type(error).__name__}") from error


def _answer(connection: socket.socket, end: float, method: str) -> HttpAnswer:
    # It uses only the socket's ``makefile``.
    response = HTTPResponse(_Within(connection, end), method=method)  # type: ignore[arg-type]
    try:
        response.begin()
        text = response.read().decode()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return HttpAnswer(response.status, text, _time(headers.get("date")), headers)
    finally:
        response.close()


def _time(date: str | None) -> float | None:
    try:
        return parsedate_to_datetime(date).timestamp() if date else None
    except (ValueError, OverflowError):
        return None


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("it takes too long")
    return left


class _Within:
    """A connection with a deadline and a size limit for reads."""

    def __init__(self, connection: socket.socket, end: float) -> None:
        self._connection, self._end = connection, end

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self._connection, self._end))


class _TimedReader(io.RawIOBase):
    def __init__(self, connection: socket.socket, end: float) -> None:
        super().__init__()
        self._connection, self._end, self._left = connection, end, MOST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.settimeout(_left(self._end))
        count = self._connection.recv_into(buffer)
        self._left -= count
        if self._left < 0:
            raise OSError(f"the answer has more than {MOST_BYTES} bytes")
        return count


# ------------------------------------------------------------------ questions

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
            left_s = _left_s(said.get("time"), action, datetime.fromisoformat)
            found[f"aws {said.get('action', 'interruption')}"] = left_s
        if self._get("/latest/meta-data/events/recommendations/rebalance") is not None:
            found["aws rebalance recommendation"] = None
        return found

    def _get(self, path: str) -> HttpAnswer | None:
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
                found[key] = _left_s(event.get("NotBefore"), answer, parsedate_to_datetime)
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

    def _get(self, path: str) -> HttpAnswer | None:
        return _there(ask(self._address, path, {"Metadata": "true"}), f"{self._address}{path}")


def _there(answer: HttpAnswer, where: str) -> HttpAnswer | None:
    """Return the answer; None: not found. Raises ``PeerError`` for any other status."""
    if answer.status == _NOT_FOUND:
        return None
    if answer.status != _OK:
        hint = ", and is not followed elsewhere" if 300 <= answer.status < 400 else ""
        raise PeerError(f"{where}: answers with status {answer.status}{hint}.")
    return answer


def _object(answer: HttpAnswer) -> dict[str, Any]:
    try:
        found = json.loads(answer.text)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"the metadata server says {answer.text[:40]!r}, no JSON.") from error
    if not isinstance(found, dict):
        raise PeerError(f"the metadata server says {answer.text[:40]!r}, no JSON object.")
    return found


def _left_s(text: object, answer: HttpAnswer, read: Callable[[str], datetime]) -> float:
    """Return the seconds until a server's time, by its own clock if known."""
    try:
        moment = read(str(text))
        if moment.tzinfo is None:
            raise ValueError("no zone")
        at = moment.timestamp()
    except (ValueError, OverflowError, TypeError) as error:
        raise PeerError(f"the metadata server says the time {text!r}, which is none.") from error
    return max(LEAST_S, at - (time.time() if answer.at is None else answer.at))


class SlurmNotice:
    """An admin's drain of this node, without a deadline, and the end of this job's time.

    Args:
        near_s: Seconds before the end of its time from which on the end is a notice.
        environment: Slurm's variables.
        commands: Runs ``scontrol`` and ``squeue``.

    Raises:
        UsageError: This is no job of Slurm.
    """

    def __init__(
        self,
        near_s: float,
        environment: Mapping[str, str] = os.environ,
        commands: CommandRunner | None = None,
    ) -> None:
        node, job = environment.get("SLURMD_NODENAME"), slurm.job_name(environment)
        if not node or not job:
            raise UsageError(
                "--preemption slurm: SLURMD_NODENAME and SLURM_JOB_ID are not set, as Slurm sets "
                "them for a task. Start the agent by srun or sbatch, or leave this source out."
            )
        self._node, self._job, self._near_s = node, job, near_s
        self._commands = commands or CommandRunner(SLURM_S)

    def read(self) -> Notices:
        """Return the present notices. Raises ``PeerError``."""
        found: dict[str, float | None] = {}
        state = self._said(_NODE_STATE, "scontrol", "--oneliner", "show", "node", self._node)
        if _LEAVING & set(re.split(r"[^A-Z_]+", state)):
            found[f"slurm drain of {self._node}"] = None
        left = self._said(_TIME_LEFT, "squeue", "--noheader", "--jobs", self._job, "--format=%L")
        left_s = _span_s(left)
        if left_s is not None and left_s <= self._near_s:
            found[f"slurm end of job {self._job}"] = max(LEAST_S, left_s)
        return found

    def _said(self, wanted: "re.Pattern[str]", *command: str) -> str:
        """Return what a command says about ``wanted``."""
        try:
            code, output = self._commands.run(command)
        except NoAnswerError as error:
            raise PeerError(str(error)) from error
        answer = wanted.search(output)
        if code or answer is None:
            raise PeerError(f"{' '.join(command)}: exit code {code}, {output.strip()[-200:]!r}.")
        return answer[1]


SLURM_S = 20.0
"""Seconds for a command of Slurm, which waits for its controller for 10 s by default."""
SLURM_RARER = 30
"""Slurm's one controller answers all hosts: it is asked so many times more rarely than a server of
the host's own."""
_NODE_STATE = re.compile(r"\bState=(\S+)")
_LEAVING = {"DRAIN", "DRAINING", "DRAINED", "FAIL", "FAILING"}
_TIME_LEFT = re.compile(r"^((?:(?:\d+-)?\d+:)?\d+:\d+|UNLIMITED|NOT_SET|INVALID)\s*$", re.MULTILINE)


def _span_s(text: str) -> float | None:
    """Return the seconds of ``[DAYS-][HOURS:]MINUTES:SECONDS``; None for a word: no limit."""
    if not text[0].isdigit():
        return None
    days, _, rest = text.rpartition("-")
    seconds = 0
    for part in rest.split(":"):
        seconds = 60 * seconds + int(part)
    return 86400.0 * int(days or 0) + seconds


Question = FileNotice | AwsNotice | GcpNotice | AzureNotice | SlurmNotice


def question_of(source: NoticeSource, default_s: float, interval_s: float) -> Question:
    """Return the question for a source, asked each ``interval_s``; signals have none. Raises
    ``UsageError`` if it cannot be asked here."""
    match source.kind:
        case "file":
            return FileNotice(source.where, default_s)
        case "aws":
            return AwsNotice(source.where)
        case "gcp":
            return GcpNotice(source.where)
        case "azure":
            return AzureNotice(source.where)
        case "slurm":
            # Twice, as one question may fail.
            return SlurmNotice(default_s + 2 * interval_s)
        case _:
            raise StoreError(f"nobody asks {source}.")


# ------------------------------------------------------------------ the watch

LONGEST_S = 60.0
"""Seconds; longest interval between questions, doubled after each failure."""

SILENT_S = 30.0
"""Seconds before a pending question is logged: a file system may hang forever."""

Noticed = Callable[[str, float | None], None]
Withdrawn = Callable[[str], None]


class NoticeWatch:
    """Asks one source, and passes on notices.

    Args:
        noticed, withdrawn: Callbacks for notices; repeated while they hold.
        interval_s: Seconds between questions.
    """

    def __init__(
        self,
        source: NoticeSource,
        question: Question,
        noticed: Noticed,
        withdrawn: Withdrawn,
        interval_s: float,
    ) -> None:
        self._source, self._question = source, question
        self._noticed, self._withdrawn, self._interval_s = noticed, withdrawn, interval_s
        self._known: frozenset[str] = frozenset()
        self._failures, self._problem = 0, ""
        self._asked_at: float | None = None
        self._is_said = False

    def look(self) -> float:
        """Ask once. Returns the seconds before the next question. A failure keeps known notices."""
        self._asked_at = time.monotonic()
        try:
            found = self._question.read()
        except Exception as error:  # also our own slip: else notices would stop
            self._failed(error)
            return min(self._interval_s * 2.0 ** min(self._failures, 10), LONGEST_S)
        finally:
            self._asked_at, self._is_said = None, False
        if self._failures:
            log.info("event=notice_source source=%s answers again", self._source)
        self._failures, self._problem = 0, ""
        self._tell(found)
        return self._interval_s

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        known = isinstance(error, (ScalaiError, OSError))
        problem = str(error) if known else repr(error)
        if self._failures == 1 or type(error).__name__ != self._problem:
            self._problem = type(error).__name__
            log.warning(
                "event=notice_source source=%s gives no answer: %s. It is asked again, each %.0f s "
                "at the latest; until then nobody hears of its notices.",
                self._source, problem, LONGEST_S,
            )  # fmt: skip

    def _tell(self, found: Notices) -> None:
        for name, left_s in found.items():
            if name not in self._known and isinstance(self._question, FileNotice):
                if self._question.problem:
                    log.warning("event=notice_unclear %s", self._question.problem)
            if name in self._known and left_s is not None and left_s <= LEAST_S:
                continue  # its time is over: a repeat postpones nothing
            self._noticed(name, left_s)
        for name in sorted(self._known - found.keys()):
            self._withdrawn(name)
        self._known = frozenset(found)

    def check(self, now: float) -> None:
        """Log once a question without an answer for long. Any thread may call it."""
        asked_at = self._asked_at
        if asked_at is None or self._is_said or now - asked_at < SILENT_S:
            return
        self._is_said = True
        log.warning(
            "event=notice_source source=%s hangs: no answer for %.0f s. Nobody hears of its "
            "notices until it answers.", self._source, now - asked_at,
        )  # fmt: skip

    def run(self) -> None:
        """Ask without end. Hosts that start together do not ask together."""
        time.sleep(random.uniform(0.0, self._interval_s))
        while True:
            time.sleep(self.look())


Asked = tuple[NoticeSource, Question, float]
"""A source, its question, and the seconds between two."""


def questions_of(
    sources: Iterable[NoticeSource], interval_s: float, default_s: float
) -> tuple[Asked, ...]:
    """Return the questions of these sources; signals have none.

    Args:
        interval_s: Seconds between questions to a server of the host's own.
        default_s: Seconds left for a file without content, and for a drain.

    Raises:
        UsageError: A source cannot be asked here.
    """
    found: list[Asked] = []
    for source in sources:
        if source.kind != "signal":
            spacing_s = interval_s * (SLURM_RARER if source.kind == "slurm" else 1)
            found.append((source, question_of(source, default_s, spacing_s), spacing_s))
    return tuple(found)


def watch(questions: Iterable[Asked], noticed: Noticed, withdrawn: Withdrawn) -> None:
    """Start to ask these questions, in threads that end with the process."""
    asked: list[NoticeWatch] = []
    for source, question, spacing_s in questions:
        one = NoticeWatch(source, question, noticed, withdrawn, spacing_s)
        asked.append(one)
        log.info("event=notice_source source=%s is asked each %.0f s", source, spacing_s)
        threading.Thread(target=one.run, name=f"notice-{source.kind}", daemon=True).start()
    if asked:
        threading.Thread(target=_check, args=(asked,), name="notice-check", daemon=True).start()


def _check(asked: Iterable[NoticeWatch]) -> None:
    while True:
        time.sleep(SILENT_S / 3)
        for one in asked:
            one.check(time.monotonic())
