"""Messages between the processes of a job: who has the token is answered, nobody blocks others."""

import contextlib
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from scalai.core.errors import AnswerError, PeerError, SilentError, UsageError
from scalai.runtime import framing, listening
from scalai.runtime.messages import Channel, Peer, Server, free_port

TOKEN = b"a secret of this job"


class Echo:
    """A server that answers with what it is sent, and notes who has gone."""

    def __init__(self, address: Any, token: bytes = TOKEN) -> None:
        self.gone: queue.Queue[str | None] = queue.Queue()
        self.release = threading.Event()
        self.server = Server(address, token, self.handle, lambda peer: self.gone.put(peer.name))

    def handle(self, peer: Peer, method: str, arguments: Mapping[str, Any]) -> Any:
        if method == "name":
            peer.name = arguments["name"]
        if method == "refuse":
            raise UsageError("this is refused. Ask for something else.")
        if method == "wait":
            assert self.release.wait(30)
        return {"method": method, **arguments}


@pytest.fixture(params=["tcp", "unix"])
def echo(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Echo]:
    echo = Echo(("127.0.0.1", 0) if request.param == "tcp" else str(tmp_path / "socket"))
    yield echo
    echo.release.set()
    echo.server.close()


def test_a_call_is_answered(echo: Echo) -> None:
    channel = Channel(echo.server.address, TOKEN)
    values = {"text": "ä", "numbers": [1, 2.5, None], "large": "x" * 5_000_000}
    assert channel.call("echo", **values) == {"method": "echo", **values}
    channel.close()


def test_an_error_of_the_server_reaches_the_caller_who_may_go_on(echo: Echo) -> None:
    channel = Channel(echo.server.address, TOKEN)
    with pytest.raises(PeerError, match="Ask for something else"):
        channel.call("refuse")
    assert channel.call("echo", n=1)["n"] == 1


def test_a_wrong_token_is_refused_and_the_error_says_what_to_do(echo: Echo) -> None:
    with pytest.raises(PeerError, match="Give all agents of a job the same token"):
        Channel(echo.server.address, b"another")
    assert Channel(echo.server.address, TOKEN).call("echo", n=2)["n"] == 2


def test_a_server_that_does_not_know_the_token_is_refused(tmp_path: Path) -> None:
    stranger = Echo(str(tmp_path / "stranger"), b"guessed")
    with pytest.raises(PeerError):
        Channel(stranger.server.address, TOKEN)
    stranger.server.close()


def test_nobody_there_is_an_error() -> None:
    with pytest.raises(PeerError, match="nobody answers"):
        Channel(("127.0.0.1", free_port("127.0.0.1")), TOKEN)


def test_a_silent_client_and_noise_do_not_block_others(tmp_path: Path) -> None:
    echo = Echo(("127.0.0.1", 0))
    silent = [socket.create_connection(echo.server.address) for _ in range(5)]  # type: ignore[arg-type]  # TCP
    with contextlib.suppress(OSError):
        silent[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert Channel(echo.server.address, TOKEN).call("echo", n=3)["n"] == 3
    for connection in silent:
        connection.close()
    echo.server.close()


def test_a_call_that_takes_long_does_not_block_other_connections(echo: Echo) -> None:
    slow, quick = Channel(echo.server.address, TOKEN), Channel(echo.server.address, TOKEN)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(slow.call("wait")), daemon=True)
    thread.start()
    assert quick.call("echo", n=4)["n"] == 4
    assert not answers
    echo.release.set()
    thread.join(30)
    assert answers


def test_threads_may_share_a_channel(echo: Echo) -> None:
    channel = Channel(echo.server.address, TOKEN)
    wrong: list[int] = []

    def ask(n: int) -> None:
        if channel.call("echo", n=n)["n"] != n:
            wrong.append(n)

    threads = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong


def test_a_peer_that_goes_away_is_noticed_by_its_name(echo: Echo) -> None:
    channel = Channel(echo.server.address, TOKEN)
    channel.call("name", name="a")
    channel.close()
    assert echo.gone.get(timeout=30) == "a"


def test_a_server_that_dies_during_a_call_is_an_error(tmp_path: Path) -> None:
    """The caller learns it at once, whatever it waits for."""
    import multiprocessing

    path = str(tmp_path / "socket")
    process = multiprocessing.get_context("fork").Process(target=_serve_forever, args=(path,))
    process.start()
    end = time.monotonic() + 30
    while True:
        try:
            channel = Channel(path, TOKEN)
            break
        except PeerError:
            assert time.monotonic() < end
            time.sleep(0.01)
    failed: list[str] = []

    def wait() -> None:
        try:
            channel.call("wait")
        except PeerError as error:
            failed.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    process.kill()
    process.join(30)
    thread.join(30)
    assert len(failed) == 1 and "went away during 'wait'" in failed[0]


def test_a_silent_listener_is_an_error_in_time() -> None:
    """It takes the connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(SilentError, match=r"silent for 0\.3 s"):
            Channel(listener.getsockname(), TOKEN, connect_s=0.3)


def test_a_call_that_is_not_answered_in_time_is_an_error(echo: Echo) -> None:
    channel = Channel(echo.server.address, TOKEN, call_s=0.3)
    with pytest.raises(SilentError, match=r"silent for 0\.3 s.*asked to 'wait'"):
        channel.call("wait")
    with pytest.raises(PeerError):  # the late answer is not taken for that of another call
        channel.call("echo", n=1)


def test_a_client_that_proves_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HANDSHAKE_S", 0.3)
    echo = Echo(("127.0.0.1", 0))
    with socket.create_connection(echo.server.address, timeout=30) as silent:  # type: ignore[arg-type]  # TCP
        while silent.recv(4096):
            pass  # its greeting, and then the end
    echo.server.close()


NO_REQUESTS = (b"no JSON", b"[1]", b"{}", b'{"method": 1, "arguments": {}}', b"[" * 100_000)


@pytest.mark.parametrize("sent", NO_REQUESTS, ids=["bytes", "list", "empty", "types", "depth"])
def test_what_is_no_request_ends_that_connection_alone(
    echo: Echo, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    other = Channel(echo.server.address, TOKEN)
    with framing.connect(echo.server.address, TOKEN, 30) as framed:
        framed.send_bytes(sent)
        with pytest.raises(PeerError, match=r"closed the connection|broke"):
            framed.recv_json()
    assert other.call("echo", n=1)["n"] == 1
    assert all(record.exc_info is None for record in caplog.records)


def test_an_exception_of_the_server_is_an_answer_and_a_line_in_its_log(
    echo: Echo, caplog: pytest.LogCaptureFixture
) -> None:
    channel = Channel(echo.server.address, TOKEN)
    with pytest.raises(AnswerError, match=r"KeyError.*The log of the process"):
        channel.call("name")
    assert channel.call("echo", n=1)["n"] == 1
    assert any("event=call_failed" in record.getMessage() for record in caplog.records)


CROWDED = """
import resource, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
from scalai.runtime.messages import Server
server = Server(("127.0.0.1", 0), sys.argv[1].encode(), lambda peer, method, arguments: arguments)
print(server.address[1], flush=True)
sys.stdin.read()
"""


def test_more_idle_connections_than_files_may_be_open_deafen_nobody() -> None:
    """Neither while they are there nor afterwards."""
    token = "a secret of this job"
    with subprocess.Popen(
        [sys.executable, "-c", CROWDED, token], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            address = ("127.0.0.1", int(process.stdout.readline()))
            friend = Channel(address, token.encode(), connect_s=60, call_s=60)
            idle = [socket.create_connection(address, timeout=60) for _ in range(120)]
            assert friend.call("echo", n=1) == {"n": 1}
            assert Channel(address, token.encode(), connect_s=60).call("echo", n=2) == {"n": 2}
            for connection in idle:
                connection.close()
            assert Channel(address, token.encode(), connect_s=60).call("echo", n=3) == {"n": 3}
            log = process.communicate("", timeout=60)[1]
            assert "Traceback" not in log and log.count("event=listener") <= 3, log
        finally:
            process.kill()


def _serve_forever(path: str) -> None:
    Echo(path)
    threading.Event().wait(120)


def test_a_path_that_no_socket_takes_is_refused_with_the_way_out(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    with pytest.raises(UsageError, match=r"the kernel takes 107. Use a shorter --store-dir"):
        Echo(str(long))
