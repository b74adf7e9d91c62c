"""Certificates of a test: an authority, and what it certifies."""

import datetime
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from scalai.runtime.tls import Tls, TlsFiles

YEARS = datetime.timedelta(days=3650)
DAY = datetime.timedelta(days=1)
LOOPBACK = x509.IPAddress(ip_address("127.0.0.1"))
BOTH = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)


class Authority:
    """Certifies hosts, by files in a folder."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder, self._name = folder, x509.Name([_common_name(name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(self._name).issuer_name(self._name).public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - YEARS).not_valid_after(now + YEARS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )  # fmt: skip
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(made.public_bytes(serialization.Encoding.PEM))

    def files(
        self,
        host: str = "host",
        *,
        until: datetime.timedelta = YEARS,
        usages: Sequence[x509.ObjectIdentifier] = BOTH,
        passphrase: bytes | None = None,
        serial: int | None = None,
    ) -> TlsFiles:
        """Write a host's certificate and key (over those that it had); ``until``: valid for so long
        from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([_common_name(host)])).issuer_name(self._name)
            .public_key(key.public_key()).serial_number(serial or x509.random_serial_number())
            .not_valid_before(now - YEARS).not_valid_after(now + until)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName([LOOPBACK]), critical=False)
            .sign(self._key, hashes.SHA256())
        )  # fmt: skip
        certificate, private = self._folder / f"{host}.crt", self._folder / f"{host}.key"
        secret = serialization.BestAvailableEncryption(passphrase) if passphrase else None
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                secret or serialization.NoEncryption(),
            )
        )
        certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        return TlsFiles(certificate, private, self.path)

    def identity(self, host: str = "host") -> Tls:
        """Return a host that this authority has certified."""
        return Tls(self.files(host))


def _common_name(name: str) -> x509.NameAttribute[str]:
    return x509.NameAttribute(NameOID.COMMON_NAME, name)
