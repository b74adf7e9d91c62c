"""The jobs of ``scalai autoscale``: a file each, and a watch over each coordinator.

A watch asks in a thread of its own, so that a silent coordinator delays nobody. All that is known
of a job comes from its coordinator: another autoscaler knows the same after one answer.
"""

import contextlib
import difflib
import logging
import threading
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from scalai.core.cluster.allotting import sizes_of
from scalai.core.errors import AnswerError, PeerError, ScalaiError, UsageError
from scalai.core.exit_codes import RESUMABLE
from scalai.core.messages.shared import JsonText, Request
from scalai.launch.commands.job_history import History, merged
from scalai.launch.config.endpoint import (
    TOKEN_CHARACTERS,
    read_card,
    read_ending,
    split_endpoint,
)
from scalai.launch.coordinator.person_calls import ReadReports, Scale, Status
from scalai.launch.coordinator.registers import open_register
from scalai.runtime.calls import Address, Channel
from scalai.runtime.handshake import job_key
from scalai.store.places import check_job, default_store_dir

LOOK_S = 2.0
"""Seconds between two questions to a coordinator."""
SILENT_S = 30.0
"""Age of an answer, in seconds, from which on a job counts as silent."""
GRACE_S = 90.0
"""Longest wait for the first answer of a job that was there before, in seconds: a takeover by
another host takes 60."""
MOST_JOB_BYTES = 1 << 16
CONSTANT = (
    "a running job keeps its global batch. Its data, schedule and every step's samples are counted "
    "by it, in Megatron-LM, DeepSpeed and own loops; a growing batch is the script's own statement "
    "(--rampup-batch-size of Megatron-LM, scalai.BatchRamp)."
)

log = logging.getLogger("scalai.autoscale")


@dataclass(frozen=True, slots=True)
class JobFile:
    """A job as a person describes it.

    Attributes:
        name: The file's, without ``.toml``.
        job: Its name at the coordinator.
        coordinator: ``HOST:PORT``; None: by ``lease``, else by the card in ``store_dir``.
        lease: Its ``--coordinator-lease``.
        token_file: File with its secret; needed with ``coordinator`` and ``lease``.
        devices: Least and most.
        asked: Devices that a person would ask for; policies that serve as asked need them.
        steps: Length; None: not stated.
        kind: Name that recurs with the same training.
        priority: Factor of its worth.
        engine: Name of the Kubernetes Job or Slurm array.
        at: Time of the file, in seconds since 1970.
    """

    name: str
    job: str
    devices: tuple[int, int]
    asked: int
    coordinator: str | None = None
    lease: str | None = None
    store_dir: str | None = None
    token_file: str | None = None
    steps: int | None = None
    kind: str = ""
    priority: float = 1.0
    engine: str = ""
    at: float = 0.0


_KEYS = tuple(each.name for each in fields(JobFile) if each.name not in ("name", "at"))


def read_job(path: Path) -> JobFile:
    """Read a job's file. Raises ``UsageError``: it is no such file."""
    try:
        at = path.stat().st_mtime
        with path.open("rb") as file:
            given = tomllib.loads(file.read(MOST_JOB_BYTES).decode())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}.") from error
    for key in given:
        if key in ("batch", "learning_rate"):
            raise UsageError(f"{path}: {key!r}: {CONSTANT}")
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            more = f" Did you mean {near[0]}?" if near else ""
            raise UsageError(f"{path}: {key!r} is none of {', '.join(_KEYS)}.{more}")
    match given.get("devices"):
        case [int(least), int(most)] if 1 <= least <= most:
            pass
        case other:
            raise UsageError(f"{path}: devices = {other!r}; expected [least, most], from 1 on.")
    numbers = {
        "asked": (given.get("asked", most), least <= given.get("asked", most) <= most),
        "steps": (steps := given.get("steps"), steps is None or steps > 0),
        "priority": (priority := given.get("priority", 1.0), priority > 0),
    }
    for key, (value, is_right) in numbers.items():
        if not is_right or isinstance(value, bool):
            raise UsageError(f"{path}: {key} = {value!r} is out of its range.")
    found = JobFile(
        **{"job": path.stem, "kind": path.stem, "engine": path.stem, **given}
        | {"name": path.stem, "devices": (least, most), "asked": numbers["asked"][0], "at": at}
    )  # fmt: skip
    texts = (found.job, found.coordinator, found.lease, found.store_dir, found.token_file)
    if not all(isinstance(text, str | None) for text in (*texts, found.kind, found.engine)):
        raise UsageError(f"{path}: a name, address or path is no text.")
    check_job(found.job)
    if found.coordinator is not None:
        split_endpoint(found.coordinator)
    if (found.coordinator or found.lease) and not found.token_file:
        raise UsageError(f"{path}: name the file with the job's secret: token_file = '/path'.")
    return found


@dataclass(frozen=True, slots=True)
class Seen:
    """What a watch knows.

    Attributes:
        status: The newest answer; None: none yet.
        at: Its time, in seconds since 1970.
        history: Changes so far, and the newest step.
        sizes: Numbers of workers with a valid layout on the present hosts; None: unknown.
        problem: Why there is no answer now; empty: there is one.
        since: Since when.
        ending: Its end, as its coordinator said.
        is_resumable: Its state is saved: it waits for another start.
        tries: Questions so far.
    """

    status: Mapping[str, Any] | None = None
    at: float = 0.0
    history: History | None = None
    sizes: frozenset[int] | None = None
    problem: str = ""
    since: float = 0.0
    ending: str = ""
    is_resumable: bool = False
    tries: int = 0

    @property
    def workers(self) -> Mapping[str, int]:
        if self.status is None or self.ending:
            return {}
        return {host: count for host, count in self.status["workers"].items() if count}

    @property
    def devices(self) -> int:
        return sum(self.workers.values())

    @property
    def slots(self) -> int:
        """Slots of the hosts that are there."""
        hosts = self.status["hosts"] if self.status is not None else {}
        return sum(int(about["slots"]) for about in hosts.values())

    @property
    def is_training(self) -> bool:
        return self.status is not None and self.status["phase"] == "running"


class JobWatch:
    """Asks a job's coordinator again and again, until ``close``.

    Args:
        file: The job.
        per_host: Devices of a host.
        asks_sizes: Whether the job's size is its number of workers on the hosts that are there.
    """

    def __init__(self, file: JobFile, per_host: int, *, asks_sizes: bool) -> None:
        self.file, self._per_host, self._asks_sizes = file, per_host, asks_sizes
        self._seen, self._key = Seen(since=time.time()), ("", "")
        self._sizes_of: object = None
        self._reports_of: object = object()
        self._end = threading.Event()
        threading.Thread(target=self._serve, name=f"watch {file.name}", daemon=True).start()

    @property
    def seen(self) -> Seen:
        """The newest knowledge; one that is too old is a silence."""
        found = self._seen
        if found.status is not None and not found.problem and time.time() - found.at > SILENT_S:
            return replace(found, problem="its answer is late", since=found.at)
        return found

    def close(self) -> None:
        self._end.set()

    def call(self, request: Request[JsonText]) -> Any:
        """Ask its coordinator once. Raises ``PeerError`` without an answer, or a refusal."""
        with contextlib.closing(Channel(*self._way())) as channel:
            return channel.call(request).value()

    def _serve(self) -> None:
        channel: Channel | None = None
        while True:
            try:
                channel = channel or Channel(*self._way())
                self._seen = self._look(channel.call)
                if self._seen.ending:
                    channel = _closed(channel)
            except ScalaiError as error:
                channel = _closed(channel)
                self._note(str(error))
            except (KeyError, TypeError, ValueError, OSError) as error:  # another version's answer
                channel = _closed(channel)
                self._note(f"its answer cannot be read: {error!r}")
            if self._end.wait(LOOK_S):
                _closed(channel)
                return

    def _note(self, problem: str) -> None:
        seen = self._seen
        since = seen.since if seen.problem else time.time()
        seen = replace(seen, problem=problem, since=since, tries=seen.tries + 1)
        if not (self.file.coordinator or self.file.lease):
            ending = read_ending(self._folder())
            if ending is not None and ending.at >= seen.at:
                seen = _over(seen, ending.code, ending.reason)
        self._seen = seen

    def _look(self, ask: Callable[[Request[JsonText]], JsonText]) -> Seen:
        status, at = ask(Status(self.file.job)).value(), time.time()
        seen, end = self._seen, status["end"]
        history, last = seen.history, status["last_resize"]
        if (mark := (status["term"], last and last["at"])) != self._reports_of:
            history = merged(ask(ReadReports(self.file.job)).value(), self.file.name)
            self._reports_of = mark
        if history is not None:
            history = replace(history, until=(at, int(status["step"])))
        found = replace(
            seen, status=status, at=at, history=history, problem="", ending="", tries=seen.tries + 1
        )
        if end is not None:
            return _over(found, end["code"], end["reason"])
        hosts = tuple(sorted((host, about["slots"]) for host, about in status["hosts"].items()))
        about = (hosts, self.file.devices, len(status["failed_changes"]))
        if self._asks_sizes and about != self._sizes_of and found.is_training and status["step"]:
            found = replace(found, sizes=self._valid(found.slots, ask))
            self._sizes_of = about
        return found

    def _valid(self, slots: int, ask: Callable[[Request[JsonText]], JsonText]) -> frozenset[int]:
        """Sizes that the coordinator would give, by dry runs."""
        least, most = self.file.devices
        found = set()
        for size in sizes_of(min(most, slots), self._per_host):
            if size < least:
                continue
            try:
                answer = ask(Scale(size, None, None, dry_run=True, job=self.file.job)).value()
            except AnswerError:  # no layout
                continue
            found.add(sum(answer["workers"].values()))
        return frozenset(found)

    def _folder(self) -> Path:
        folder = Path(self.file.store_dir) if self.file.store_dir else default_store_dir()
        return folder / self.file.job

    def _way(self) -> tuple[Address, bytes]:
        """Address and key of the coordinator. Raises ``PeerError``: there is none."""
        if self.file.coordinator:
            return split_endpoint(self.file.coordinator), self._token()
        if self.file.lease:
            entry = open_register(self.file.lease, self.file.job).newest()
            if entry is None or entry.is_over or not entry.host:
                raise PeerError(f"nobody holds {self.file.lease}.")
            return entry.address, self._token()
        card = read_card(self._folder())
        if card is None:
            raise PeerError(f"no job {self.file.job!r} runs here (looked in {self._folder()}).")
        return card

    def _token(self) -> bytes:
        assert self.file.token_file is not None
        try:
            secret = Path(self.file.token_file).read_text().strip()
        except (OSError, ValueError) as error:
            raise PeerError(f"its token cannot be read: {error}") from error
        if len(secret) < TOKEN_CHARACTERS:
            raise PeerError(f"{self.file.token_file} has less than {TOKEN_CHARACTERS} characters.")
        if self._key[0] != secret:
            self._key = secret, job_key(secret, self.file.job)
        return self._key[1].encode()


def _over(seen: Seen, code: int, reason: str) -> Seen:
    return replace(seen, ending=f"exit code {code}: {reason}", is_resumable=code == RESUMABLE)


def _closed(channel: Channel | None) -> Channel | None:
    """Close a connection. Returns None: there is none then."""
    if channel is not None:
        with contextlib.suppress(ScalaiError, OSError):
            channel.close()
    return None


class Problems:
    """What goes wrong, said once, and its end."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def note(self, what: str, text: str = "") -> None:
        """Say a problem of something, or without a text that there is none now."""
        if text and what not in self._said:
            log.warning("event=problem what=%r %s", what, text)
            self._said.add(what)
        elif not text and what in self._said:
            log.info("event=problem_over what=%r", what)
            self._said.remove(what)


State = Literal["runs", "waits", "silent", "ended"]


@dataclass(frozen=True, slots=True)
class Known:
    """A job at a look."""

    file: JobFile
    seen: Seen
    state: State


class Jobs:
    """The jobs of a folder, and a watch over each.

    Args:
        folder: The jobs' files.
        per_host: Devices of a host; None: as many as a job has.
        asks_sizes: As ``JobWatch``.
        check: Raises ``UsageError`` for a file that does not do.
    """

    def __init__(
        self, folder: Path, per_host: int | None, problems: Problems, *, asks_sizes: bool,
        check: Callable[[JobFile], object] = lambda file: None,
    ) -> None:  # fmt: skip
        self._folder, self._per_host, self._asks_sizes = folder, per_host, asks_sizes
        self._problems, self._check = problems, check
        self._watches: dict[str, JobWatch] = {}
        self._began = time.time()
        self._new: set[str] = set()
        """Jobs whose file came while this process ran."""
        self._has_looked = False

    def __getitem__(self, name: str) -> JobWatch:
        return self._watches[name]

    def look(self) -> Mapping[str, Known]:
        """Read the files, and what the watches have heard."""
        try:
            paths = {path.stem: path for path in sorted(self._folder.glob("*.toml"))}
            self._problems.note("jobs")
        except OSError as error:
            self._problems.note("jobs", f"{self._folder} cannot be read: {error}")
        else:
            for name in self._watches.keys() - paths.keys():
                self._watches.pop(name).close()
            for name, path in paths.items():
                self._take(name, path)
            self._has_looked = True
        return {name: self._known(watch) for name, watch in self._watches.items()}

    def _take(self, name: str, path: Path) -> None:
        """Watch a job by its file; one that cannot be read keeps its former content."""
        watch = self._watches.get(name)
        try:
            if watch is not None and path.stat().st_mtime == watch.file.at:
                return
            file = read_job(path)
            self._check(file)
            self._problems.note(f"file {name}")
        except (UsageError, OSError) as error:
            self._problems.note(f"file {name}", f"{error} What was read before counts.")
            return
        if watch is not None:
            watch.close()
        elif self._has_looked:
            self._new.add(name)
        per_host = self._per_host or file.devices[1]
        self._watches[name] = JobWatch(file, per_host, asks_sizes=self._asks_sizes)

    def _known(self, watch: JobWatch) -> Known:
        seen, text = watch.seen, ""
        state: State = "waits"
        if seen.ending and not seen.is_resumable:
            state = "ended"
        elif seen.status is not None and not seen.ending:
            state = "silent" if seen.problem else "runs" if seen.workers else "waits"
        if state == "silent":
            since = time.strftime("%H:%M:%S", time.localtime(seen.since))
            text = (
                f"it has not answered since {since} and keeps its {seen.devices} devices: "
                f"{seen.problem} Remove its file if it has ended."
            )
        self._problems.note(f"job {watch.file.name}", text)
        return Known(watch.file, seen, state)

    @property
    def waits_for(self) -> list[str]:
        """Jobs without a first answer that may hold devices."""
        if time.time() - self._began > GRACE_S:
            return []
        seen = {name: watch.seen for name, watch in self._watches.items()}
        return [
            name
            for name, each in seen.items()
            if each.status is None and not each.ending and not (name in self._new and each.tries)
        ]

    def close(self) -> None:
        for watch in self._watches.values():
            watch.close()
