"""This process's own certificate: what no other host would take is refused at the start, and a
renewed one is shown to new connections."""

import logging
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID

from scalai.core.errors import UsageError
from scalai.runtime.connecting import connect
from scalai.runtime.tls import Tls, TlsFiles
from support.certificates import DAY, Authority
from support.tls_ends import TOKEN, WAIT_S, Echo, bare_client, listening_as


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def _missing(of: Authority, folder: Path) -> TlsFiles:
    return TlsFiles(of.files().certificate, folder / "none.key", of.path)


def _folder(of: Authority, folder: Path) -> TlsFiles:
    return TlsFiles(of.files().certificate, folder, of.path)


def _locked(of: Authority, folder: Path) -> TlsFiles:
    return of.files(passphrase=b"a passphrase")


def _other_key(of: Authority, folder: Path) -> TlsFiles:
    return TlsFiles(of.files("a").certificate, of.files("b").key, of.path)


def _no_pem(of: Authority, folder: Path) -> TlsFiles:
    (folder / "text").write_text("no certificate")
    return TlsFiles(of.files().certificate, of.files().key, folder / "text")


def _expired(of: Authority, folder: Path) -> TlsFiles:
    return of.files(until=-DAY)


def _other_authority(of: Authority, folder: Path) -> TlsFiles:
    files = of.files()
    return TlsFiles(files.certificate, files.key, Authority(folder, "other").path)


def _for_servers_only(of: Authority, folder: Path) -> TlsFiles:
    return of.files(usages=(ExtendedKeyUsageOID.SERVER_AUTH,))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_missing, r"none\.key cannot be read \(No such file"),
        (_folder, "cannot be read .Is a directory"),
        (_locked, "host.key has a passphrase, and nobody is there"),
        (_other_key, "does not hold a certificate with the key in .*b.key"),
        (_no_pem, "text does not hold certificates, as PEM"),
        (_expired, "no other host would take .*certificate has expired"),
        (_other_authority, "no other host would take .*issuer"),
        (_for_servers_only, "from a client.*unsuitable certificate purpose"),
    ],
)
def test_files_that_no_other_host_would_take_are_refused_at_the_start(
    authority: Authority, tmp_path: Path, spoil: Callable[[Authority, Path], TlsFiles], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        Tls(spoil(authority, tmp_path))


@pytest.mark.parametrize("text", ["", "a", "a,b", "a,b,c,d", "a,,c"])
def test_what_names_no_three_files_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not CERT,KEY,CA"):
        TlsFiles.parse(text)


def shown_by(echo: Echo, authority: Authority) -> str:
    """Return the serial number of the certificate that a server shows."""
    context = bare_client(authority, authority.files("asking"))
    with socket.create_connection(echo.address, timeout=WAIT_S) as plain:
        with context.wrap_socket(plain) as secured:
            shown = secured.getpeercert()
    assert shown
    return str(shown["serialNumber"])


def test_new_connections_show_a_certificate_that_was_renewed_and_old_ones_go_on(
    authority: Authority,
) -> None:
    files = authority.files("server", serial=0x11)
    with listening_as(Tls(files)) as echo:
        with connect(echo.address, TOKEN, WAIT_S, tls=authority.identity()) as before:
            assert shown_by(echo, authority) == "11"
            authority.files("server", serial=0x22)
            assert shown_by(echo, authority) == "22"
            before.send(b"word")
            assert before.receive() == b"word"


def test_a_renewal_in_halves_waits_for_the_other_half(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    files = authority.files("server", serial=0x11)
    with listening_as(Tls(files)) as echo:
        assert shown_by(echo, authority) == "11"
        renewed = authority.files("aside", serial=0x22)
        renewed.certificate.rename(files.certificate)
        with caplog.at_level(logging.WARNING):
            assert shown_by(echo, authority) == "11"
            assert shown_by(echo, authority) == "11"
        assert caplog.text.count("event=tls_not_renewed") == 1
        files.key.unlink()
        assert shown_by(echo, authority) == "11"
        renewed.key.rename(files.key)
        assert shown_by(echo, authority) == "22"
