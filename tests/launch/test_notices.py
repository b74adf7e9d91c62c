"""Whoever may say that a host will be taken away is asked, believed no more than needed, and ends
nothing by what it says."""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from scalai.core.errors import PeerError, UsageError
from scalai.launch.agent import metadata, notices
from scalai.launch.agent.notice_watch import LONGEST_S, SILENT_S, NoticeWatch
from scalai.launch.agent.notices import AwsNotice, AzureNotice, FileNotice, GcpNotice, Question
from scalai.launch.config.elastic_config import METADATA, NoticeSource, parse_source
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job_spec import JobSpec
from support.metadata_server import Said, Server, metadata_server

ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
EVENTS, NAME = "/metadata/scheduledevents", "/metadata/instance/compute/name"
GOOGLE = {"Metadata-Flavor": "Google"}


@pytest.fixture
def server() -> Iterator[Server]:
    with metadata_server() as made:
        yield made


def in_future(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def aws(server: Server) -> AwsNotice:
    server.says["/latest/api/token"] = Said(text="secret")
    server.needs = {"X-aws-ec2-metadata-token": "secret"}
    return AwsNotice(server.address)


def azure(server: Server, *events: dict[str, Any]) -> AzureNotice:
    server.says[EVENTS] = Said(text=json.dumps({"DocumentIncarnation": 1, "Events": events}))
    server.says[NAME] = Said(text="mine")
    return AzureNotice(server.address)


def event(kind: str = "Preempt", host: str = "mine", **more: Any) -> dict[str, Any]:
    before = format_datetime(in_future(600), usegmt=True)
    whole = {"EventId": "7", "EventType": kind, "Resources": [host], "EventStatus": "Scheduled"}
    return {**whole, "NotBefore": before, **more}


def only(found: notices.Notices) -> tuple[str, float | None]:
    ((name, left_s),) = found.items()
    return name, left_s


# ------------------------------------------------------------------ what each source says


def test_aws_is_asked_with_a_token_and_says_when(server: Server) -> None:
    question = aws(server)
    assert question.read() == {}, "404 is no notice"
    server.says[ACTION] = Said(
        text=json.dumps({"action": "terminate", "time": in_future(120).isoformat()})
    )
    name, left_s = only(question.read())
    assert name == "aws terminate" and left_s is not None and 60 < left_s <= 122
    assert [method for method, _, _ in server.asked].count("PUT") == 1
    assert question.read().keys() == {name}


def test_an_aws_token_that_has_run_out_is_replaced(server: Server) -> None:
    question = aws(server)
    question.read()
    server.says["/latest/api/token"] = Said(text="another")
    server.needs = {"X-aws-ec2-metadata-token": "another"}
    assert question.read() == {}


def test_a_rebalance_recommendation_has_no_deadline(server: Server) -> None:
    question = aws(server)
    server.says[REBALANCE] = Said(text=json.dumps({"noticeTime": in_future(0).isoformat()}))
    assert only(question.read()) == ("aws rebalance recommendation", None)


@pytest.mark.fault
def test_the_servers_own_clock_counts(server: Server) -> None:
    """A host whose clock is an hour ahead has its two minutes all the same."""
    answer = metadata.Answer(200, "", (at := in_future(3600)).timestamp())
    left_s = notices._left_s((at + timedelta(seconds=120)).isoformat(), answer, notices._iso)
    assert left_s == pytest.approx(120.0)


@pytest.mark.fault
def test_a_time_that_has_passed_leaves_a_moment(server: Server) -> None:
    question = aws(server)
    server.says[ACTION] = Said(text='{"action": "stop", "time": "2017-09-18T08:22:00Z"}')
    assert only(question.read()) == ("aws stop", notices.LEAST_S)


def test_google_says_true_and_its_half_minute_counts_from_then(server: Server) -> None:
    server.says[PREEMPTED] = Said(text="FALSE", headers=GOOGLE)
    question = GcpNotice(server.address)
    assert question.read() == {} and server.asked[0][2]["Metadata-Flavor"] == "Google"
    server.says[PREEMPTED] = Said(text="TRUE", headers=GOOGLE)
    first, again = only(question.read())[1], only(question.read())[1]
    assert first is not None and again is not None and again <= first <= notices.GCP_S


def test_who_is_not_googles_server_is_not_believed(server: Server) -> None:
    server.says[PREEMPTED] = Said(text="TRUE")
    with pytest.raises(PeerError, match="no answer of Google"):
        GcpNotice(server.address).read()


@pytest.mark.parametrize("kind", notices.AZURE_TAKES)
def test_azure_says_what_is_scheduled_for_this_host(server: Server, kind: str) -> None:
    name, left_s = only(azure(server, event(kind)).read())
    assert name == f"azure {kind} 7" and left_s is not None and 300 < left_s <= 602
    assert all(headers["Metadata"] == "true" for _, _, headers in server.asked)


@pytest.mark.fault
@pytest.mark.parametrize(
    "other", [event("Freeze"), event(host="other"), event(Resources="mine"), {}, event("New")]
)
def test_what_azure_says_of_others_or_of_a_pause_is_no_notice(
    server: Server, other: dict[str, Any]
) -> None:
    assert azure(server, other).read() == {}


def test_an_azure_event_that_has_begun_leaves_a_moment(server: Server) -> None:
    begun = event(EventStatus="Started", NotBefore="")
    assert only(azure(server, begun).read())[1] == notices.LEAST_S


@pytest.mark.parametrize("content", ["", "\n", "30", "0", "iso", "epoch"])
def test_a_file_that_appears_is_a_notice_and_says_when(tmp_path: Path, content: str) -> None:
    path, later = tmp_path / "notice", in_future(300)
    question = FileNotice(str(path), 120.0)
    assert question.read() == {}
    path.write_text(
        {"iso": later.isoformat(), "epoch": str(later.timestamp())}.get(content, content)
    )
    name, left_s = only(question.read())
    most = {"30": 30.0, "0": notices.LEAST_S, "iso": 300.0, "epoch": 300.0}.get(content, 120.0)
    assert name == f"file:{path}" and left_s is not None and most - 60 < left_s <= most
    assert not question.problem
    path.unlink()
    assert question.read() == {}


@pytest.mark.fault
@pytest.mark.parametrize("content", [" 45.5 s", "nan", "-3", "2030-01-01T00:00:00", "x" * 9999])
def test_a_file_that_says_no_time_is_a_notice_all_the_same(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notice"
    path.write_text(content)
    question = FileNotice(str(path), 120.0)
    left_s = only(question.read())[1]
    assert left_s is not None and 60 < left_s <= 120 and "expected seconds" in question.problem


@pytest.mark.fault
def test_what_is_no_file_is_a_notice_too_and_nobody_waits_at_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("pipe", "bytes", "."):
        assert len(FileNotice(str(tmp_path / name), 120.0).read()) == 1


# ------------------------------------------------------------------ hostile and broken servers


def slow_headers(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"X")
        time.sleep(0.02)


def no_answer(connection: socket.socket) -> None:
    connection.recv(1)
    time.sleep(30)


def endless(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"A" * 65536)


def garbage(connection: socket.socket) -> None:
    connection.sendall(b"\x00\xff SSH-2.0 \r\n\r\n")


def cut(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")


@pytest.mark.fault
@pytest.mark.parametrize("misbehave", [slow_headers, no_answer, endless, garbage, cut])
@pytest.mark.parametrize("kind", [AwsNotice, GcpNotice, AzureNotice])
def test_a_server_that_misbehaves_is_left_within_the_time(
    misbehave: Any, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata.ask, "__defaults__", ("GET", 0.3))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                try:
                    misbehave(connection)
                except OSError:
                    pass  # whoever asked has gone away

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(PeerError):
            kind(f"http://127.0.0.1:{listener.getsockname()[1]}").read()


@pytest.mark.fault
@pytest.mark.parametrize(
    "said",
    [
        Said(302, headers={"Location": "http://127.0.0.1:1/elsewhere"}), Said(500), Said(403),
        Said(text="no json"), Said(text="[1]"), Said(text="[" * 50_000), Said(text=b"\xff"),
        Said(text='{"action": "stop", "time": "soon"}'), Said(text='{"action": "stop"}'),
        Said(text='{"action": "stop", "time": "2030-01-01T00:00:00"}'),
        Said(text="x" * (metadata.MOST_BYTES + 1)),
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_an_error_of_one_kind(server: Server, said: Said) -> None:
    question = aws(server)
    server.says[ACTION] = said
    with pytest.raises(PeerError):
        question.read()


def test_a_server_that_gives_no_token_is_named(server: Server) -> None:
    with pytest.raises(PeerError, match=r"status 404 and no token \(IMDSv2\)"):
        AwsNotice(server.address).read()


def test_nobody_listens() -> None:
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
    server.says[PREEMPTED] = Said(text="TRUE", headers=GOOGLE)
    assert GcpNotice(server.address).read().keys() == {"gcp preempted"}


# ------------------------------------------------------------------ the watch


class Heard:
    """A watch of a source, and what it has told."""

    def __init__(self, question: Question) -> None:
        self.told: list[str] = []
        self.watch = NoticeWatch(
            NoticeSource("gcp"), question, lambda name, left_s: self.told.append(name),
            lambda name: self.told.append(f"not {name}"), 2.0,
        )  # fmt: skip


def test_an_event_that_is_there_no_more_is_withdrawn_once(server: Server) -> None:
    server.says[PREEMPTED] = Said(text="TRUE", headers=GOOGLE)
    heard = Heard(GcpNotice(server.address))
    assert heard.watch.look() == 2.0
    server.says[PREEMPTED] = Said(text="FALSE", headers=GOOGLE)
    for _ in range(2):
        heard.watch.look()
    assert heard.told == ["gcp preempted", "not gcp preempted"]


@pytest.mark.fault
def test_no_answer_withdraws_nothing_is_said_once_and_is_asked_for_more_rarely(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server.says[PREEMPTED] = Said(text="TRUE", headers=GOOGLE)
    heard = Heard(GcpNotice(server.address))
    heard.watch.look()
    server.says[PREEMPTED] = Said(503)
    waits = [heard.watch.look() for _ in range(8)]
    assert waits[:3] == [4.0, 8.0, 16.0] and waits[-1] == LONGEST_S
    assert heard.told == ["gcp preempted"]
    assert caplog.text.count("gives no answer") == 1 and "status 503" in caplog.text
    server.says[PREEMPTED] = Said(text="TRUE", headers=GOOGLE)
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
    question = aws(server)
    server.says[ACTION] = Said(text='{"action": "stop", "time": "2017-09-18T08:22:00Z"}')
    heard = Heard(question)
    for _ in range(3):
        heard.watch.look()
    assert heard.told == ["aws stop"]


# ------------------------------------------------------------------ what a person says


def sources(*flags: str, text: str | None = None, folder: Path | None = None) -> tuple[str, ...]:
    given = list(flags)
    if text is not None and folder is not None:
        (folder / "elastic.toml").write_text(text)
        given += ["--elastic", str(folder / "elastic.toml")]
    return JobSpec.read(parse_options([*given, "x.py"])).config.preemption.sources


def test_a_signal_alone_is_heeded_unless_a_person_names_others(tmp_path: Path) -> None:
    assert sources() == ("signal",)
    assert sources("--preemption", "none") == ()
    assert sources("--preemption", "signal,file:/a:b,aws") == ("signal", "file:/a:b", "aws")
    text = '[preemption]\nsources = ["gcp"]\n'
    assert sources(text=text, folder=tmp_path) == ("gcp",)
    assert sources("--preemption", "azure", text=text, folder=tmp_path) == ("azure",)


def test_a_source_names_a_server_of_its_own() -> None:
    assert parse_source("aws") == NoticeSource("aws", METADATA)
    assert parse_source("gcp@http://127.0.0.1:81/") == NoticeSource("gcp", "http://127.0.0.1:81")


@pytest.mark.parametrize(
    "text",
    ["", "aws@", "aws@https://x", "aws@http://u@x", "aws@http://x/y", "gcp@http://x:99999",
     "file:", "file", "slurm", "gcp@x"],
)  # fmt: skip
def test_what_is_no_source_is_refused_with_those_that_there_are(text: str) -> None:
    with pytest.raises(UsageError, match="signal, file:PATH, aws, gcp or azure"):
        parse_source(text)
