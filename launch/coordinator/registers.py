"""Registers of a job's coordinator: a folder reachable by all hosts (the job's in
``--durable-dir``, or ``file:DIR``), etcd (``etcd:http://HOST:PORT``) or a Lease of Kubernetes
(``kubernetes:``).

Coordinators are numbered. Only one can claim a number, its *term*, in a register. A call without an
answer raises ``PeerError`` and proves nothing about the holder (``leases``).
"""

import base64
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import socket
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from scalai.core.errors import PeerError, StoreError, UsageError
from scalai.launch.config.endpoint import join_endpoint
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.api_servers import KubernetesApi, ask_json
from scalai.store.lock import Owner
from scalai.store.secure import DURABLE, Folder, open_below

NO_LEASE = "none"
"""Value of the flag for a job without a register."""
LEASE_FLAG = "--coordinator-lease"
LEASES = f"{LEASE_FLAG} file:/FOLDER, etcd:URL or kubernetes:"
TRIES = 5
"""Tries to read a folder with changing entries."""
OWNER = "owner-"
"""Prefix of the names of a folder's entries."""
NO_LINKS = errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS
"""Errors of a file system without hard links."""
ANNOTATION = "scalai/entry"

log = logging.getLogger(__name__)


class NoLinksError(PeerError):
    """A folder's file system makes no hard links: no exclusive claim is possible there."""


@dataclass(frozen=True, slots=True)
class LeaseEntry:
    """A register's entry of a coordinator.

    Attributes:
        host, port: Its address; "" for a torn entry.
        beat: Value changed by each renewal.
        is_over: The job has ended, or its coordinator has left without a successor.
        run: Run of the job, as in the names of its snapshots.
        machine: Name of its machine.
        process: Identity of its process on the machine (``Owner``).
        named: ``--coordinator`` of its command line.
        is_free: Its holder has left the place to a successor.
    """

    term: int
    host: str
    port: int
    beat: int = 0
    is_over: bool = False
    run: str = ""
    machine: str = ""
    process: str = ""
    named: str = ""
    is_free: bool = False

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port

    def of_this_process(self) -> "LeaseEntry":
        """The entry with the name of this machine and process."""
        process = json.dumps(asdict(Owner.of_this_process()))
        return replace(self, machine=socket.gethostname(), process=process)

    def has_died(self) -> bool:
        """Whether it names a dead process of this machine."""
        try:
            return Owner(**json.loads(self.process)).has_died_here()
        except (ValueError, TypeError):
            return False

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str | bytes) -> "LeaseEntry":
        """Read the text of ``to_text``. Raises ``ValueError`` for any other."""
        try:
            found = json.loads(text)
            names = ("run", "machine", "process", "named")
            run, machine, process, named = (str(found.get(name, "")) for name in names)
            return cls(
                int(found["term"]), str(found["host"]), int(found["port"]), int(found["beat"]),
                bool(found["is_over"]), run, machine, process, named,
                bool(found.get("is_free", False)),
            )  # fmt: skip
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{text!r} is no entry of a lease") from error


class Register(Protocol):
    """A place for entries; ``str`` names it. Every call raises ``PeerError`` for an unreachable
    place, and returns within seconds, unless a file system hangs."""

    def newest(self) -> LeaseEntry | None:
        """Entry of the highest term; a torn one has no address."""

    def claim(self, entry: LeaseEntry) -> bool:
        """Write the first entry of a term; False: it has one."""

    def renew(self, entry: LeaseEntry) -> None:
        """Replace the entry of this holder's own term."""


class FolderRegister:
    """Entries as files of a folder reachable by all hosts. A link makes the entry of a term, once;
    a beat is a file's time of change, for which a full disk has room.

    Args:
        root: Folder above the job's own.
        flag: Option to choose another folder, for messages.
    """

    def __init__(self, root: Path, job: str, flag: str = LEASE_FLAG) -> None:
        self._root, self._job, self._flag = root, job, flag
        self._torn = ""

    def __str__(self) -> str:
        return str(self._root / self._job)

    def newest(self) -> LeaseEntry | None:
        """Entry of the highest term. A torn one has no address: its holder writes it anew; without
        a renewal the next term may be claimed."""
        with self._open("read") as folder:
            for _ in range(TRIES):
                names = _terms(folder)
                with suppress(FileNotFoundError):  # a later one was claimed meanwhile
                    return self._read(folder, names[-1]) if names else None
            raise StoreError(f"{names[-1]} is listed and is not there.")

    def claim(self, entry: LeaseEntry) -> bool:
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
            except OSError as error:
                if error.errno in NO_LINKS:
                    raise NoLinksError(f"{self} makes no hard links: {error.strerror}.") from error
                raise
            finally:
                folder.remove(mine)
            *older, newest = _terms(folder)
            if newest != _name(entry.term):  # its holder removes older ones
                folder.remove(_name(entry.term))
                return False
            for name in older:
                folder.remove(name)
            return True

    def renew(self, entry: LeaseEntry) -> None:
        """Renew the entry; write it anew if its content differs."""
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

    def _read(self, folder: Folder, name: str) -> LeaseEntry:
        descriptor = folder.open_file(name, os.O_RDONLY)
        with os.fdopen(descriptor, "rb") as file:
            beat = os.fstat(descriptor).st_mtime_ns
            try:
                found = LeaseEntry.of_text(file.read())
                self._torn = ""
                return replace(found, beat=beat)
            except ValueError as error:
                if self._torn != name:
                    self._torn = name
                    log.warning(
                        "event=torn_lease %s is no entry (%s): a power cut, or a full disk? Its "
                        "holder writes it anew; without one the next term may be claimed.",
                        folder.path / name, error,
                    )  # fmt: skip
                return LeaseEntry(_term_of(name), "", 0, beat)

    @contextmanager
    def _open(self, what: str) -> Iterator[Folder]:
        try:
            with open_below(self._root, self._job, make=True, flag=self._flag) as folder:
                yield folder
        except (OSError, StoreError) as error:
            raise PeerError(f"the lease in {self} cannot be {what}: {error}") from error


def _name(term: int) -> str:
    return f"{OWNER}{term:012d}.json"


def _term_of(name: str) -> int:
    return int(name.removeprefix(OWNER).removesuffix(".json"))


def _terms(folder: Folder) -> list[str]:
    """Names of a folder's entries, the highest term last."""
    names = os.listdir(folder.descriptor)
    return sorted(name for name in names if re.fullmatch(rf"{OWNER}\d{{12}}\.json", name))


def _is_same(text: bytes, entry: LeaseEntry) -> bool:
    try:
        return replace(LeaseEntry.of_text(text), beat=entry.beat) == entry
    except ValueError:
        return False


class EtcdRegister:
    """Entries as keys of etcd 3.4 or later, by its JSON gateway (``/v3/kv``: etcd's
    ``api_grpc_gateway``)."""

    def __init__(self, url: str, job: str) -> None:
        self._url, self._prefix = url.rstrip("/"), f"/scalai/{job}/term-"

    def __str__(self) -> str:
        return f"etcd at {self._url}"

    def newest(self) -> LeaseEntry | None:
        found = self._ask(
            "range",
            {
                "key": _coded(self._prefix),
                "range_end": _coded(self._prefix[:-1] + chr(ord("-") + 1)),
                "sort_order": "DESCEND", "sort_target": "KEY", "limit": 1,
            },
        )  # fmt: skip
        keys = found.get("kvs") or []
        if not keys:
            return None
        try:
            term = int(base64.b64decode(keys[0]["key"]).removeprefix(self._prefix.encode()))
            text = base64.b64decode(keys[0].get("value", ""))
            changed = int(keys[0].get("mod_revision", 0))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PeerError(f"the lease in {self} cannot be read: {error}") from error
        return _entry_of(text, term, changed)

    def claim(self, entry: LeaseEntry) -> bool:
        key = _coded(self._key(entry.term))
        put = {"requestPut": {"key": key, "value": _coded(entry.to_text())}}
        unmade = {"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        found = self._ask("txn", {"compare": [unmade], "success": [put]})
        return bool(found.get("succeeded"))

    def renew(self, entry: LeaseEntry) -> None:
        values = {"key": _coded(self._key(entry.term)), "value": _coded(entry.to_text())}
        self._ask("put", values)

    def _key(self, term: int) -> str:
        return f"{self._prefix}{term:012d}"

    def _ask(self, what: str, content: Mapping[str, Any]) -> Mapping[str, Any]:
        status, found = ask_json(str(self), self._url, "POST", f"/v3/kv/{what}", content)
        if status != 200:
            raise PeerError(f"{self} answers {status}: {found.get('message', found)}")
        return found


class KubernetesRegister:
    """The entry as an annotation of one Lease (``coordination.k8s.io/v1``) of the pod's namespace;
    an update names the version that it replaces.
    """

    def __init__(self, api: KubernetesApi, job: str) -> None:
        self._api, self._name = api, _lease_name(job)
        self._found: dict[str, Any] = {}
        """The Lease in the API server's last answer."""

    def __str__(self) -> str:
        return f"Lease {self._api.namespace}/{self._name} at {self._api.url}"

    def newest(self) -> LeaseEntry | None:
        status, found = self._ask("GET", self._name)
        if status == 404:
            return None
        self._take(status, found)
        return self._entry()

    def _entry(self) -> LeaseEntry:
        """Entry of the Lease in the last answer."""
        try:
            metadata, term = self._found["metadata"], int(self._found["spec"]["leaseTransitions"])
            text = (metadata.get("annotations") or {}).get(ANNOTATION, "")
            version = zlib.crc32(str(metadata["resourceVersion"]).encode())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PeerError(f"{self} cannot be read: {error!r}") from error
        return _entry_of(text, term, version)

    def claim(self, entry: LeaseEntry) -> bool:
        newest = self.newest()
        if newest is not None and newest.term >= entry.term:
            return False
        self._found = self._found if newest is not None else {"metadata": {"name": self._name}}
        method, name = ("POST", "") if newest is None else ("PUT", self._name)
        status, found = self._ask(method, name, self._lease(entry))
        if status == 409:
            return False
        self._take(status, found)
        return True

    def renew(self, entry: LeaseEntry) -> None:
        for has_looked in (False, True):
            newest = self.newest() if has_looked or not self._found else self._entry()
            if newest is None or newest.term != entry.term:
                raise PeerError(f"{self} is not of coordinator {entry.term} any more.")
            status, found = self._ask("PUT", self._name, self._lease(entry))
            if status != 409:
                break
        self._take(status, found)

    def _lease(self, entry: LeaseEntry) -> Mapping[str, Any]:
        """The Lease with this entry, at the version of the last answer."""
        metadata = self._found["metadata"]
        annotations = {**(metadata.get("annotations") or {}), ANNOTATION: entry.to_text()}
        return {
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {**metadata, "annotations": annotations},
            "spec": {
                "holderIdentity": join_endpoint(*entry.address),
                "leaseTransitions": entry.term,
                "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            },
        }  # fmt: skip

    def _take(self, status: int, found: dict[str, Any]) -> None:
        if status not in (200, 201):
            raise PeerError(f"{self} cannot be used: {status} {found.get('message', found)}")
        self._found = found

    def _ask(
        self, method: str, name: str, content: Mapping[str, Any] | None = None
    ) -> tuple[int, dict[str, Any]]:
        return self._api.ask(str(self), method, "coordination.k8s.io/v1", "leases", name, content)


def _lease_name(job: str) -> str:
    """Name of a job's Lease: lower case, without underscores, unique per job."""
    name = re.sub("[^a-z0-9.-]", "-", job.lower()).strip("-.")
    mark = "" if name == job else f"-{hashlib.sha256(job.encode()).hexdigest()[:8]}"
    return f"scalai-{name}{mark}"


def _entry_of(text: str | bytes, term: int, beat: int) -> LeaseEntry:
    """Read a server's entry; a torn one has no address, and this beat."""
    try:
        return LeaseEntry.of_text(text)
    except ValueError:
        return LeaseEntry(term, "", 0, beat)


def _coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def registers_of(spec: JobSpec) -> tuple[Register | None, Register | None]:
    """Registers of a job's coordinator, and of the run that owns its durable directory: the same
    one, unless a person names another. None: none.

    Raises:
        UsageError: ``--coordinator-lease`` is invalid or unusable here.
    """
    lease, durable = spec.options.coordinator_lease, spec.durable_dir if spec.is_elastic else None
    owned = None if durable is None else FolderRegister(durable, spec.job, DURABLE)
    if lease is None:  # agents that name no coordinator are on one machine
        return (None if spec.options.coordinator is None else owned), owned
    if lease == NO_LEASE:
        return None, owned
    found = open_register(lease, spec.job)
    kind, _, place = lease.partition(":")
    is_same = durable is not None and kind == "file"
    is_same = is_same and os.path.realpath(place) == os.path.realpath(str(durable))
    return found, found if is_same else owned


def open_register(lease: str, job: str) -> Register:
    """The register by ``--coordinator-lease``. Raises ``UsageError`` for an invalid one."""
    kind, _, place = lease.partition(":")
    if kind == "file" and place.startswith("/"):
        return FolderRegister(Path(place), job)
    if kind == "etcd" and re.match(r"https?://[^/]+/?$", place):
        return EtcdRegister(place, job)
    if lease == "kubernetes:":
        return KubernetesRegister(KubernetesApi.of_pod(f"{LEASE_FLAG} {lease}"), job)
    raise UsageError(
        f"{LEASE_FLAG} {lease!r} is neither file:/FOLDER, which all hosts reach, nor "
        "etcd:http://HOST:PORT, nor kubernetes:, nor none."
    )
