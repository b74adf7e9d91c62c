"""How two processes of a job prove to each other that they know its token, agree on a version and
make the keys of one connection.

The client sends a fresh number and the versions that it speaks, the server its own number and the
version that it has chosen. Then each proves by HMAC-SHA256 under the token that it has seen all of
that (client first, so that who does not know the token learns nothing but a number and versions);
the proofs differ by their role, so that none can be sent back. The keys follow from the token and
from what was sent, as in HKDF (RFC 5869), so that no two connections share one.

A token is the key that follows from a job's secret and its name (``job_key``), by a function that
takes so much memory and time that few secrets can be tried against a proof that was heard. Of what
serves under another name than the job's coordinator the key is another one (``service_key``).
"""

import hashlib
import hmac
import secrets
import struct
from dataclasses import dataclass

from scalai.core.errors import UnprovenError, VersionError
from scalai.runtime.framing import FramedSocket

VERSIONS = range(3, 4)
"""Versions of the protocol that this release speaks. 1 knew no versions; 2 proved the secret
itself."""
SCRYPT_N, SCRYPT_R = 1 << 14, 8
"""Cost of a guess (RFC 7914): 16 MiB, and some tens of milliseconds of a core."""
_LABEL = b"scalai 3"
DATA_PLANE = "data plane"
"""The service of an agent for other hosts."""

_MAGIC = b"scalai"
_HELLO = struct.Struct(">6sHH32s")
"""Magic, oldest and newest version, a fresh number. The server's newest is what it has chosen, 0
where there is none in common; its oldest is the newest that it speaks."""
_PROOF_BYTES = 32
_REFUSED = b"refused"
_FIRST_GREETING = b"scalai-1"
"""With this a server of version 1 begins, and its clients wait for it."""


@dataclass(frozen=True, slots=True)
class _Hello:
    """What one side sends first."""

    oldest: int
    newest: int
    number: bytes

    def pack(self) -> bytes:
        return _HELLO.pack(_MAGIC, self.oldest, self.newest, self.number)

    @classmethod
    def unpack(cls, data: bytes, framed: FramedSocket) -> "_Hello":
        if data.startswith(_FIRST_GREETING):
            raise _other_version(framed, "version 1")
        if len(data) != _HELLO.size or not data.startswith(_MAGIC):
            raise UnprovenError(f"{framed.peer} is no process of Scalai. Is the address right?")
        _, oldest, newest, number = _HELLO.unpack(data)
        return cls(oldest, newest, number)


def job_key(secret: str, job: str) -> str:
    """Return what proves that a process knows a job's secret: 64 hexadecimal digits. Takes tens of
    milliseconds and 16 MiB: once a process, and what that starts is given the key.

    Source:
        scrypt (RFC 7914), with the protocol's and the job's name as salt: the hosts of a job share
        nothing else before they have talked.
    """
    known, salt = secret.encode(errors="surrogateescape"), _LABEL + b"\0" + job.encode()
    most = 256 * SCRYPT_N * SCRYPT_R
    key = hashlib.scrypt(known, salt=salt, n=SCRYPT_N, r=SCRYPT_R, p=1, maxmem=most, dklen=32)
    return key.hex()


def service_key(token: bytes, service: str, host: str) -> bytes:
    """Return the key of what one host of a job serves under this name: what another one has heard,
    or serves itself, proves nothing there."""
    return hmac.digest(token, b"\0".join((_LABEL, service.encode(), host.encode())), "sha256")


def offer(framed: FramedSocket, token: bytes, versions: range = VERSIONS) -> int:
    """Prove to a server that this side knows ``token``, and have it prove the same. From then on
    the connection is sealed.

    Returns:
        The version that both speak.

    Raises:
        UnprovenError: The other side's token is another one, or it is no process of Scalai.
        VersionError: The releases have no version in common.
        PeerError: It is silent or goes away.
    """
    mine = _Hello(versions[0], versions[-1], secrets.token_bytes(32)).pack()
    framed.send(mine)
    theirs = framed.receive(_HELLO.size)
    answer = _Hello.unpack(theirs, framed)
    if answer.newest not in versions:
        raise _other_version(framed, f"versions up to {answer.oldest}", versions)
    seen, token = mine + theirs, _extract(token)
    framed.send(_derive(token, b"client", seen))
    if not hmac.compare_digest(framed.receive(_PROOF_BYTES), _derive(token, b"server", seen)):
        raise _stranger(framed)
    to_server, to_client = (_derive(token, role, seen) for role in (b"to server", b"to client"))
    framed.seal(to_server, to_client)
    return answer.newest


def accept(framed: FramedSocket, token: bytes, versions: range = VERSIONS) -> int:
    """Have a client prove that it knows ``token``, and prove the same; as ``offer`` otherwise."""
    theirs = framed.receive(_HELLO.size)
    asked = _Hello.unpack(theirs, framed)
    common = [version for version in versions if asked.oldest <= version <= asked.newest]
    chosen = common[-1] if common else 0
    mine = _Hello(versions[-1], chosen, secrets.token_bytes(32)).pack()
    framed.send(mine)
    if not common:
        raise _other_version(framed, f"versions {asked.oldest} to {asked.newest}", versions)
    seen, token = theirs + mine, _extract(token)
    if not hmac.compare_digest(framed.receive(_PROOF_BYTES), _derive(token, b"client", seen)):
        framed.send(_REFUSED)
        raise _stranger(framed)
    framed.send(_derive(token, b"server", seen))
    to_server, to_client = (_derive(token, role, seen) for role in (b"to server", b"to client"))
    framed.seal(to_client, to_server)
    return chosen


def _extract(token: bytes) -> bytes:
    return hmac.digest(_LABEL, token, "sha256")


def _derive(token: bytes, role: bytes, seen: bytes) -> bytes:
    return hmac.digest(token, role + b"\0" + seen, "sha256")


def _stranger(framed: FramedSocket) -> UnprovenError:
    return UnprovenError(
        f"{framed.peer} does not have this job's token, or is not the host that is meant. Is it an "
        "agent of another job? Give all agents of a job the same token."
    )


def _other_version(framed: FramedSocket, theirs: str, versions: range = VERSIONS) -> VersionError:
    mine = " to ".join(str(version) for version in sorted({versions[0], versions[-1]}))
    return VersionError(
        f"{framed.peer} speaks {theirs} of the protocol, this process {mine}. Install the same "
        "release of Scalai on all hosts."
    )
