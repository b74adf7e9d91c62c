"""Ends of connections under TLS: a server that echoes, and clients of other programs."""

import contextlib
import ssl
import time
from collections.abc import Iterator

import pytest

from scalai.runtime.connecting import connect
from scalai.runtime.framing import FramedSocket
from scalai.runtime.listening import Listener
from scalai.runtime.tls import Tls, TlsFiles
from support.certificates import Authority

TOKEN = b"the job's token"
WAIT_S = 30.0
"""Longer than anything may take here."""


class Echo:
    """Listens, and sends back what it is sent."""

    def __init__(self, identity: Tls | None) -> None:
        self.listener = Listener(("127.0.0.1", 0), TOKEN, self._serve, tls=identity)
        address = self.listener.address
        assert not isinstance(address, str)
        self.address = address

    def _serve(self, framed: FramedSocket) -> None:
        while True:
            framed.send(framed.receive())

    def answers(self, identity: Tls | None) -> bool:
        """Whether a process with this identity is served."""
        with connect(self.address, TOKEN, WAIT_S, tls=identity) as framed:
            framed.send(b"word")
            return framed.receive() == b"word"


def wait_for(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """Return once another thread has logged it."""
    end = time.monotonic() + WAIT_S
    while text not in caplog.text:
        assert time.monotonic() < end, f"{text!r} is not in:\n{caplog.text}"
        time.sleep(0.01)


@contextlib.contextmanager
def listening_as(identity: Tls | None) -> Iterator[Echo]:
    echo = Echo(identity)
    try:
        yield echo
    finally:
        echo.listener.close()


def bare_client(authority: Authority, files: TlsFiles | None) -> ssl.SSLContext:
    """Return a client of another program's, that shows what it likes."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(authority.path)
    if files is not None:
        context.load_cert_chain(files.certificate, files.key)
    return context
