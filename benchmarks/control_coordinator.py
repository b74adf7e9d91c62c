"""The coordinator of the control plane's benchmark: the real one in a process of its own, which
counts what it sends and what it hears."""

import ctypes
import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray, RawValue
from pathlib import Path

from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.calls import CoordinatorRequest, Poll, Tell
from scalai.launch.coordinator.process import expect_many_threads
from scalai.launch.coordinator.rendezvous_store import RendezvousStores, Then
from scalai.launch.coordinator.server import Coordinator
from scalai.runtime.calls import Peer
from scalai.runtime.framing import Buffer, FramedSocket

TOKEN = b"secret of the benchmark"
FORK = multiprocessing.get_context("fork")
REPORTS = (
    "Published", "Sealed", "Committed", "Built", "Prepared", "Arrived", "Stopped", "Stepped",
    "Moved", "Grown", "Restored", "Failed",
)  # fmt: skip
_FRAME_BYTES = 20
"""Of a sealed frame beside its content."""


def die_with_parent() -> None:
    """Have the kernel end this process where the benchmark's own goes."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class NoStores(RendezvousStores):
    """What no worker ever meets at."""

    def __init__(self) -> None:
        self._ports = itertools.count(1)

    def wait_ready(self) -> None: ...

    def open(self, then: Then) -> None:
        then(next(self._ports))

    def close(self, port: int) -> None: ...

    def end(self) -> None: ...


class Counts:
    """What the coordinator's process counts, as others read it."""

    def __init__(self) -> None:
        self.port = RawValue("q", 0)
        self.sent = RawValue("q", 0)
        self.polls = RawValue("q", 0)
        self.lost = RawValue("q", 0)
        self.heard = RawArray("q", len(REPORTS))

    def reports(self) -> Mapping[str, int]:
        """Return how many reports of each kind it has heard."""
        return Counter(dict(zip(REPORTS, self.heard, strict=True)))


class Counting(Coordinator):
    """A coordinator that counts what it is told."""

    counts: Counts

    def handle(self, peer: Peer, request: CoordinatorRequest) -> object:
        answer = super().handle(peer, request)
        if isinstance(request, Tell):
            name = type(request.report.message).__name__
            if name in REPORTS:
                with _MUTEX:
                    self.counts.heard[REPORTS.index(name)] += 1
        elif isinstance(request, Poll):
            with _MUTEX:
                self.counts.polls.value += 1
        return answer


_MUTEX = threading.Lock()


class CoordinatorProcess:
    """The coordinator's process.

    Args:
        spec: The job.
        log: Where its lines go.
    """

    def __init__(self, spec: JobSpec, log: Path) -> None:
        self.counts = Counts()
        self._process: BaseProcess = FORK.Process(
            target=_serve, args=(spec, log, self.counts), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.counts.port.value

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def cpu_s(self) -> float:
        """Return the processor's time that it has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_rss_gb(self) -> float:
        """Return the most memory that it has had resident, in GB (10**9 bytes)."""
        return self._memory_gb("VmHWM")

    def rss_gb(self) -> float:
        """Return the memory that it has resident, in GB."""
        return self._memory_gb("VmRSS")

    def _memory_gb(self, name: str) -> float:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        found = [line.split()[1] for line in lines if line.startswith(name)]
        return int(found[0]) * 1024 / 1e9 if found else 0.0

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.join()


def _serve(spec: JobSpec, log: Path, counts: Counts) -> None:
    die_with_parent()
    _count_sent(counts)
    expect_many_threads()
    with log.open("w", buffering=1) as lines:
        os.dup2(lines.fileno(), sys.stderr.fileno())

        def say(text: str, /, **facts: object) -> None:
            if "event=lost" in text or "it counts as lost" in text:
                counts.lost.value += 1
            lines.write(f"{text}\n")

        Counting.counts = counts
        coordinator = Counting(spec, ("127.0.0.1", 0), TOKEN, say, 600.0, stores=NoStores())
        assert not isinstance(coordinator.address, str)
        counts.port.value = coordinator.address[1]
        os._exit(coordinator.run())


def _count_sent(counts: Counts) -> None:
    """Count the bytes of every frame that this process sends."""
    send = FramedSocket.send

    def counted(framed: FramedSocket, data: Buffer) -> None:
        send(framed, data)
        with _MUTEX:
            counts.sent.value += len(data) + _FRAME_BYTES

    setattr(FramedSocket, "send", counted)  # noqa: B010  # for this process alone
