"""Preemption notices: read as their source means them, believed no more than needed; they end
nothing by themselves."""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from scalai.core.errors import PeerError, UsageError
from scalai.launch.agent import notices
from scalai.launch.agent.notices import (
    LEAST_S,
    LONGEST_S,
    SILENT_S,
    AwsNotice,
    AzureNotice,
    FileNotice,
    GcpNotice,
    NoticeWatch,
    Question,
)
from scalai.launch.config.elastic_config import METADATA, NoticeSource, parse_source
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job_spec import JobSpec
from support.metadata_server import Said, Server, metadata_server

TOKEN = "/latest/api/token"
ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
EVENTS, NAME = "/metadata/scheduledevents", "/metadata/instance/compute/name"
PAST = "2017-09-18T08:22:00Z"
DAY_S = 86400.0


@pytest.fixture
def server() -> Iterator[Server]:
    with metadata_server() as made:
        yield made


def in_future(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def aws(server: Server, token: str = "secret") -> AwsNotice:
    server.says[TOKEN] = Said(text=token)
    server.needs = {"X-aws-ec2-metadata-token": token}
    return AwsNotice(server.address)


def ends(at: str, action: str = "stop", **headers: str) -> dict[str, Said]:
    return {ACTION: Said(text=json.dumps({"action": action, "time": at}), headers=headers)}


def google(word: str) -> dict[str, Said]:
    return {PREEMPTED: Said(text=word, headers={"Metadata-Flavor": "Google"})}


def azure(**more: Any) -> dict[str, Said]:
    """One event of Azure for this host, Preempt in a day unless said otherwise."""
    event = {
        "EventId": "7", "EventType": "Preempt", "Resources": ["mine"], "EventStatus": "Scheduled",
        "NotBefore": format_datetime(in_future(DAY_S), usegmt=True), **more,
    }  # fmt: skip
    return azure_list(event)


def azure_list(*events: dict[str, Any]) -> dict[str, Said]:
    listed = Said(text=json.dumps({"DocumentIncarnation": 1, "Events": events}))
    return {EVENTS: listed, NAME: Said(text="mine")}


def question(server: Server, says: Mapping[str, Said]) -> Question:
    """Return the question for a server that says so, after whose paths they are."""
    server.says.update(says)
    if PREEMPTED in says:
        return GcpNotice(server.address)
    return AzureNotice(server.address) if EVENTS in says else aws(server)


# ------------------------------------------------------------------ what each source says


@pytest.mark.fault
@pytest.mark.parametrize(
    ("says", "name", "least", "most"),
    [
        (ends(in_future(DAY_S).isoformat(), "terminate"), "aws terminate", 60, DAY_S + 1),
        (ends(PAST), "aws stop", LEAST_S, LEAST_S),
        (
            ends(in_future(3720).isoformat(), Date=format_datetime(in_future(3600), usegmt=True)),
            "aws stop", 119, 121,
        ),
        ({REBALANCE: Said(text=json.dumps({"noticeTime": PAST}))}, "aws rebalance recommendation",
         None, None),
        (google("TRUE"), "gcp preempted", 0, notices.GCP_S),
        *(
            (azure(EventType=kind), f"azure {kind} 7", 60, DAY_S + 1)
            for kind in ("Preempt", "Terminate", "Reboot", "Redeploy")
        ),
        (azure(EventStatus="Started", NotBefore=""), "azure Preempt 7", LEAST_S, LEAST_S),
    ],
    ids=["aws", "aws, past", "its own clock counts", "rebalance", "google", "preempt", "terminate",
         "reboot", "redeploy", "azure, begun"],
)  # fmt: skip
def test_a_source_says_what_comes_and_when(
    server: Server, says: dict[str, Said], name: str, least: float | None, most: float | None
) -> None:
    """A time that has passed leaves a moment; a recommendation has no time."""
    ((found, left_s),) = question(server, says).read().items()
    assert found == name
    if least is None or most is None:
        assert left_s is None
    else:
        assert left_s is not None and least <= left_s <= most


@pytest.mark.fault
@pytest.mark.parametrize(
    "says",
    [
        {}, google("FALSE"), azure(EventType="Freeze"), azure(EventType="New"),
        azure(Resources=["other"]), azure(Resources="mine"), azure_list(), azure_list({}),
    ],
    ids=["404", "FALSE", "a pause", "unknown", "another host", "no list", "none", "no event"],
)  # fmt: skip
def test_what_a_source_says_of_others_or_of_a_pause_is_no_notice(
    server: Server, says: dict[str, Said]
) -> None:
    assert question(server, says).read() == {}


def test_aws_is_asked_with_a_token_that_is_replaced_once_it_has_run_out(server: Server) -> None:
    asked = aws(server)
    for _ in range(2):
        assert asked.read() == {}
    assert [method for method, _, _ in server.asked].count("PUT") == 1
    aws(server, "another")
    assert asked.read() == {}


def test_google_and_azure_are_asked_with_their_headers_and_a_half_minute_counts_from_the_notice(
    server: Server,
) -> None:
    asked = question(server, google("TRUE"))
    ((_, first),), ((_, again),) = asked.read().items(), asked.read().items()
    assert first is not None and again is not None and again <= first
    question(server, azure()).read()
    headers = [{name.lower(): value for name, value in each.items()} for _, _, each in server.asked]
    assert [each.get("metadata-flavor") for each in headers] == ["Google"] * 2 + [None] * 2
    assert [each.get("metadata") for each in headers] == [None] * 2 + ["true"] * 2


@pytest.mark.fault
@pytest.mark.parametrize(
    ("content", "most", "is_clear"),
    [
        ("", 120, True), ("\n", 120, True), ("30", 30, True), ("0", LEAST_S, True),
        (in_future(DAY_S).isoformat(), DAY_S, True),
        (str(in_future(DAY_S).timestamp()), DAY_S, True),
        (" 45.5 s", 120, False), ("nan", 120, False), ("-3", 120, False),
        ("2030-01-01T00:00:00", 120, False), ("x" * 9999, 120, False),
    ],
    ids=["empty", "blank", "30", "0", "iso", "epoch", "a unit", "nan", "negative", "no zone",
         "long"],
)  # fmt: skip
def test_a_file_that_appears_is_a_notice_whatever_time_it_says(
    tmp_path: Path, content: str, most: float, is_clear: bool
) -> None:
    path = tmp_path / "notice"
    asked = FileNotice(str(path), 120.0)
    assert asked.read() == {}
    path.write_text(content)
    ((name, left_s),) = asked.read().items()
    assert name == f"file:{path}" and left_s is not None and most / 2 < left_s <= most
    assert ("expected seconds" in asked.problem) is not is_clear and bool(asked.problem) != is_clear
    path.unlink()
    assert asked.read() == {}


@pytest.mark.fault
def test_what_is_no_file_is_a_notice_too_and_nobody_waits_at_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("pipe", "bytes", "."):
        assert len(FileNotice(str(tmp_path / name), 120.0).read()) == 1


# ------------------------------------------------------------------ hostile and broken servers


@pytest.mark.fault
@pytest.mark.parametrize(
    ("first", "more", "pause_s"),
    [
        (b"", b"", 0.02),
        (b"", b"X", 0.02),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"A" * 65536, 0.0),
        (b"\x00\xff SSH-2.0 \r\n\r\n", None, 0.0),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", None, 0.0),
    ],
    ids=["no answer", "slow headers", "endless", "garbage", "cut"],
)
def test_a_server_that_misbehaves_is_left_within_the_time(
    first: bytes, more: bytes | None, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "TIMEOUT_S", 0.3)
    has_gone = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):  # the other end has gone away
                connection.sendall(first)
                while more is not None and not has_gone.wait(pause_s):
                    connection.sendall(more)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(PeerError):
            GcpNotice(f"http://127.0.0.1:{listener.getsockname()[1]}").read()
        has_gone.set()
        thread.join(60)


@pytest.mark.fault
@pytest.mark.parametrize(
    "said",
    [
        Said(302, headers={"Location": "http://127.0.0.1:1/elsewhere"}), Said(500), Said(403),
        Said(text="no json"), Said(text="[1]"), Said(text="[" * 50_000), Said(text=b"\xff"),
        *ends("soon").values(), *ends("2030-01-01T00:00:00").values(),
        Said(text='{"action": "stop"}'),
        Said(text=json.dumps({"action": "stop", "time": PAST}) + " " * notices.MOST_BYTES),
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_an_error_of_one_kind(server: Server, said: Said) -> None:
    with pytest.raises(PeerError):
        question(server, {ACTION: said}).read()


def test_who_is_not_the_metadata_server_is_not_believed_and_named(server: Server) -> None:
    server.says[PREEMPTED] = Said(text="TRUE")
    with pytest.raises(PeerError, match="no answer of Google"):
        GcpNotice(server.address).read()
    with pytest.raises(PeerError, match=r"status 404 and no token \(IMDSv2\)"):
        AwsNotice(server.address).read()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PeerError, match="refused"):
        GcpNotice(f"http://127.0.0.1:{port}").read()


@pytest.mark.fault
def test_no_proxy_of_the_environment_is_asked(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert question(server, google("TRUE")).read().keys() == {"gcp preempted"}


# ------------------------------------------------------------------ the watch


class Heard:
    """A watch of a source, and its notices."""

    def __init__(self, asked: Question) -> None:
        self.told: list[str] = []
        self.watch = NoticeWatch(
            NoticeSource("gcp"), asked, lambda name, left_s: self.told.append(name),
            lambda name: self.told.append(f"not {name}"), 2.0,
        )  # fmt: skip


def test_an_event_that_is_there_no_more_is_withdrawn_once(server: Server) -> None:
    heard = Heard(question(server, google("TRUE")))
    assert heard.watch.look() == 2.0
    server.says.update(google("FALSE"))
    for _ in range(2):
        heard.watch.look()
    assert heard.told == ["gcp preempted", "not gcp preempted"]


@pytest.mark.fault
def test_no_answer_withdraws_nothing_is_said_once_and_is_asked_for_more_rarely(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    heard = Heard(question(server, google("TRUE")))
    heard.watch.look()
    server.says[PREEMPTED] = Said(503)
    waits = [heard.watch.look() for _ in range(8)]
    assert waits[:3] == [4.0, 8.0, 16.0] and waits[-1] == LONGEST_S
    assert heard.told == ["gcp preempted"]
    assert caplog.text.count("gives no answer") == 1 and "status 503" in caplog.text
    server.says.update(google("TRUE"))
    assert heard.watch.look() == 2.0 and "answers again" in caplog.text


@pytest.mark.fault
def test_a_source_that_hangs_is_said_once_and_held_up_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As a file on a network disk that is gone."""
    begun, goes_on = threading.Event(), threading.Event()

    class Hanging(FileNotice):
        def read(self) -> notices.Notices:
            begun.set()
            goes_on.wait(60)
            return {}

    heard = Heard(Hanging("/gone", 120.0))
    thread = threading.Thread(target=heard.watch.look, daemon=True)
    thread.start()
    assert begun.wait(60)
    now = time.monotonic()
    for later_s in (-60.0, SILENT_S, 2 * SILENT_S):
        heard.watch.check(now + later_s)
    assert caplog.text.count("hangs: no answer") == 1
    goes_on.set()
    thread.join(60)
    heard.watch.check(now + 3 * SILENT_S)
    assert caplog.text.count("hangs: no answer") == 1


@pytest.mark.fault
def test_a_time_that_is_over_is_put_off_by_no_later_look(server: Server) -> None:
    heard = Heard(question(server, ends(PAST)))
    for _ in range(3):
        heard.watch.look()
    assert heard.told == ["aws stop"]


# ------------------------------------------------------------------ what a person says


@pytest.mark.parametrize(
    ("flags", "text", "sources"),
    [
        ((), "", ("signal",)),
        (("none",), "", ()),
        (("signal,file:/a:b,aws",), "", ("signal", "file:/a:b", "aws")),
        ((), '[preemption]\nsources = ["gcp"]\n', ("gcp",)),
        (("azure",), '[preemption]\nsources = ["gcp"]\n', ("azure",)),
    ],
)
def test_a_signal_alone_is_heeded_unless_a_person_names_others(
    tmp_path: Path, flags: tuple[str, ...], text: str, sources: tuple[str, ...]
) -> None:
    path = tmp_path / "elastic.toml"
    path.write_text(text)
    given = [word for value in flags for word in ("--preemption", value)]
    given += ["--elastic", str(path)] if text else []
    assert JobSpec.read(parse_options([*given, "x.py"])).config.preemption.sources == sources


def test_a_source_names_a_server_of_its_own() -> None:
    assert parse_source("aws") == NoticeSource("aws", METADATA)
    assert parse_source("gcp@http://127.0.0.1:81/") == NoticeSource("gcp", "http://127.0.0.1:81")


@pytest.mark.parametrize(
    "text",
    ["", "aws@", "aws@https://x", "aws@http://u@x", "aws@http://x/y", "gcp@http://x:99999",
     "file:", "file", "slurm:n1", "gcp@x"],
)  # fmt: skip
def test_what_is_no_source_is_refused_with_those_that_there_are(text: str) -> None:
    with pytest.raises(UsageError, match="signal, slurm, file:PATH, aws, gcp or azure"):
        parse_source(text)
