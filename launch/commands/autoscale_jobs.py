"""The jobs of ``scalai autoscale``: a file each, and a watch over each coordinator.

A watch asks in a thread of its own, so that a silent coordinator delays nobody. All that is known
of a job comes from its coordinator: another autoscaler knows the same after one answer.
"""

import contextlib
import difflib
import logging
import os
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from scalai.core.cluster.allotting import sizes_of
from scalai.core.errors import AbsentError, AnswerError, PeerError, ScalaiError, UsageError
from scalai.core.exit_codes import RESUMABLE
from scalai.core.messages.shared import JsonText, Request
from scalai.launch.commands.job_history import History, merged
from scalai.launch.config.endpoint import (
    TOKEN_CHARACTERS,
    read_card,
    read_ending,
    split_endpoint,
)
from scalai.launch.coordinator.leases import CLAIM_S, LeaseWatch
from scalai.launch.coordinator.next_coordinator import OverError
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
MOST_DEVICES = 999_999
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
    priority: float = 1.0
    engine: str = ""
    at: float = 0.0

    @property
    def place(self) -> tuple[str, str]:
        """Its name, and where its coordinator is looked for: those of one job."""
        return self.job, self.coordinator or self.lease or self.store_dir or ""


_MOST = 1e15
"""Bound of steps and priorities."""
_KEYS = tuple(each.name for each in fields(JobFile) if each.name not in ("name", "at"))


def read_job(path: Path) -> JobFile:
    """Read a job's file. Raises ``UsageError``: it is no such file."""
    try:
        at = path.stat().st_mtime
        with path.open("rb") as file:
            given = tomllib.loads(file.read(MOST_JOB_BYTES).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}.") from error
    for key in given:
        if key in ("batch", "learning_rate"):
            raise UsageError(f"{path}: {key!r}: {CONSTANT}")
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            more = f" Did you mean {near[0]}?" if near else ""
            raise UsageError(f"{path}: {key!r} is none of {', '.join(_KEYS)}.{more}")
    match given.get("devices"):
        case [int(least), int(most)] if 1 <= least <= most <= MOST_DEVICES:
            pass
        case other:
            raise UsageError(f"{path}: devices = {other!r}; expected [least, most], from 1 on.")
    for key, value in given.items():
        match key:
            case "devices":
                continue
            case "asked":
                expected = f"a whole number from {least} to {most}"
                is_right = type(value) is int and least <= value <= most
            case "steps":
                expected = "a whole number from 1 on"
                is_right = type(value) is int and 1 <= value < _MOST
            case "priority":
                expected = "a number above 0"
                is_right = type(value) in (int, float) and 0 < value < _MOST
            case _:
                expected, is_right = "a text", isinstance(value, str)
        if not is_right:
            raise UsageError(f"{path}: {key} = {value!r}; expected {expected}.")
    found = JobFile(
        **{"job": path.stem, "engine": path.stem, "asked": most, **given}
        | {"name": path.stem, "devices": (least, most), "at": at}
    )
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
        is_absent: Nobody is there to answer.
        ending: Its end, as its coordinator or its lease said.
        is_resumable: Its state is saved: it waits for another start.
    """

    status: Mapping[str, Any] | None = None
    at: float = 0.0
    history: History | None = None
    sizes: frozenset[int] | None = None
    problem: str = ""
    since: float = 0.0
    is_absent: bool = False
    ending: str = ""
    is_resumable: bool = False

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
        seen: Knowledge of a former watch over this job.
    """

    def __init__(
        self, file: JobFile, per_host: int, *, asks_sizes: bool, seen: Seen | None = None
    ) -> None:
        self.file, self._per_host, self._asks_sizes = file, per_host, asks_sizes
        self._seen, self._key = seen or Seen(since=time.time()), ("", "")
        self._lease: LeaseWatch | None = None
        self._is_left = False
        """Whether nobody holds the lease."""
        self._sizes_of: object = None
        self._reports_of: object = object()
        self._end = threading.Event()
        threading.Thread(target=self._serve, name=f"watch {file.name}", daemon=True).start()

    @property
    def seen(self) -> Seen:
        """The newest knowledge; one that is too old, or a late first answer, is a silence."""
        found = self._seen
        at = found.since if found.status is None else found.at
        if not found.problem and time.time() - at > SILENT_S:
            return replace(found, problem="its answer is late.", since=at)
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
                self._note(str(error), error)
            except (KeyError, TypeError, ValueError, OSError) as error:  # another version's answer
                channel = _closed(channel)
                self._note(f"its answer cannot be read: {error!r}")
            if self._end.wait(LOOK_S):
                _closed(channel)
                return

    def _note(self, problem: str, error: ScalaiError | None = None) -> None:
        seen, is_over = self._seen, isinstance(error, OverError)
        since = seen.since if seen.problem else time.time()
        by_lease = self.file.lease and not self.file.coordinator
        is_absent = self._is_left if by_lease else isinstance(error, AbsentError)
        seen = replace(seen, problem=problem, since=since, is_absent=is_absent)
        if is_over and seen.status is not None and not seen.ending:
            seen = replace(seen, ending=problem)
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
        found = replace(seen, status=status, at=at, history=history, problem="", ending="")
        if end is not None:
            return _over(found, end["code"], end["reason"])
        hosts = tuple(sorted((host, about["slots"]) for host, about in status["hosts"].items()))
        about = (hosts, mark, len(status["failed_changes"]))
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
        """Address and key of the coordinator.

        Raises:
            AbsentError: There is none.
            OverError: By the lease the job has ended.
            PeerError: Nobody knows.
        """
        if self.file.coordinator:
            return split_endpoint(self.file.coordinator), self._token()
        if self.file.lease:
            self._is_left = False
            if self._lease is None:
                self._lease = LeaseWatch(open_register(self.file.lease, self.file.job))
            entry, unchanged_s = self._lease.look()
            # A lost coordinator's workers train on, and another host takes its place.
            self._is_left = entry is None or entry.is_over or unchanged_s > CLAIM_S
            if entry is None:
                raise AbsentError(f"nobody holds {self.file.lease}.")
            if entry.is_over:
                raise OverError(f"{self.file.lease} says that the job is over.")
            if not entry.host:
                raise PeerError(f"the entry of {self.file.lease} is torn.")
            return entry.address, self._token()
        card = read_card(self._folder())
        if card is None:
            raise AbsentError(f"no job {self.file.job!r} runs here (looked in {self._folder()}).")
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
        self._began = time.monotonic()
        self._new: set[str] = set()
        """Jobs whose file came or changed while this process ran."""
        self._has_looked = False

    def __getitem__(self, name: str) -> JobWatch:
        return self._watches[name]

    def look(self) -> Mapping[str, Known]:
        """Read the files, and what the watches have heard."""
        try:
            names = [name for name in os.listdir(self._folder) if name.endswith(".toml")]
            self._problems.note("jobs")
        except OSError as error:
            self._problems.note("jobs", f"{self._folder} cannot be read: {error}")
        else:
            files = self._files([self._folder / name for name in names])
            for name in self._watches.keys() - files.keys():
                self._watches.pop(name).close()
            for file in files.values():
                self._take(file)
            self._has_looked = True
        return {name: self._known(watch) for name, watch in self._watches.items()}

    def _files(self, paths: Iterable[Path]) -> Mapping[str, JobFile]:
        """The files, of a job each: of two files of one job the later one is refused. One that
        cannot be read keeps its former content."""
        read, problems = dict[str, JobFile](), dict[str, str]()
        for path in sorted(paths):
            name, watch = path.stem, self._watches.get(path.stem)
            problems[name] = ""
            try:
                file = read_job(path)
                self._check(file)
                read[name] = file
            except UsageError as error:
                problems[name] = f"{error} What was read before counts."
                if watch is not None:
                    read[name] = watch.file
        found, owners = dict[str, JobFile](), dict[object, str]()
        for name, file in sorted(read.items(), key=lambda of: (self._is_new(of[1]), of[0])):
            marks = (file.place, file.engine)
            if owner := next((owners[mark] for mark in marks if mark in owners), None):
                problems[name] = (
                    f"{name}.toml and {owner}.toml name one job ({file.job!r}, engine "
                    f"{file.engine!r}): {owner}.toml counts. Remove the other one."
                )
            else:
                found[name] = file
                owners |= dict.fromkeys(marks, name)
        for name, text in problems.items():
            self._problems.note(f"file {name}", text)
        return found

    def _is_new(self, file: JobFile) -> bool:
        """Whether a file says something new, whatever its time."""
        watch = self._watches.get(file.name)
        return watch is None or replace(file, at=watch.file.at) != watch.file

    def _take(self, file: JobFile) -> None:
        """Watch a job by its file. With a new content for the same job, all that is known of it
        stays."""
        if not self._is_new(file):
            return
        seen, watch = None, self._watches.get(file.name)
        if watch is not None:
            watch.close()
            seen = watch.seen if watch.file.place == file.place else None
        if self._has_looked:
            self._new.add(file.name)
        per_host = self._per_host or file.devices[1]
        self._watches[file.name] = JobWatch(file, per_host, asks_sizes=self._asks_sizes, seen=seen)

    def _known(self, watch: JobWatch) -> Known:
        seen, text = watch.seen, ""
        state: State
        if seen.ending:
            state = "waits" if seen.is_resumable else "ended"
        elif seen.status is None:
            state = "waits" if seen.is_absent else "silent"
        else:
            state = "silent" if seen.problem else "runs" if seen.workers else "waits"
        if state == "silent" and seen.problem:
            since = time.strftime("%H:%M:%S", time.localtime(seen.since))
            what = "what it has" if seen.status is None else f"its {seen.devices} devices"
            text = (
                f"it has not answered since {since} and keeps {what}: {seen.problem} Remove its "
                "file if it has ended."
            )
        self._problems.note(f"job {watch.file.name}", text)
        return Known(watch.file, seen, state)

    @property
    def waits_for(self) -> list[str]:
        """Jobs without a first answer that may hold devices: each until it has been asked, and one
        that was there before for ``GRACE_S``."""
        is_young = time.monotonic() - self._began < GRACE_S
        return [
            name
            for name, watch in self._watches.items()
            if (seen := watch.seen).status is None
            and not seen.ending
            and (not seen.problem or (is_young and name not in self._new))
        ]

    def close(self) -> None:
        for watch in self._watches.values():
            watch.close()
