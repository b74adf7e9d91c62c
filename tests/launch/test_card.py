"""How a job's coordinator is found: one that is silent is neither taken for none nor waited for."""

import socket
from functools import partial
from pathlib import Path

import pytest

from scalai.core.errors import PeerError, UsageError
from scalai.launch import cli
from scalai.launch.commands import clean
from scalai.launch.commands import job_commands as questions
from scalai.launch.config import endpoint as card
from scalai.launch.config.endpoint import (
    join_endpoint,
    read_card,
    split_endpoint,
    write_card,
)
from scalai.launch.coordinator.person_calls import Status
from scalai.runtime.calls import Server
from support.ports import free_port

TOKEN = b"a secret of this job"
ANSWER_S = 0.2


def test_a_card_whose_coordinator_is_gone_is_none(tmp_path: Path) -> None:
    assert read_card(tmp_path) is None
    write_card(tmp_path, ("127.0.0.1", free_port("127.0.0.1")), TOKEN)
    assert read_card(tmp_path) is None


def test_a_card_whose_port_another_job_has_taken_is_none(tmp_path: Path) -> None:
    server = Server(("127.0.0.1", 0), b"another", Status, lambda *call: None)
    assert not isinstance(server.address, str)
    write_card(tmp_path, server.address, TOKEN)
    assert read_card(tmp_path) is None
    server.close()


def test_a_silent_coordinator_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        write_card(tmp_path, silent.getsockname(), TOKEN)
        with pytest.raises(PeerError, match=r"does not answer.*may be paused"):
            read_card(tmp_path, answer_s=ANSWER_S)


def test_a_coordinator_whose_connections_break_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **named: object) -> None:
        raise PeerError("the connection broke.")

    monkeypatch.setattr(card, "Channel", broken)
    write_card(tmp_path, ("127.0.0.1", 1), TOKEN)
    with pytest.raises(PeerError, match="does not answer"):
        read_card(tmp_path, pause_s=0.0)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("command", "code"),
    [(["status"], 1), (["scale", "--nproc", "1"], 1), (["clean"], 0)],  # others may be cleaned
    ids=["status", "scale", "clean"],
)
def test_commands_end_at_a_silent_coordinator(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    code: int,
) -> None:
    for module in (questions, clean):
        monkeypatch.setattr(module, "read_card", partial(read_card, answer_s=ANSWER_S))
    folder = tmp_path / "default"
    folder.mkdir(mode=0o700)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        write_card(folder, silent.getsockname(), TOKEN)
        with pytest.raises(SystemExit) as ended:
            cli.main([*command, "--store-dir", str(tmp_path)])
    assert (ended.value.code or 0) == code
    assert "does not answer" in "".join(capsys.readouterr())
    assert folder.is_dir()


@pytest.mark.fault
@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("node-1:29400", ("node-1", 29400)), ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[::1]:29400", ("::1", 29400)), ("[fe80::1%eth0]:29400", ("fe80::1%eth0", 29400)),
    ],
)  # fmt: skip
def test_an_endpoint_may_be_an_address_of_either_kind(
    endpoint: str, address: tuple[str, int]
) -> None:
    assert split_endpoint(endpoint) == address
    assert join_endpoint(*address) == endpoint


@pytest.mark.fault
@pytest.mark.parametrize(
    "endpoint",
    ["29400", ":29400", "[]:29400", "[::1]", "node-1:port", "fe80::1", "::1:29500", "[::1:29500"],
)
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(UsageError, match=r"is not HOST:PORT"):
        split_endpoint(endpoint)
