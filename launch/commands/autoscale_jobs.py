"""The jobs of ``scalai autoscale``: a file each, and a watch over each coordinator.

A watch asks in a thread of its own, so that a silent coordinator delays nobody. All that is known
of a job comes from its coordinator: another autoscaler knows the same after one answer.
"""

import contextlib
import difflib
import math
import statistics
import threading
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from scalai.core.cluster.allotting import sizes_of
from scalai.core.cluster.application import Limits
from scalai.core.cluster.question import Asked, ClusterJob, Floats, Standing
from scalai.core.cluster.speeds import Noise, Speeds, first_rates, fit
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
PAUSE_S = 10.0
"""Standstill of a change until one is measured, in seconds."""
SAMPLES = 720_720
"""Samples of a step of any job: devices share them evenly. Only ratios count."""
FEW_STEPS = 3
"""Steps of a stretch that say something about its speed."""
MOST_JOB_BYTES = 1 << 16


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


# ---------------------------------------------------------------------- for the policies


def pause_of(history: History | None) -> float:
    """Usual standstill of a change by choice, in seconds."""
    resizes = () if history is None else history.changes
    found = [each.paused_s for each in resizes if each.paused_s and not each.is_recovery]
    return statistics.median(found) if found else PAUSE_S


def measured(history: History | None) -> Mapping[tuple[int, int], float]:
    """Seconds of a step by (hosts, devices), over all stretches with steps enough."""
    steps, seconds = dict[tuple[int, int], int](), dict[tuple[int, int], float]()
    for each in () if history is None else history.stretches:
        size = len(each.resize.workers), each.resize.ranks
        if each.end is None or each.last is None or each.last - each.first < FEW_STEPS:
            continue
        steps[size] = steps.get(size, 0) + each.last - each.first
        seconds[size] = seconds.get(size, 0.0) + each.end - each.begin
    return {size: seconds[size] / made for size, made in steps.items() if size[1]}


def view(
    file: JobFile,
    seen: Seen,
    now: float,
    per_host: int,
    *,
    most: int,
    is_valid: Callable[[int], bool],
    pending: tuple[int, float] | None = None,
) -> ClusterJob:
    """The job as a policy sees it.

    Args:
        most: Most devices that it can have.
        is_valid: Whether it can have a size.
        pending: A size that was asked for, and the time.
    """
    history = seen.history if seen.workers else None
    resizes = () if history is None else history.resizes
    begun = resizes[0].at - sum(resizes[0].seconds.values()) if resizes else file.at
    stretches = () if history is None else history.stretches
    service = sum(each.resize.ranks * ((each.end or now) - each.begin) for each in stretches)
    since = now - resizes[-1].at if resizes else math.inf
    placement = tuple(seen.workers.values())
    if pending is not None and placement:
        placement, since = (pending[0],), now - pending[1]
    least = min(file.devices[0], most)
    limits = Limits((least, most), (SAMPLES, SAMPLES), (1, SAMPLES))
    asked = Asked(min(max(file.asked, least), most), SAMPLES)
    rates = _rates(history, asked, limits, per_host)
    for size in range(len(rates)):
        if size and size != sum(placement) and not is_valid(size):
            rates[size] = 0.0
    step = seen.status["step"] if seen.status is not None else 0
    return ClusterJob(
        file.name, file.kind, min(file.at, begun), asked, limits,
        Standing(
            placement, max(0.0, now - begun) if placement else 0.0, service,
            len(history.changes) if history is not None else 0, since,
        ),
        rates,
        None if file.steps is None else float(max(0, file.steps - step)), float(step),
        pause_of(history), file.priority,
    )  # fmt: skip


def _rates(history: History | None, asked: Asked, limits: Limits, per_host: int) -> Floats:
    """Steps a second by devices: from the job's own steps, as in the simulator."""
    rows = {
        (hosts, devices, math.ceil(SAMPLES / devices)): (seconds, 0.0)
        for (hosts, devices), seconds in measured(history).items()
        if seconds > 0
    }
    if not rows:
        return np.array(first_rates(asked, limits))
    model = fit(rows, asked, limits, per_host)
    return Speeds(model, Noise(1.0, 0.0, SAMPLES), limits, SAMPLES).rates(per_host)
