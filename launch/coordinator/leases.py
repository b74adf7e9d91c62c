"""Who may be the coordinator of a job: a register that all hosts reach says it, a folder
(``file:DIR``) or etcd (``etcd:http://HOST:PORT``).

Coordinators are numbered. Whoever wants to be the next one claims its number, its *term*, which one
alone can do, and renews what the register says of it. Others follow the highest term. A holder that
cannot renew in time ends itself before anybody may claim the next one, unless it hears all of its
hosts; whoever watches measures by its own clock that nothing was renewed, so clocks need not agree.

The folder of a job in ``--durable-dir`` has such a register too: it says which run *owns* what lies
there. Another run is refused as long as it is renewed.
"""

import base64
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from scalai.core.errors import PeerError, RefusedError, StoreError, UsageError
from scalai.store.lock import Owner
from scalai.store.secure import DURABLE, Folder, open_below

LEASE_S = 15.0
"""A lease that was not renewed for so long may be claimed."""
RENEW_S = LEASE_S / 5
HURRY_S = 0.05
"""How soon again where its register is changing."""
HELD_S = LEASE_S * 2 / 3
"""A holder that has not renewed for so long ends itself."""
ASK_S = 4.0
"""How long etcd may take to answer."""
LOOK_S = 0.5
NO_LEASE = "none"
"""Nothing says which coordinator the job has."""
LEASE_FLAG = "--coordinator-lease"
TRIES = 5
"""How often a folder is looked at whose entries change just then."""
NOT_RENEWED = "it was not renewed in time."
OWNER = "owner-"
"""How the files of a folder's register begin."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """What a register says of the newest coordinator.

    Attributes:
        term: Its number.
        host, port: Where it listens; "" where the entry is torn.
        beat: Changes each time it is renewed.
        is_over: The job has ended, or its coordinator has left without a successor.
        run: The run of the job, as names of its snapshots have it.
        machine: Name of its machine.
        process: What tells on that machine whether its process lives (``Owner``).
    """

    term: int
    host: str
    port: int
    beat: int = 0
    is_over: bool = False
    run: str = ""
    machine: str = ""
    process: str = ""

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port

    def of_this_process(self) -> "Entry":
        """Return it with the name of this machine and process."""
        process = json.dumps(asdict(Owner.of_this_process()))
        return replace(self, machine=socket.gethostname(), process=process)

    def has_died(self) -> bool:
        """Whether its process is known to be dead: it was one of this machine."""
        try:
            return Owner(**json.loads(self.process)).has_died_here()
        except (ValueError, TypeError):
            return False

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
                *(str(found.get(name, "")) for name in ("run", "machine", "process")),
            )  # fmt: skip
        except (KeyError, TypeError, AttributeError) as error:
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
    """Entries as files of a folder that all hosts reach. A link makes one of a term, once; a beat
    is a file's time of change, which needs no room on a full disk.

    Args:
        root: The folder above that of the job.
        flag: By which a person chooses another one.
        is_alone: Nobody takes its holder's place by it.
    """

    is_changing = False

    def __init__(
        self, root: Path, job: str, flag: str = LEASE_FLAG, *, is_alone: bool = False
    ) -> None:
        self._root, self._job, self._flag = root, job, flag
        self.is_alone = is_alone
        self._torn = ""

    def newest(self) -> Entry | None:
        """Return the entry of the highest term. A torn one has no address: its holder writes it
        anew, and where nobody renews it the next term may be claimed."""
        with self._open("read") as folder:
            for _ in range(TRIES):
                names = _terms(folder)
                with suppress(FileNotFoundError):  # a later one was claimed meanwhile
                    return self._read(folder, names[-1]) if names else None
            raise StoreError(f"{names[-1]} is listed and is not there.")

    def claim(self, entry: Entry) -> bool:
        mine = f".{OWNER}claim-{secrets.token_hex(8)}"
        with self._open("claimed") as folder:
            try:
                folder.write(mine, entry.to_text().encode(), is_durable=True)
                os.link(
                    mine, _name(entry.term), src_dir_fd=folder.descriptor,
                    dst_dir_fd=folder.descriptor,
                )  # fmt: skip
                os.fsync(folder.descriptor)
            except FileExistsError:
                return False
            finally:
                folder.remove(mine)
            *older, newest = _terms(folder)
            if newest != _name(entry.term):  # whoever has that removes older ones
                folder.remove(_name(entry.term))
                return False
            for name in older:
                folder.remove(name)
            return True

    def renew(self, entry: Entry) -> None:
        """Show that the holder lives; write the entry anew where it is not as it should be."""
        name = _name(entry.term)
        with self._open("renewed") as folder:
            descriptor = folder.open_file(name, os.O_RDWR)
            with os.fdopen(descriptor, "rb") as file:
                before = os.fstat(descriptor).st_mtime_ns
                os.utime(descriptor)
                has_changed = os.fstat(descriptor).st_mtime_ns != before
                is_same = _is_same(file.read(), entry)
            if not has_changed or not is_same:
                folder.write(name, entry.to_text().encode(), is_durable=True)
                self._torn = ""

    def _read(self, folder: Folder, name: str) -> Entry:
        descriptor = folder.open_file(name, os.O_RDONLY)
        with os.fdopen(descriptor, "rb") as file:
            beat = os.fstat(descriptor).st_mtime_ns
            try:
                found = Entry.of_text(file.read())
                self._torn = ""
                return replace(found, beat=beat)
            except ValueError as error:
                if self._torn != name:
                    self._torn = name
                    log.warning(
                        "event=torn_lease %s is no entry (%s): a power cut, or a full disk? Its "
                        "holder writes it anew; without one the next term is claimed after %.0f s.",
                        folder.path / name, error, LEASE_S,
                    )  # fmt: skip
                return Entry(_term_of(name), "", 0, beat)

    @contextmanager
    def _open(self, what: str) -> Iterator[Folder]:
        try:
            with open_below(self._root, self._job, make=True, flag=self._flag) as folder:
                yield folder
        except (OSError, StoreError) as error:
            where = self._root / self._job
            raise PeerError(f"the lease in {where} cannot be {what}: {error}") from error


def _name(term: int) -> str:
    return f"{OWNER}{term:012d}.json"


def _term_of(name: str) -> int:
    return int(name.removeprefix(OWNER).removesuffix(".json"))


def _terms(folder: Folder) -> list[str]:
    """Return the names of a folder's entries, the highest term last."""
    names = os.listdir(folder.descriptor)
    return sorted(name for name in names if re.fullmatch(rf"{OWNER}\d{{12}}\.json", name))


def _is_same(text: bytes, entry: Entry) -> bool:
    try:
        return replace(Entry.of_text(text), beat=entry.beat) == entry
    except ValueError:
        return False


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


def open_ownership(lease: str | None, durable: Path | None, job: str) -> FolderRegister | None:
    """Return the register that says which run owns what ``job`` has in its durable directory. None:
    it has no such directory, or its ``--coordinator-lease`` lies there and says it."""
    kind, _, place = (lease or "").partition(":")
    if durable is None or (kind == "file" and os.path.realpath(place) == os.path.realpath(durable)):
        return None
    return FolderRegister(durable, job, DURABLE, is_alone=True)


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


def await_ownership(register: Register, root: Path, job: str) -> int:
    """Wait until a run that has died is known to be dead, where one owns what ``job`` has in the
    durable directory ``root``. Returns the newest term there.

    Raises:
        RefusedError: That run lives.
        PeerError: The directory cannot be reached.
    """
    watch, first = Watch(register), None
    while True:
        entry, unchanged_s = watch.look()
        if entry is None or entry.is_over or entry.has_died() or unchanged_s > LEASE_S:
            return 0 if entry is None else entry.term
        if first is None:
            first = entry
            log.info("event=waiting up to %.0f s, to see whether %s lives", LEASE_S, _named(entry))
        elif entry != first:
            raise RefusedError(
                f"--durable-dir {root} is in use by {_named(entry)}, which has shown that it lives "
                f"{unchanged_s:.0f} s ago. Two runs of one job would go on from each other's "
                "states. Stop that one, or give this one another --job."
            )
        time.sleep(LOOK_S)


def _named(entry: Entry) -> str:
    where = f"{entry.host}:{entry.port}" if entry.host else "an unknown address (its file is torn)"
    return (
        f"run {entry.run or 'unknown'} of this job (coordinator {entry.term}, on machine "
        f"{entry.machine or 'unknown'} at {where})"
    )


class Lease:
    """A coordinator's own lease, renewed by a thread. Any thread may ask ``is_held``.

    Args:
        register: Where it is.
        entry: What it says; its term is claimed here.
        run: Tells the run of the job; "" as long as its agents have yet to bring it.
        waits_over: Do not claim now: the thread does, once the register answers, and at once over
            an entry of this run of at most this term, whose holder is known to be gone. Nobody
            waits for it.

    Raises:
        UsageError: Somebody else has claimed that term.
        PeerError: The register cannot be reached.
    """

    def __init__(
        self,
        register: Register,
        entry: Entry,
        run: Callable[[], str] = lambda: "",
        *,
        waits_over: int | None = None,
    ) -> None:
        self._register, self._entry, self._run = register, entry.of_this_process(), run
        self._entry = replace(self._entry, run=run())
        self._over, self._watch = waits_over, Watch(register)
        self._rival: Entry | None = None
        """Who has what is to be claimed, and may live; or who has superseded this one."""
        self.renewed_at, self.is_superseded = time.monotonic(), False
        """When it was renewed last; whether a later coordinator has it."""
        self._ended, self._writing = threading.Event(), threading.Lock()
        self._due = threading.Event()
        self.problem = NOT_RENEWED
        """Why it was not renewed last."""
        if waits_over is None and not register.claim(self._entry):
            raise UsageError(f"another coordinator has claimed term {entry.term} of the job.")
        threading.Thread(target=self._keep, name="lease", daemon=True).start()

    def is_fresh(self) -> bool:
        """Whether it was renewed so lately that nobody else can have claimed it."""
        is_renewed = self._over is None and time.monotonic() - self.renewed_at < HELD_S
        return is_renewed and not self.is_superseded

    def is_held(self) -> bool:
        """Whether no other coordinator can have the lease."""
        return self.is_fresh() or (self._register.is_alone and not self.is_superseded)

    @property
    def has_another_run(self) -> bool:
        """Whether a further run of the job has superseded this one, and no coordinator of its
        own."""
        theirs, own = self._rival.run if self._rival else "", self._run()
        return self.is_superseded and "" not in (theirs, own) and theirs != own

    @property
    def is_alone(self) -> bool:
        """Whether no other machine can have it."""
        return self._register.is_alone

    @property
    def may_hang(self) -> bool:
        """Whether a register that does not answer says nothing of the holder: a folder or etcd, and
        no majority of the job's own hosts."""
        return isinstance(self._register, FolderRegister | EtcdRegister)

    def end(self, *, is_over: bool) -> None:
        """Renew no more; ``is_over``: the job has ended, and nobody is to follow."""
        self._ended.set()
        self._due.set()
        if is_over and self._over is None and not self.is_superseded:
            last = threading.Thread(target=self._leave, name="lease-end", daemon=True)
            last.start()
            last.join(3 * ASK_S)  # a disk that hangs keeps nobody

    def _leave(self) -> None:
        with self._writing:
            try:
                self._register.renew(replace(self._entry, beat=-1, is_over=True))
            except PeerError as error:
                log.warning("event=lease_left %s", error)

    def hurry(self) -> None:
        """Renew at once."""
        self._due.set()

    def _is_over(self) -> bool:
        """Wait until it should be renewed. Returns whether it should not any more."""
        self._due.wait(HURRY_S if self._register.is_changing else RENEW_S)
        self._due.clear()
        return self._ended.is_set()

    def _keep(self) -> None:
        is_over = self._over is None and self._is_over()
        while not is_over and not self.is_superseded:
            began = time.monotonic()
            try:
                if self._over is None:
                    self._renew(began)
                else:
                    self._take(self._over)
            except PeerError as error:
                if self.problem != str(error):  # said once, however long it lasts
                    log.warning("event=lease_not_renewed %s", error)
                self.problem = str(error)
            is_over = self._is_over()

    def _take(self, over: int) -> None:
        """Claim what is known to be nobody's any more."""
        newest, unchanged_s = self._watch.look()
        run = self._run()
        is_left = newest is None or newest.is_over or newest.has_died()
        if newest is not None and newest.term <= over:
            # A run may not have its name yet; what is torn has no address either.
            is_left |= not newest.host or "" != newest.run == run
        if newest is not None and not is_left and unchanged_s <= LEASE_S:
            was_renewed = self._rival not in (None, newest)
            self._rival = newest
            if was_renewed and run:  # else it may be of this run
                self._lose_to(newest)
            return
        term = max(self._entry.term, 0 if newest is None else newest.term + 1)
        self._entry = replace(self._entry, term=term, run=run)
        if self._register.claim(self._entry):
            self._over, self.renewed_at = None, time.monotonic()

    def _renew(self, began: float) -> None:
        newest = self._register.newest()
        if newest is not None and newest.term > self._entry.term:
            self._lose_to(newest)
            return
        self._entry = replace(self._entry, beat=self._entry.beat + 1, run=self._run())
        with self._writing:
            if not self._ended.is_set():
                if newest is None or newest.term < self._entry.term:
                    self._register.claim(self._entry)  # it was removed, or its folder was
                else:
                    self._register.renew(self._entry)
        self.renewed_at, self.problem = began, NOT_RENEWED

    def _lose_to(self, newest: Entry) -> None:
        self.problem = f"coordinator {newest.term} has it: {_named(newest)}."
        self._rival, self.is_superseded = newest, True
