"""Certificates of a test: an authority, and what it certifies."""

import datetime
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

YEARS = datetime.timedelta(days=3650)
LOOPBACK = "127.0.0.1"


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

    def files(self, host: str, address: str = LOOPBACK) -> tuple[Path, Path]:
        """Write, and return, a host's certificate and key."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([_common_name(host)])).issuer_name(self._name)
            .public_key(key.public_key()).serial_number(x509.random_serial_number())
            .not_valid_before(now - YEARS).not_valid_after(now + YEARS)
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ip_address(address))]), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )  # fmt: skip
        certificate, private = self._folder / f"{host}.crt", self._folder / f"{host}.key"
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        return certificate, private


def _common_name(name: str) -> x509.NameAttribute[str]:
    return x509.NameAttribute(NameOID.COMMON_NAME, name)
