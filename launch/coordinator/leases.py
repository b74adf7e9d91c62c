"""Who may be the coordinator of a job on several hosts: a register that all of them reach says it,
a folder (``file:DIR``) or etcd (``etcd:http://HOST:PORT``).

Coordinators are numbered. Whoever wants to be the next one claims its number, its *term*, which one
alone can do, and renews what the register says of it. Others follow the highest term. A holder that
cannot renew in time ends itself before anybody may claim the next one; whoever watches measures by
its own clock that nothing was renewed, so clocks need not agree.
"""

import base64
import json
import logging
import os
import re
import secrets
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from scalai.core.errors import PeerError, StoreError, UsageError
from scalai.store.secure import Folder, open_below

LEASE_S = 15.0
"""A lease that was not renewed for so long may be claimed."""
RENEW_S = LEASE_S / 5
HURRY_S = 0.05
"""How soon again where its register is changing."""
HELD_S = LEASE_S * 2 / 3
"""A holder that has not renewed for so long ends itself."""
ASK_S = 4.0
"""How long etcd may take to answer."""
NO_LEASE = "none"
"""Nothing says which coordinator the job has."""
KEPT = 3
"""Terms that stay in a folder."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """What a register says of the newest coordinator: its term, where it listens, how often it has
    renewed that, and whether the job is over."""

    term: int
    host: str
    port: int
    beat: int = 0
    is_over: bool = False

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str | bytes) -> "Entry":
        """Read what ``to_text`` wrote. Raises ``ValueError`` where it is something else."""
        try:
            found = json.loads(text)
            return cls(
                int(found["term"]), str(found["host"]), int(found["port"]), int(found["beat"]),
                bool(found["is_over"]),
            )  # fmt: skip
        except (KeyError, TypeError) as error:
            raise ValueError(f"{text!r} is no entry of a lease") from error


class Register(Protocol):
    """Where entries are. Every call raises ``PeerError`` where it cannot be reached, and returns
    within seconds, unless a file system hangs."""

    @property
    def is_changing(self) -> bool:
        """Whether its holder should renew again at once."""

    @property
    def is_alone(self) -> bool:
        """Whether its holder keeps it without renewing it: nobody else can claim it."""

    def newest(self) -> Entry | None:
        """Return the entry of the highest term."""

    def claim(self, entry: Entry) -> bool:
        """Write a first entry of a term; False: somebody has."""

    def renew(self, entry: Entry) -> None:
        """Replace the entry of this holder's own term."""


class FolderRegister:
    """Entries as files of a folder that all hosts reach. A link makes one of a term, once."""

    is_changing = is_alone = False

    def __init__(self, root: Path, job: str) -> None:
        self._root, self._job = root, job

    def newest(self) -> Entry | None:
        try:
            with self._open() as folder:
                names = sorted(_terms(folder), reverse=True)
                return Entry.of_text(folder.read(names[0])) if names else None
        except (OSError, StoreError, ValueError) as error:
            raise PeerError(f"the lease in {self._root} cannot be read: {error}") from error

    def claim(self, entry: Entry) -> bool:
        mine = f"claim-{secrets.token_hex(8)}"
        try:
            with self._open() as folder:
                folder.write(mine, entry.to_text().encode())
                try:
                    os.link(
                        mine, _name(entry.term), src_dir_fd=folder.descriptor,
                        dst_dir_fd=folder.descriptor,
                    )  # fmt: skip
                except FileExistsError:
                    return False
                finally:
                    folder.remove(mine)
                for name in sorted(_terms(folder))[:-KEPT]:
                    folder.remove(name)
                return True
        except (OSError, StoreError) as error:
            raise PeerError(f"the lease in {self._root} cannot be claimed: {error}") from error

    def renew(self, entry: Entry) -> None:
        try:
            with self._open() as folder:
                folder.write(_name(entry.term), entry.to_text().encode())
        except (OSError, StoreError) as error:
            raise PeerError(f"the lease in {self._root} cannot be renewed: {error}") from error

    def _open(self) -> Folder:
        return open_below(self._root, self._job, make=True)


def _name(term: int) -> str:
    return f"term-{term:012d}.json"


def _terms(folder: Folder) -> list[str]:
    names = os.listdir(folder.descriptor)
    return [name for name in names if re.fullmatch(r"term-\d{12}\.json", name)]


class EtcdRegister:
    """Entries as keys of etcd 3.4 or later, by its JSON gateway (``/v3/kv``: etcd's
    ``api_grpc_gateway``)."""

    is_changing = is_alone = False

    def __init__(self, url: str, job: str) -> None:
        self._url, self._prefix = url.rstrip("/"), f"/scalai/{job}/term-"

    def newest(self) -> Entry | None:
        found = self._ask(
            "range",
            {
                "key": _coded(self._prefix),
                "range_end": _coded(self._prefix[:-1] + chr(ord("-") + 1)),
                "sort_order": "DESCEND", "sort_target": "KEY", "limit": 1,
            },
        )  # fmt: skip
        keys = found.get("kvs") or []
        try:
            return Entry.of_text(base64.b64decode(keys[0]["value"])) if keys else None
        except (ValueError, KeyError, TypeError) as error:
            raise PeerError(f"the lease at {self._url} cannot be read: {error}") from error

    def claim(self, entry: Entry) -> bool:
        key = _coded(self._key(entry.term))
        put = {"requestPut": {"key": key, "value": _coded(entry.to_text())}}
        unmade = {"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        found = self._ask("txn", {"compare": [unmade], "success": [put]})
        return bool(found.get("succeeded"))

    def renew(self, entry: Entry) -> None:
        values = {"key": _coded(self._key(entry.term)), "value": _coded(entry.to_text())}
        self._ask("put", values)

    def _key(self, term: int) -> str:
        return f"{self._prefix}{term:012d}"

    def _ask(self, what: str, content: Mapping[str, Any]) -> Mapping[str, Any]:
        address = f"{self._url}/v3/kv/{what}"
        asked = urllib.request.Request(address, data=json.dumps(content).encode())
        try:
            with urllib.request.urlopen(asked, timeout=ASK_S) as answer:
                found = json.loads(answer.read())
        except (OSError, ValueError, urllib.error.URLError) as error:
            raise PeerError(f"etcd at {self._url} does not answer: {error}") from error
        if not isinstance(found, dict):
            raise PeerError(f"etcd at {self._url} answers {found!r}")
        return found


def _coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def open_register(lease: str | None, job: str) -> Register | None:
    """Return the register outside of a job that ``--coordinator-lease`` names; None: it names none.

    Raises:
        UsageError: It names none.
    """
    if lease in (None, NO_LEASE):
        return None
    assert lease is not None
    kind, _, place = lease.partition(":")
    if kind == "file" and place.startswith("/"):
        return FolderRegister(Path(place), job)
    if kind == "etcd" and re.match(r"https?://[^/]+/?$", place):
        return EtcdRegister(place, job)
    raise UsageError(
        f"--coordinator-lease {lease!r} is neither vote, which three hosts or more can, nor "
        "file:/FOLDER, which all hosts reach, nor etcd:http://HOST:PORT, nor none."
    )


class Watch:
    """Whether the lease is renewed, by the clock of whoever looks."""

    def __init__(self, register: Register, clock: Callable[[], float] = time.monotonic) -> None:
        self._register, self._clock = register, clock
        self.mutex = threading.Lock()
        """Held while the register is asked: it is for one thread at a time."""
        self._seen: tuple[Entry | None, float] | None = None

    def look(self) -> tuple[Entry | None, float]:
        """Return the newest entry, and for how many seconds it is known to be as it is. Raises
        ``PeerError`` where the register cannot be reached; that time counts for nobody."""
        with self.mutex:
            try:
                entry = self._register.newest()
            except PeerError:
                self._seen = None
                raise
            now = self._clock()
            if self._seen is None or self._seen[0] != entry:
                self._seen = entry, now
            return entry, now - self._seen[1]


class Lease:
    """A coordinator's own lease, renewed by a thread. Any thread may ask ``is_held``.

    Args:
        register: Where it is.
        entry: What it says; its term is claimed here.

    Raises:
        UsageError: Somebody else has claimed that term.
        PeerError: The register cannot be reached.
    """

    def __init__(self, register: Register, entry: Entry) -> None:
        self._register, self._entry = register, entry
        self._renewed_at, self._is_superseded = time.monotonic(), False
        self._ended, self._writing = threading.Event(), threading.Lock()
        self._due = threading.Event()
        self.problem = "it was not renewed in time."
        """Why it was not renewed last."""
        if not register.claim(entry):
            raise UsageError(f"another coordinator has claimed term {entry.term} of the job.")
        threading.Thread(target=self._renew, name="lease", daemon=True).start()

    def is_held(self) -> bool:
        """Whether no other coordinator can have the lease."""
        is_renewed = self._register.is_alone or time.monotonic() - self._renewed_at < HELD_S
        return is_renewed and not self._is_superseded

    @property
    def is_alone(self) -> bool:
        """Whether no other machine can have it."""
        return self._register.is_alone

    def end(self, *, is_over: bool) -> None:
        """Renew no more; ``is_over``: the job has ended, and nobody is to follow."""
        self._ended.set()
        self._due.set()
        if not is_over or not self._writing.acquire(timeout=ASK_S):
            return
        try:
            self._register.renew(replace(self._entry, beat=-1, is_over=True))
        except PeerError as error:
            log.warning("event=lease_left %s", error)
        finally:
            self._writing.release()

    def hurry(self) -> None:
        """Renew at once."""
        self._due.set()

    def _is_over(self) -> bool:
        """Wait until it should be renewed. Returns whether it should not any more."""
        self._due.wait(HURRY_S if self._register.is_changing else RENEW_S)
        self._due.clear()
        return self._ended.is_set()

    def _renew(self) -> None:
        while not self._is_over():
            began = time.monotonic()
            try:
                newest = self._register.newest()
                if newest is not None and newest.term > self._entry.term:
                    self.problem = f"coordinator {newest.term} has it."
                    self._is_superseded = True
                    return
                self._entry = replace(self._entry, beat=self._entry.beat + 1)
                with self._writing:
                    if not self._ended.is_set():
                        self._register.renew(self._entry)
                self._renewed_at = began
            except PeerError as error:
                self.problem = str(error)
                log.warning("event=lease_not_renewed %s", error)
