"""Mutual proof of a job's token by two processes, with a common version and the keys of one
connection.

The client sends a fresh X25519 key and its versions, the server its own fresh key and the chosen
version. From the secret of these two keys, from the token and from both messages HKDF makes a proof
and a sealing key for each side. The client proves first: a connecting stranger learns a fresh key
and versions, nothing of the token. The proofs differ by side, so neither can be sent back. Both
sides forget their fresh keys: a thief of the token reads no recorded connection.

A token is a key made of a job's secret and name (``job_key``), by a function so expensive in memory
and time that a false server, the only stranger with a proof, can try few secrets against it. Each
service beside the coordinator's has its own key (``service_key``).

Source:
    X25519 (RFC 7748), HKDF with SHA-256 (RFC 5869) of a fresh secret and a known one (NIST SP
    800-56C, section 2). The purpose is that of TLS 1.3's ``psk_dhe_ke`` (RFC 8446, 4.2.9); differs
    in: the client proves first.
"""

import hashlib
import hmac
import struct
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from scalai.core.errors import UnprovenError, VersionError
from scalai.runtime.framing import FramedSocket

VERSIONS = range(5, 6)
"""Protocol versions of this release."""
SCRYPT_N, SCRYPT_R = 1 << 14, 8
"""Cost of a guess (RFC 7914): 16 MiB, and some tens of milliseconds of a core."""
_LABEL = b"scalai 4"
DATA_PLANE = "data plane"
"""Service of an agent for other hosts."""

_MAGIC = b"scalai"
_HELLO = struct.Struct(">6sHH32s")
"""Magic, oldest and newest version, a fresh public key. The server's newest is its choice, 0
without a common version; its oldest is its newest version."""
_KEY_BYTES = 32
_REFUSED = b"refused"


@dataclass(frozen=True, slots=True)
class _Hello:
    oldest: int
    newest: int
    key: bytes

    def pack(self) -> bytes:
        return _HELLO.pack(_MAGIC, self.oldest, self.newest, self.key)

    @classmethod
    def unpack(cls, data: bytes, framed: FramedSocket) -> "_Hello":
        if len(data) != _HELLO.size or not data.startswith(_MAGIC):
            raise UnprovenError(f"{framed.peer} is no process of Scalai. Is the address right?")
        _, oldest, newest, key = _HELLO.unpack(data)
        return cls(oldest, newest, key)


@dataclass(frozen=True, slots=True)
class _Keys:
    """Secrets of both sides of one connection: 32 bytes each."""

    client_proof: bytes
    server_proof: bytes
    to_server: bytes
    to_client: bytes

    @classmethod
    def agree(
        cls, framed: FramedSocket, own: X25519PrivateKey, other: _Hello, token: bytes, seen: bytes
    ) -> "_Keys":
        """``seen``: both hellos, the client's first."""
        try:
            shared = own.exchange(X25519PublicKey.from_public_bytes(other.key))
        except ValueError:  # of small order: the secret would be 0 (RFC 7748, 6.1)
            raise _stranger(framed) from None
        made = HKDF(SHA256(), 4 * _KEY_BYTES, salt=_LABEL, info=seen).derive(shared + token)
        return cls(*(made[at : at + _KEY_BYTES] for at in range(0, len(made), _KEY_BYTES)))


def job_key(secret: str, job: str) -> str:
    """Return the key made of a job's secret: 64 hexadecimal digits.

    Takes tens of milliseconds and 16 MiB: call it once a process, and pass the key to children.

    Source:
        scrypt (RFC 7914), with the protocol's and the job's name as salt: before their first
        contact the hosts of a job share nothing else.
    """
    known, salt = secret.encode(errors="surrogateescape"), _LABEL + b"\0" + job.encode()
    most = 256 * SCRYPT_N * SCRYPT_R
    key = hashlib.scrypt(known, salt=salt, n=SCRYPT_N, r=SCRYPT_R, p=1, maxmem=most, dklen=32)
    return key.hex()


def service_key(token: bytes, service: str, host: str) -> bytes:
    """Return the key of one host's service under this name; keys of other hosts or services prove
    nothing there.
    """
    return hmac.digest(token, b"\0".join((_LABEL, service.encode(), host.encode())), "sha256")


def offer(framed: FramedSocket, token: bytes, versions: range = VERSIONS) -> int:
    """Prove to a server that this side knows ``token``, and check its proof. Then the connection is
    sealed.

    Returns:
        The common version.

    Raises:
        UnprovenError: The other side's token is another one, or it is no process of Scalai.
        VersionError: The releases have no version in common.
        PeerError: It is silent or goes away.
    """
    own = X25519PrivateKey.generate()
    mine = _Hello(versions[0], versions[-1], own.public_key().public_bytes_raw()).pack()
    framed.send(mine)
    theirs = framed.receive(_HELLO.size)
    answer = _Hello.unpack(theirs, framed)
    if answer.newest not in versions:
        raise _other_version(framed, f"versions up to {answer.oldest}", versions)
    keys = _Keys.agree(framed, own, answer, token, mine + theirs)
    framed.send(keys.client_proof)
    if not hmac.compare_digest(framed.receive(_KEY_BYTES), keys.server_proof):
        raise _stranger(framed)
    framed.seal(keys.to_server, keys.to_client)
    return answer.newest


def accept(framed: FramedSocket, token: bytes, versions: range = VERSIONS) -> int:
    """Check a client's proof of ``token``, and prove the same; otherwise as ``offer``."""
    theirs = framed.receive(_HELLO.size)
    asked = _Hello.unpack(theirs, framed)
    common = [version for version in versions if asked.oldest <= version <= asked.newest]
    chosen = common[-1] if common else 0
    own = X25519PrivateKey.generate()
    mine = _Hello(versions[-1], chosen, own.public_key().public_bytes_raw()).pack()
    framed.send(mine)
    if not common:
        raise _other_version(framed, f"versions {asked.oldest} to {asked.newest}", versions)
    keys = _Keys.agree(framed, own, asked, token, theirs + mine)
    if not hmac.compare_digest(framed.receive(_KEY_BYTES), keys.client_proof):
        framed.send(_REFUSED)
        raise _stranger(framed)
    framed.send(keys.server_proof)
    framed.seal(keys.to_client, keys.to_server)
    return chosen


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
