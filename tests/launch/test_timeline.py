"""What is noticed and what comes of it: one report a change."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from scalai.core.job import membership as m
from scalai.launch.coordinator import timeline as timelines
from scalai.launch.coordinator.spending import TRAINS, Spending
from scalai.launch.coordinator.timeline import Cause, Timeline
from scalai.store.atomic import replace_file
from support.coordinator_line import DEADLINE_S
from support.waiting import wait_until


def finish_start(timeline: Timeline) -> None:
    timeline.note(round=1)
    timeline.close()


def test_the_first_reason_stands_while_a_change_is_under_way(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path, lambda line: None)
    finish_start(timeline)
    timeline.begin("host b drains")
    timeline.begin("host c joined")
    timeline.note(round=2)
    timeline.close()
    report = json.loads((tmp_path / "resize-0002.json").read_text())
    assert report["reason"] == "host b drains"


def test_a_report_is_amended_by_what_old_workers_tell_late(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path, lambda line: None)
    timeline.amend("proven: nothing was reported yet", 0.5)
    finish_start(timeline)
    timeline.begin("scale")
    timeline.note(round=2, function="not proven: not yet")
    timeline.close()
    timeline.amend("proven: equal", 0.5)
    reports = [json.loads(path.read_text()) for path in sorted(tmp_path.iterdir())]
    assert [each.get("function") for each in reports] == [None, "proven: equal"]
    assert reports[1] == timeline.reports[-1] and reports[1]["prove_s"] == 0.5


def test_what_led_to_nothing_is_not_the_reason_of_the_next_change() -> None:
    timeline = Timeline(None, lambda line: None)
    finish_start(timeline)
    timeline.begin("host c joined")
    assert timeline.is_open and not timeline.has_round
    timeline.forget()
    timeline.begin("scale")
    timeline.note(round=2)
    assert timeline.has_round
    assert timeline.close()["reason"] == "scale"


def test_the_relaunch_counts_from_the_first_commit() -> None:
    now = [0.0]
    timeline = Timeline(None, lambda line: None, lambda: now[0])
    for now[0] in (1.0, 3.0):
        timeline.mark_first("committed")
    assert (timeline.since("committed"), timeline.since("never")) == (2.0, 0.0)


@pytest.mark.fault
def test_a_report_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    logged: list[str] = []
    folder = tmp_path / "reports"
    timeline = Timeline(folder, logged.append)
    assert not logged
    shutil.rmtree(folder)
    folder.write_text("a file, where a folder should be: as a full disk")
    finish_start(timeline)
    assert len(timeline.reports) == 1
    assert "event=report_failed" in logged[-1] and "the job goes on" in logged[-1]
    Timeline(folder / "below", logged.append)
    assert "there will be no reports" in logged[-1]


@pytest.mark.fault
def test_reports_of_an_earlier_run_stay(tmp_path: Path) -> None:
    for reason in ("first run", "second run"):
        timeline = Timeline(tmp_path, lambda line: None)
        finish_start(timeline)
        timeline.begin(reason)
        timeline.note(round=2)
        timeline.close()
    found = [json.loads(path.read_text())["reason"] for path in sorted(tmp_path.iterdir())]
    assert found == ["start", "first run", "start", "second run"]


def test_the_pause_begins_where_training_stands_still() -> None:
    """At a planned change that is the snapshot at the stop; at a failure, the failure."""
    now = [0.0]
    timeline = Timeline(None, lambda line: None, lambda: now[0])
    timeline.note(round=1)
    assert "paused_s" not in timeline.close()
    timeline.begin("scale")
    timeline.note(round=2)
    timeline.enter(m.Phase.RUNNING, m.Phase.BUILDING, "", lambda part: 0.0)
    now[0] = 10.0
    timeline.enter(m.Phase.SNAPSHOTTING, m.Phase.COMMITTING, "", lambda part: 4.0)
    timeline.enter(m.Phase.COMMITTING, m.Phase.STOPPING, "", lambda part: 0.0)
    now[0] = 11.0
    planned = timeline.close()
    assert (planned["paused_s"], planned["total_s"]) == (5.0, 11.0)
    timeline.note(round=3)
    timeline.enter(m.Phase.RUNNING, m.Phase.FREEZING, "rank 0 died", lambda part: 0.0)
    now[0] = 13.0
    failed = timeline.close()
    assert (failed["paused_s"], failed["total_s"], failed["reason"]) == (2.0, 2.0, "rank 0 died")


def test_a_checkpoint_of_the_scripts_own_costs_only_the_steps_behind_it() -> None:
    timeline = Timeline(None, lambda line: None)
    timeline.note(round=2, step=0, steps_lost=22)
    assert timeline.correct(0) is None
    assert timeline.correct(20) == 2 and timeline.close()["steps_lost"] == 2


@pytest.mark.fault
def test_a_folder_that_answers_nobody_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system that hangs, say: the coordinator would stand still with it."""
    answers = threading.Event()

    def hang(*given: Any, **how: Any) -> None:
        assert answers.wait(DEADLINE_S)
        replace_file(*given, **how)

    logged: list[str] = []
    monkeypatch.setattr(timelines, "REPORT_S", 0.2)
    timeline = Timeline(tmp_path, logged.append)
    monkeypatch.setattr(timelines, "replace_file", hang)
    finish_start(timeline)
    assert "event=report_late" in logged[-1] and str(tmp_path) in logged[-1]
    timeline.begin("scale")
    timeline.note(round=2)
    timeline.close()
    assert len(timeline.reports) == 2 and not list(tmp_path.iterdir())
    answers.set()
    wait_until(lambda: "event=report_back" in logged[-1], "it answers again")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "resize-0001.json", "resize-0002.json",
    ]  # fmt: skip


def test_time_goes_to_training_or_to_one_reason() -> None:
    spending = Spending(0.0)
    spending.note(TRAINS, 10.0)
    spending.note("checkpoint_save", 25.0)
    spending.note("elastic_scale_up", 26.0)
    spending.note(None, 28.0)
    spending.note(None, 50.0)
    assert {use: s for use, s in spending.seconds.items() if s} == {
        "program_startup": 10.0, "training": 15.0, "checkpoint_save": 1.0, "elastic_scale_up": 2.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("cause", "worlds", "kind"),
    [
        ("start", (None, 4), "start"), ("joined", (2, 4), "grow"), ("joined", (), "grow"),
        ("asked", (4, 3), "shrink"), ("asked", (4, 4), "degrees"), ("planner", (), "degrees"),
        ("leaving", (4, 2), "notice"), ("lost", (4, 2), "recovery"), ("failed", (4, 4), "recovery"),
    ],
)  # fmt: skip
def test_a_change_has_a_kind(cause: Cause, worlds: tuple[int | None, ...], kind: str) -> None:
    timeline = Timeline(None, lambda line: None)
    if cause != "start":
        finish_start(timeline)
        timeline.begin("it", cause)
    if worlds:
        timeline.note(world_before=worlds[0], world_after=worlds[1])
    assert timeline.kind == kind


@pytest.mark.fault
def test_a_loss_that_workers_noticed_first_is_the_reason() -> None:
    timeline = Timeline(None, lambda line: None)
    finish_start(timeline)
    timeline.begin("rank 0: Connection closed by peer", "failed")
    timeline.begin("host b is lost", "lost")
    timeline.note(round=2, steps_lost=3)
    report = timeline.close()
    assert (report["cause"], report["reason"]) == ("lost", "host b is lost")
    assert report["steps_lost_why"]
