"""What machines read of a job, and the file by which they steer it."""

import http.client
import importlib.util
import json
import logging
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml

from scalai.core.errors import RefusedError, UsageError
from scalai.launch.config.flags import parse_options
from scalai.launch.coordinator import feeds
from scalai.launch.coordinator.control_file import (
    ControlFile,
    Drain,
    Order,
    Snapshot,
    read_order,
    unsafe,
)
from scalai.launch.coordinator.feeds import EventsFile, MetricsFile, MetricsServer, OnEvent
from scalai.launch.coordinator.person_calls import Scale
from scalai.launch.coordinator.sight import Lookout
from scalai.launch.log_events import MILESTONES, MOST_JSON, read_line
from scalai.launch.logs import JsonLines
from support.coordinator_line import DEADLINE_S, Line
from support.lines import as_event
from support.needed import need
from support.waiting import wait_until

need("prometheus_client", "pip install 'scalai[metrics]'")

from scalai.launch.coordinator.meters import CONTENT_TYPE, METERS, Meters  # noqa: E402

MONITORING = Path(__file__).parents[2] / "configs" / "monitoring"
PAGE = Path(__file__).parents[2] / "docs" / "monitoring.md"


# ---------------------------------------------------------------------- a line as a value


@pytest.mark.parametrize(
    ("line", "facts", "text"),
    [
        ("event=lost host=b: its connections", {"event": "lost", "host": "b"}, "its connections"),
        ("generation=3 round=2 event=x took_s=0.25", {"generation": 3, "took_s": 0.25}, ""),
        ("event=exit code=1 reason='it\\'s \"over\" a=1'", {"reason": 'it\'s "over" a=1'}, ""),
        ("waits for a=1", {}, "waits for a=1"),
        ("event=x is_well=False none=None big=1e400", {"is_well": False, "none": None}, ""),
        ("event=x name='torn", {"name": "'torn"}, ""),
        ("event=metrics address=127.0.0.1:80 here", {"address": "127.0.0.1:80"}, "here"),
    ],
)
def test_a_line_of_the_log_is_read_back(line: str, facts: dict[str, Any], text: str) -> None:
    found, rest = read_line(line)
    assert facts.items() <= found.items() and rest == text


def test_an_event_has_its_host_level_and_facts_and_is_never_too_long() -> None:
    event = as_event("generation=3 round=2 event=lost host=b: silent for 15 s", cause="lost")
    found = json.loads(event.to_line())
    assert found.pop("time").endswith("+00:00")
    assert found == {
        "schema": 1, "level": "WARNING", "from": "coordinator", "event": "lost", "host": "b",
        "round": 2, "generation": 3, "facts": {"cause": "lost"}, "text": "silent for 15 s",
    }  # fmt: skip
    large = as_event("event=resized", hosts={f"host-{n}": 8 for n in range(10_000)}).to_line()
    assert len(large) <= MOST_JSON and json.loads(large)["event"] == "resized"


def test_a_json_log_has_one_object_a_line_with_tracebacks_inside() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        given = ("scalai.launch", logging.ERROR, __file__, 1, "event=error %s", ("in it",))
        record = logging.LogRecord(*given, sys.exc_info())
    (line,) = JsonLines("host-a").format(record).splitlines()
    found = json.loads(line)
    assert (found["from"], found["event"], found["level"]) == ("host-a", "error", "ERROR")
    assert found["text"].startswith("in it\nTraceback") and "two\nlines" in found["text"]


EVENTS = sorted((Path(__file__).parents[1] / "data").glob("*/reports/events.jsonl"))


@pytest.mark.parametrize("path", EVENTS, ids=[path.parts[-3] for path in EVENTS])
def test_events_of_each_release_have_their_fields(path: Path) -> None:
    events = [json.loads(line) for line in path.read_text().splitlines()]
    fields = {"schema", "time", "level", "from", "event", "host", "round", "generation", "facts",
              "text"}  # fmt: skip
    assert all(fields <= event.keys() and event["schema"] == 1 for event in events)
    changes = [event["facts"] for event in events if event["event"] == "resized"]
    assert [(each["kind"], each["cause"]) for each in changes] == [
        ("notice", "leaving"), ("grow", "joined"),
    ]  # fmt: skip
    assert all(each["paused_s"] > 0 and each["before"] != each["after"] for each in changes)


# ---------------------------------------------------------------------- flags


def test_abbreviations_of_several_flags_are_the_scripts_own() -> None:
    """argparse looks at all words, behind the script too."""
    given = ("--metrics", "m.jsonl", "--log", "x", "--control", "--on=1")
    assert parse_options(["--nproc-per-n", "2", "script.py", *given]).script_args == given


@pytest.mark.parametrize("wrong", [["--metrics-port", "70000"], ["--on-event", "'x"]])
def test_a_wrong_value_is_refused(wrong: list[str]) -> None:
    with pytest.raises(UsageError, match=wrong[0]):
        parse_options([*wrong, "script.py"])


def test_metrics_without_their_package_are_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RefusedError, match="prometheus-client"):
        parse_options(["--metrics-port", "0", "script.py"])


# ---------------------------------------------------------------------- metrics


def pair(line: Line) -> None:
    """Two hosts that train; either could go on alone."""
    for agent in [line.join("a"), line.join("b")]:
        agent.wait_for("start")


class Seen:
    """Metrics of a coordinator in the test's time."""

    def __init__(self, line: Line) -> None:
        self.meters = Meters("j")
        line.log.hears.append(self.meters.hear)
        self._lookout, self._live = Lookout(line.live), line.live

    def look(self) -> None:
        self.meters.see(self._lookout.look())

    def value(self, name: str, **labels: str) -> float | None:
        found = self.meters.registry.get_sample_value(f"scalai_{name}", {"job": "j", **labels})
        return None if found is None else float(found)


@pytest.mark.fault
def test_a_lost_host_is_seen_in_counts_gauges_and_seconds(line: Line) -> None:
    seen = Seen(line)
    seen.look()
    pair(line)
    line.pass_time(5.0)
    seen.look()
    assert seen.value("workers") == 4 and seen.value("hosts", state="training") == 2
    assert seen.value("degree", kind="dp") == 4 and seen.value("coordinator_term") == 1
    line.pass_time(10.0)
    seen.look()
    assert seen.value("training_seconds_total") == pytest.approx(15.0, abs=1.5)
    line.agents[1].die()
    line.until(lambda: line.logged("event=resized"), "the other goes on")
    seen.look()
    assert seen.value("failures_total", kind="host") == 1
    assert seen.value("changes_total", kind="recovery", outcome="done") == 1
    assert seen.value("workers") == 2 and seen.value("hosts", state="training") == 1
    assert seen.value("log_events_total", level="WARNING") == 2, "lost, restart"
    assert seen.value("pause_seconds_count", kind="recovery") == 1


def test_steps_are_counted_once_and_lost_ones_have_their_seconds(line: Line) -> None:
    seen = Seen(line)
    agent = line.join("a")
    agent.wait_for("start")

    def step(newest: int) -> None:
        line.live.members["a"].newest = newest
        line.pass_time(2.0)
        seen.look()

    seen.look()
    for newest in (10, 20, 20, 30):
        step(newest)
    assert seen.value("steps_total") == 30 and seen.value("samples_total") == 30 * 12
    assert seen.value("step_seconds_count") == 20, "the first ones have no start"
    assert seen.value("step_seconds_sum") == pytest.approx(6.0, abs=2.0)
    resized = {"kind": "recovery", "cause": "lost", "steps_lost": 5, "seconds": {"stop": 1.0}}
    seen.meters.hear(as_event("event=resized", paused_s=3.0, **resized))
    assert seen.value("steps_lost_total", cause="lost") == 5
    assert 0 < (seen.value("wasted_seconds_total") or 0) < 5 * 2


@pytest.mark.fault
def test_a_new_coordinator_counts_no_step_that_another_one_has_seen(line: Line) -> None:
    seen = Seen(line)
    line.join("a").wait_for("start")
    line.live._began_at = -1
    for newest in (5000, 5010):
        line.live.members["a"].newest = newest
        line.pass_time(2.0)
        seen.look()
    assert seen.value("steps_total") == 10


def test_no_label_has_values_without_an_end() -> None:
    meters = Meters("j")
    before = len(meters.text().splitlines())
    for number in range(200):
        for text in (
            f"event=lost host=h{number}: silent", f"event=workers_failed host=h{number} kind='x'",
            f"event=snapshot committed={number} step={number}", "event=withdrawn it",
            f"event=snapshot step={number} refused: it is torn", "event=snapshot took_s=0.015",
            f"event=notice host=h{number} source='aws:x{number}' left_s=30",
        ):  # fmt: skip
            meters.hear(as_event(text, change=f"kind-{number}"))
        meters.hear(as_event("event=resized", kind="degrees", cause=f"c{number}", steps_lost=1))
    assert len(meters.text().splitlines()) == before
    for outcome in ("committed", "refused"):
        labels = {"job": "j", "outcome": outcome}
        assert meters.registry.get_sample_value("scalai_snapshots_total", labels) == 200


def test_a_notice_is_shown_while_its_host_leaves(line: Line) -> None:
    seen = Seen(line)
    pair(line)
    line.agents[1].unanswered.add("prepare")
    line.agents[1].tell("leaving", source="aws", left_s=120.0, is_final=True)
    seen.look()
    left_s = seen.value("notice_remaining_seconds", host="b", source="aws")
    assert left_s is not None and 60 < left_s <= 120
    assert seen.value("hosts", state="draining") == 1
    line.agents[1].die()
    seen.look()
    assert seen.value("notice_remaining_seconds", host="b", source="aws") is None


def named_in(text: str) -> set[str]:
    return set(re.findall(r"\bscalai_[a-z_]+", text))


def known_names() -> set[str]:
    """Names of all series."""
    meters = Meters("j")
    meters.hear(as_event("event=archived generation=1"))
    return {sample.name for family in meters.registry.collect() for sample in family.samples} | {
        f"{family.name}{end}"
        for family in meters.registry.collect()
        for end in {"counter": ("_total",), "gauge": ("",), "info": ("_info",)}.get(
            family.type, ("_sum", "_count", "_bucket")
        )
    }


def test_every_metric_of_dashboard_and_rules_exists() -> None:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    exprs = [target["expr"] for panel in panels for target in panel["targets"]]
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
    assert len(dashboard["panels"]) - len(panels) == 6 and all(panel["title"] for panel in panels)
    names = named_in("\n".join([*exprs, *(rule["expr"] for rule in rules)]))
    assert len(names) > 20 and not names - known_names()


ROWS = re.compile(r"^\| (`scalai_[^|]*) \| (\w+) \|", re.MULTILINE)
ENDINGS = {"counter": "_total", "info": "_info"}


def test_the_page_has_every_metric_with_its_kind_and_labels() -> None:
    listed = {
        (name, kind, tuple(filter(None, labels.replace(" ", "").split(","))))
        for names, kind in ROWS.findall(PAGE.read_text())
        for name, _, labels in re.findall(r"`(\w+)({([^}]*)})?`", names)
    }
    known = set()
    for name, meter in METERS.items():
        kind = meter.kind.__name__.lower()
        labels = tuple(meter.labels)
        if kind == "info":
            labels = "version", "framework", "framework_version"
        known.add((f"scalai_{name}{ENDINGS.get(kind, '')}", kind, labels))
    assert listed == known


def test_every_event_of_the_command_is_on_the_page() -> None:
    page = PAGE.read_text()
    assert not {name for name in MILESTONES if f"`{name}`" not in page}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian: prometheus)")
@pytest.mark.parametrize("words", ["check rules alerts.yml", "test rules alerts_test.yml"])
def test_promtool_agrees_with_the_rules(words: str) -> None:
    done = subprocess.run(
        ["promtool", *words.split()], cwd=MONITORING, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian: prometheus)")
def test_promtool_agrees_with_the_metrics(line: Line) -> None:
    seen = Seen(line)
    line.join("a").wait_for("start")
    seen.look()
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=seen.meters.text(), capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ---------------------------------------------------------------------- a scrape


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = MetricsServer(("127.0.0.1", 0), lambda: b"scalai_workers 2\n", CONTENT_TYPE)
    wait_until(lambda: server.address, "it listens")
    yield server
    server.close()
    wait_until(
        lambda: all(each.name != "metrics" for each in threading.enumerate()), "its thread ends"
    )


def get(server: MetricsServer, path: str = "/metrics") -> tuple[int, bytes]:
    assert server.address is not None
    asked = http.client.HTTPConnection(*server.address, timeout=DEADLINE_S)
    try:
        asked.request("GET", path)
        answer = asked.getresponse()
        return answer.status, answer.read()
    finally:
        asked.close()


def test_metrics_are_served_and_nothing_else(server: MetricsServer) -> None:
    assert get(server) == (200, b"scalai_workers 2\n")
    assert get(server, "/etc/passwd")[0] == 404


@pytest.mark.fault
def test_scrapers_that_say_nothing_hold_up_nobody(server: MetricsServer) -> None:
    assert server.address is not None
    before = threading.active_count()
    silent = [socket.create_connection(server.address) for _ in range(3 * feeds.SCRAPERS)]
    wait_until(lambda: get(server)[0] == 200, "another one is served")
    most = before + feeds.SCRAPERS + 1
    wait_until(lambda: threading.active_count() <= most, "no more than so many are served")
    for each in silent:
        each.close()


@pytest.mark.fault
def test_a_port_in_use_costs_a_line_and_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = other.getsockname()
        server = MetricsServer(address, lambda: b"x 1\n", CONTENT_TYPE, again_s=0.1)
        wait_until(lambda: "event=metrics_failed" in caplog.text, "it is said")
    wait_until(lambda: server.address == address, "it listens")
    assert get(server)[0] == 200 and caplog.text.count("event=metrics_failed") == 1
    server.close()


@pytest.mark.fault
def test_without_file_descriptors_it_pauses_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits, pauses = resource.getrlimit(resource.RLIMIT_NOFILE), list[float]()

    def pause(seconds: float) -> bool:
        pauses.append(seconds)
        if len(pauses) == 3:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        return False

    server = MetricsServer(("127.0.0.1", 0), lambda: b"x 1\n", CONTENT_TYPE)
    scraper = socket.socket()
    with scraper:
        try:
            wait_until(lambda: server.address, "it listens")
            assert server._listener is not None and server.address is not None
            server._listener._pause = pause
            resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
            scraper.connect(server.address)
            wait_until(lambda: len(pauses) >= 3, "it has paused")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert caplog.text.count("event=metrics_failed") == 1
        wait_until(lambda: get(server)[0] == 200, "a scraper is served")
    server.close(DEADLINE_S)


# ---------------------------------------------------------------------- files


@pytest.mark.fault
def test_the_metrics_file_is_whole_or_absent_and_goes_with_the_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "scalai")
    path = tmp_path / "there" / "scalai.prom"
    file = MetricsFile(path, lambda: b"scalai_workers 2\n", every_s=0.02)
    wait_until(lambda: "event=metrics_file_failed" in caplog.text, "it is said")
    path.parent.mkdir()
    wait_until(path.exists, "it is written")
    assert path.read_bytes() == b"scalai_workers 2\n"
    wait_until(lambda: "event=metrics_file_back" in caplog.text, "it is said")
    assert caplog.text.count("event=metrics_file_failed") == 1
    file.close(DEADLINE_S)
    assert not list(path.parent.iterdir())


@pytest.mark.fault
def test_events_of_an_earlier_coordinator_stay_and_its_torn_line_is_closed(tmp_path: Path) -> None:
    path = tmp_path / feeds.EVENTS
    for number in (1, 2):
        file = EventsFile(tmp_path)
        file.hear(as_event(f"event=join host=h{number} slots=8"))
        file.close(DEADLINE_S)
        with path.open("a") as torn:
            torn.write('{"schema": 1, "ti')
    whole = [line for line in path.read_text().splitlines() if line.endswith("}")]
    assert [json.loads(line)["host"] for line in whole] == ["h1", "h2"]


@pytest.mark.fault
def test_events_without_a_place_cost_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "reports"
    folder.write_text("a file, where a folder should be")
    caplog.set_level("INFO", "scalai")
    file = EventsFile(folder)
    for number in range(3):
        file.hear(as_event(f"event=join host=h{number} slots=8"))
    file.close(DEADLINE_S)
    assert caplog.text.count("event=events_failed") == 1
    folder.unlink()
    file.hear(as_event("event=join host=h9 slots=8"))
    file.close(DEADLINE_S)
    assert "h9" in (folder / feeds.EVENTS).read_text() and "event=events_back" in caplog.text


# ---------------------------------------------------------------------- a command for each event


def test_a_command_gets_what_matters_one_event_after_another(tmp_path: Path) -> None:
    told = tmp_path / "told"
    # The folder is there twice if two of them run at once.
    hook = OnEvent(
        f"sh -c 'mkdir {told}.one && cat >> {told}; echo >> {told}; rmdir {told}.one'", "j"
    )
    for text in ("event=lost host=b: gone", "event=plan took_s=1", "event=resized paused_s=2"):
        hook.hear(as_event(text))
    hook.close(DEADLINE_S)
    assert [json.loads(line)["event"] for line in told.read_text().splitlines()] == [
        "lost", "resized",
    ]  # fmt: skip


@pytest.mark.fault
def test_a_command_that_hangs_ends_with_its_group_and_fails_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = tmp_path / "held"
    hook = OnEvent(f'sh -c "sleep 1000 & echo $! >> {held}; wait"', "j", timeout_s=0.5)
    for _ in range(2):
        hook.hear(as_event("event=lost host=b: gone"))
    hook.close(DEADLINE_S)
    pids = [int(line) for line in held.read_text().split()]
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "its group is gone")
    assert len(pids) == 2 and caplog.text.count("event=on_event_failed") == 1


@pytest.mark.fault
def test_events_that_come_faster_than_the_command_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(feeds, "MOST_WAITING", 3)
    hook = OnEvent("sleep 1000", "j")
    for _ in range(10):
        hook.hear(as_event("event=lost host=b: gone"))
    assert caplog.text.count("event=on_event_behind") == 1
    hook.close(0.1)  # the job ends: nothing waits for a command that hangs


# ---------------------------------------------------------------------- orders by a file


@pytest.mark.parametrize(
    ("text", "order"),
    [
        ("", None),
        ("# nothing\n\n", None),
        ("scale --nproc 4 --degrees 'tp2 pp1'\n", Scale(4, None, "tp2 pp1", dry_run=False)),
        ("# for tonight\nscale --nnodes 2", Scale(None, 2, None, dry_run=False)),
        ("drain host-3   # its fan is loud\n", Drain("host-3")),
        ("snapshot", Snapshot()),
    ],
)
def test_an_order_is_read(text: str, order: Order | None) -> None:
    assert read_order(text) == order


@pytest.mark.parametrize(
    "text",
    [
        "scale", "scale --nproc", "scale --nproc 0", "scale --nproc many", "scale --steps 3",
        "drain", "drain a b", "resume --generation 3", "snapshot now", "drain a\ndrain b",
        "drain 'a", "rm -rf /", f"scale --nproc {'9' * 400}",
    ],
)  # fmt: skip
def test_what_is_no_order_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        read_order(text)


REGULAR, FOLDER = 0o100000, 0o040000


@pytest.mark.parametrize(
    ("file", "owner", "folder", "is_safe"),
    [
        (0o640, 7, 0o755, True),
        (0o660, 8, 0o2775, True),  # the folder's group controls the job
        (0o666, 7, 0o755, False),
        (0o644, 7, 0o777, False),
        (0o644, 8, 0o1777, False),
        (0o644, 7, 0o1777, True),
        (0o644, 0, 0o1777, True),
    ],
)
def test_only_those_of_the_folder_give_orders(
    file: int, owner: int, folder: int, is_safe: bool
) -> None:
    found: Any = SimpleNamespace(st_mode=REGULAR | file, st_uid=owner)
    place: Any = SimpleNamespace(st_mode=FOLDER | folder, st_uid=7)
    assert (unsafe(found, place, 7) == "") is is_safe


def test_an_order_is_carried_out_once_and_none_at_the_start(tmp_path: Path) -> None:
    path, given = tmp_path / "orders", list[Order]()

    def obey(order: Order) -> str:
        given.append(order)
        return "done"

    def look() -> None:
        for _ in range(3):
            file.look()

    path.write_text("drain of-the-run-before")
    file = ControlFile(path, obey, pytest.fail)
    look()
    assert not given
    path.write_text("drain a")
    look()
    assert given == [Drain("a")]
    path.unlink()
    look()
    path.write_text("drain a")
    look()
    assert given == [Drain("a"), Drain("a")]


@pytest.mark.fault
def test_what_is_no_file_of_orders_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, told = tmp_path / "orders", list[str]()
    file = ControlFile(path, lambda order: pytest.fail("it is carried out"), told.append)
    for make in (
        lambda: os.mkfifo(path),
        lambda: path.symlink_to("/etc/passwd"),
        lambda: path.write_bytes(b"#" * 5000),
        lambda: path.write_bytes(b"drain \xff"),
        lambda: [path.touch(), path.chmod(0o666)],  # type: ignore[func-returns-value]
    ):
        caplog.clear()
        told.clear()
        make()
        for _ in range(4):
            file.look()
        assert caplog.text.count("event=control_refused") == 1, caplog.text
        assert len(told) == 1 and told[0] in caplog.text
        path.unlink()
        file.look()


def test_orders_do_what_a_person_with_the_token_does(line: Line) -> None:
    pair(line)
    line.pass_time(2.0)
    with pytest.raises(UsageError, match="Hosts: a, b"):
        line.coordinator.obey(Drain("c"))
    with pytest.raises(UsageError, match="99"):
        line.coordinator.obey(Scale(None, None, "tp99", dry_run=False))
    assert line.coordinator.obey(Snapshot())
    assert line.logged("event=snapshot_asked")
    assert "TP" in line.coordinator.obey(Scale(2, None, None, dry_run=False))
    line.coordinator.obey(Drain("b"))
    assert line.live.state.hosts["b"].is_leaving and line.logged("event=leaving host=b")
