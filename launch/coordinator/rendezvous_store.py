"""The rendezvous of a round's workers: torch's TCPStore, a new one per round against stale keys. A
process of its own serves the stores.

It listens on the coordinator's interface alone, without protection: anybody with access to the
interface may read and write the keys. It outlives a killed coordinator while workers are connected.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from scalai.core.errors import PeerError
from scalai.core.job.deadlines import STORE_READY_S
from scalai.core.jsonable import Json
from scalai.launch import host_signals
from scalai.runtime.connections import ANY_PORT, listen_at
from scalai.runtime.processes import without_collections

Then = Callable[[int | PeerError], object]
"""Gets the port of an open store, or the error."""
OPEN_S = 30.0
SAID_S = 2.0
"""Wait for the process before it is logged, in seconds."""
ENDED_S = 1.0
"""Time for a killed process to be gone, in seconds."""
READY, ANSWER = "ready", "rendezvous store: "
LINGER_S = 10.0
LINGER_MOST_S = 7 * 86400.0
"""Longest life of a process with connections of lost hosts, in seconds."""
_ESTABLISHED = "01"


class RendezvousStores:
    """The coordinator's end: opens and closes stores. Any thread may call it, and none waits: the
    process imports torch first, and may stop or die at any time.

    Args:
        interface: Address of the stores.
        linger_s: Life of the process without coordinator and clients, in seconds: workers may be
            about to connect.
        open_s: Time for a ready process to open a store, in seconds; then another process is asked.
        ports: Ports to choose free ones from.

    Attributes:
        process: Serves the stores at present.
    """

    def __init__(
        self,
        interface: str,
        say: Callable[[str], None],
        linger_s: float = LINGER_S,
        open_s: float = OPEN_S,
        ports: range = ANY_PORT,
    ) -> None:
        self._interface, self._say, self._linger_s = interface, say, linger_s
        self._open_s, self._range = open_s, ports
        self._requests = queue.SimpleQueue[Then | int | None]()
        """Receivers of stores to open, ports of stores to close; None: the job has ended."""
        self._begin()
        self._thread = threading.Thread(target=self._serve, name="stores", daemon=True)
        self._thread.start()

    def wait_ready(self) -> None:
        """Wait until a store can be opened at once, or not at all."""
        self._ready.wait(STORE_READY_S)

    def open(self, then: Then) -> None:
        """Open a store; ``then`` gets its port or the error. Its own thread calls it without locks;
        it must not raise. If the process has died or is silent, another one is asked, once."""
        self._requests.put(then)

    def close(self, port: int) -> None:
        """Close a store without workers."""
        self._requests.put(port)

    def end(self) -> None:
        """Close all stores at the end of the job."""
        self._requests.put(None)
        self._thread.join(ENDED_S)  # a slower process ends by itself

    def _begin(self) -> None:
        module = "scalai.launch.coordinator.rendezvous_store"
        ports = map(str, (self._range.start, self._range.stop))
        with host_signals.blocked():
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, self._interface, str(self._linger_s), *ports],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        self._ready = threading.Event()
        self._answers: queue.Queue[Json] = queue.Queue()
        threading.Thread(
            target=_read, args=(self.process, self._ready, self._answers), daemon=True
        ).start()

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            if isinstance(request, int):
                self._tell({"do": "close", "port": request})
            else:
                request(self._opened())
        self._tell({"do": "end"})
        self._hang_up()

    def _opened(self) -> int | PeerError:
        try:
            return self._port()
        except PeerError as error:
            return error
        except Exception as error:  # such as no memory, or ``ulimit``
            return self._refused(repr(error))

    def _port(self) -> int:
        answer = {"gone": "its process had ended"}
        if self.process.poll() is None:
            answer = self._ask({"do": "open"})
        if "gone" in answer:
            self._say(f"event=store_restarted: {answer['gone']}")
            self._hang_up()
            self._begin()
            answer = self._ask({"do": "open"})
        if "port" in answer:
            return int(answer["port"])
        raise self._refused(answer.get("error") or answer["gone"])

    def _refused(self, why: str) -> PeerError:
        return PeerError(
            f"the workers' rendezvous store cannot be opened at {self._interface}: {why}"
        )

    def _tell(self, request: Json) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except (OSError, ValueError):
            pass  # it has died, or was closed: ``open`` begins another

    def _hang_up(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has died: its last requests are lost
            self.process.stdin.close()

    def _ask(self, request: Json) -> Json:
        if not self._ready.wait(SAID_S):
            self._say(
                f"event=waiting for process {self.process.pid}, the workers' rendezvous store: it "
                "imports torch. The next workers start once it has"
            )
            self._ready.wait(STORE_READY_S)
        self._tell(request)
        try:
            return self._answers.get(timeout=self._open_s)
        except queue.Empty:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(ENDED_S)
            return {"gone": f"its process did not answer for {self._open_s:.0f} s"}


def _read(
    process: "subprocess.Popen[str]", ready: threading.Event, answers: "queue.Queue[Json]"
) -> None:
    """Pass on the process's answers until it ends; the first one says ready. Other lines (as of a
    ``sitecustomize``) are ignored."""
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            if line.startswith(ANSWER):
                answers.put(json.loads(line.removeprefix(ANSWER)))
            elif line.strip() == READY:
                ready.set()
    code = process.wait()
    ready.set()
    answers.put({"gone": f"its process has ended with exit code {code}"})


# ---------------------------------------------------------------------- the process


class OpenStores:
    """The open stores by port, and a spare one for the next round.

    Args:
        make: Makes a store, with a port.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._open: dict[int, Any] = {}
        self._spare = make()

    def open(self) -> int:
        store, self._spare = self._spare, None
        store = store or self._make()
        self._open[store.port] = store
        return int(store.port)

    def prepare(self) -> None:
        """Make the next store early. A failure is retried on demand: workers are connected to the
        open ones."""
        with contextlib.suppress(OSError, RuntimeError):
            self._spare = self._spare or self._make()

    def close(self, port: int) -> None:
        self._open.pop(port, None)

    def clients(self) -> int:
        """Number of others' connections to the open stores."""
        # Each store has one of this process's own.
        return max(0, connections(self._open) - len(self._open))


def _make(interface: str, ports: range) -> Any:
    from torch.distributed import TCPStore  # not in its __all__

    listener = listen_at(interface, 0, ports, backlog=2048)
    return TCPStore(
        interface,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(minutes=10),
        master_listen_fd=listener.detach(),
    )


def connections(ports: Iterable[int]) -> int:
    """Number of established connections to these ports of this machine."""
    wanted = {f"{port:04X}" for port in ports}
    found = 0
    for name in ("tcp", "tcp6"):
        path = Path("/proc/self/net", name)
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            _, local, _, state, *_ = line.split()
            found += state == _ESTABLISHED and local.rpartition(":")[2] in wanted
    return found


def main() -> None:
    """Serve stores at an interface, on requests of standard input, until told to end, or without
    coordinator and clients."""
    host_signals.ignore()
    interface, linger_s, *ports = sys.argv[1:]
    with without_collections():
        stores = OpenStores(partial(_make, interface, range(*map(int, ports))))  # imports torch
    _say(READY)
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "end":
            os._exit(0)
        elif request["do"] == "close":
            stores.close(request["port"])
        else:
            try:
                answer: Json = {"port": stores.open()}
            except (OSError, RuntimeError) as error:
                answer = {"error": str(error)}
            _say(ANSWER + json.dumps(answer))
            stores.prepare()
    _linger(stores, float(linger_s))
    os._exit(0)


def _say(text: str) -> None:
    """Answer the coordinator; after its death, standard input ends as well."""
    with contextlib.suppress(BrokenPipeError):
        print(text, flush=True)


def _linger(stores: OpenStores, linger_s: float) -> None:
    """Stay while workers are connected, or may soon be."""
    began = quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < linger_s and time.monotonic() - began < LINGER_MOST_S:
        time.sleep(min(1.0, linger_s / 4))
        if stores.clients():
            quiet_since = time.monotonic()


if __name__ == "__main__":
    main()
