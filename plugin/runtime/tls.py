"""TLS under the frames, mutual: who this process is, and by whom both sides of a connection must be
certified.

One process is of one job, and has one identity: ``secure`` sets it once, and every connection over
TCP that the process makes or takes obeys it, so that none is left plain by an oversight. Sockets of
the file system stay plain.
"""

import logging
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from scalai.core.errors import UsageError

log = logging.getLogger(__name__)

Signature = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files: this host's certificate (with what stands between it and the authority),
    its private key, and the authorities that may certify a host."""

    certificate: Path
    key: Path
    authority: Path

    @classmethod
    def parse(cls, text: str) -> "TlsFiles":
        """Read ``CERT,KEY,CA``. Raises ``UsageError`` where it is not that."""
        names = text.split(",")
        if len(names) != len(fields(cls)) or not all(names):
            raise UsageError(
                f"--tls {text} is not CERT,KEY,CA: three PEM files, separated by commas (their "
                "paths have none)."
            )
        return cls(*(Path(name).absolute() for name in names))

    def __str__(self) -> str:
        return f"{self.certificate},{self.key},{self.authority}"

    def signature(self) -> Signature:
        """Return what changes when one of the files is replaced. Raises ``OSError``."""
        found = [path.stat() for path in (self.certificate, self.key, self.authority)]
        return tuple((of.st_ino, of.st_size, of.st_mtime_ns) for of in found)


@dataclass(frozen=True, slots=True)
class Contexts:
    """What new connections are made with, on either side."""

    server: ssl.SSLContext
    client: ssl.SSLContext

    @classmethod
    def load(cls, files: TlsFiles) -> "Contexts":
        """Read the files, and try them: the two sides shake hands with each other in memory.

        Raises:
            UsageError: A file cannot be read, they do not belong together, or no other host would
                take the certificate.
        """
        for path in (files.certificate, files.key, files.authority):
            try:
                path.read_bytes()
            except OSError as error:
                raise UsageError(
                    f"--tls: {path} cannot be read ({error.strerror}). Name three PEM files that "
                    "this user may read."
                ) from error
        made = cls(
            _context(ssl.PROTOCOL_TLS_SERVER, files), _context(ssl.PROTOCOL_TLS_CLIENT, files)
        )
        made.server.num_tickets = 0  # no connection is ever resumed
        _try(made, files)
        return made


class Tls:
    """An identity whose files may be renewed while the process lives: new connections use what the
    files have become, those that stand go on. Any thread may ask.

    Raises:
        UsageError: As of ``Contexts.load``.
    """

    def __init__(self, files: TlsFiles) -> None:
        self.files = files
        self._mutex = threading.Lock()
        self._signature: Signature | None = _signature(files)  # before they are read
        self._contexts = Contexts.load(files)

    def contexts(self) -> Contexts:
        """Return what a new connection is made with. Where files that were replaced cannot be used
        (one is there, another not yet), that is what could be used last."""
        with self._mutex:
            found = _signature(self.files)
            if found is None or found == self._signature:
                return self._contexts
            self._signature = found
            try:
                self._contexts = Contexts.load(self.files)
                log.info("event=tls_renewed certificate=%s", self.files.certificate)
            except UsageError as error:
                log.warning(
                    "event=tls_not_renewed %s Until the files change again, new connections use "
                    "what was there before.", error,
                )  # fmt: skip
            return self._contexts


_own: Tls | None = None


def secure(tls: Tls | None) -> None:
    """From now on connect over TCP, and listen there, as ``tls``; None: plainly."""
    global _own
    _own = tls


def of_this_process() -> Tls | None:
    """Return as who this process connects over TCP; None: plainly."""
    return _own


def _signature(files: TlsFiles) -> Signature | None:
    try:
        return files.signature()
    except OSError:
        return None  # in the middle of being replaced; at the start, reading it says so


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Reading never has to write then, nor writing to read, once both sides have agreed.
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.check_hostname = False  # hosts have arbitrary names; the authority is what counts
    context.verify_mode = ssl.CERT_REQUIRED
    _blame(files.authority, "certificates", lambda: context.load_verify_locations(files.authority))
    if not context.get_ca_certs():
        raise UsageError(
            f"--tls: {files.authority} has no certificate of an authority. Name the one that "
            "certifies the hosts of this job."
        )

    def refuse() -> str:
        raise UsageError(
            f"--tls: {files.key} has a passphrase, and nobody is there to type it. Write one "
            f"without: openssl pkey -in {files.key} -out NEW"
        )

    _blame(
        files.certificate,
        f"a certificate with the key in {files.key}",
        lambda: context.load_cert_chain(files.certificate, files.key, refuse),
    )
    return context


def _blame(path: Path, expected: str, load: Callable[[], None]) -> None:
    try:
        load()
    except (ssl.SSLError, ValueError) as error:
        found = getattr(error, "reason", None) or error
        raise UsageError(f"--tls: {path} does not hold {expected}, as PEM ({found}).") from error


def _try(contexts: Contexts, files: TlsFiles) -> None:
    """Have a client and a server of this identity shake hands in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        ("client", contexts.client.wrap_bio(to_client, to_server)),
        ("server", contexts.server.wrap_bio(to_server, to_client, server_side=True)),
    )
    for _ in range(_FLIGHTS):
        for role, end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                other = "server" if role == "client" else "client"
                raise UsageError(
                    f"--tls: no other host would take {files.certificate} from a {other}: "
                    f"{why(error)}. Have it made by {files.authority}, for servers and clients."
                ) from error


_FLIGHTS = 4
"""More than a handshake takes, in either version."""


def why(error: ssl.SSLError) -> str:
    """Return the reason of a failure, in OpenSSL's words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    return (error.reason or str(error)).lower().replace("_", " ")
