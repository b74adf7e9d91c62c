"""``scalai history`` and ``scalai plot``: what they read, what they leave out, and what a picture
shows."""

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scalai.core.dataset.step_lines import StepLine, line_text
from scalai.launch.commands import history as history_command
from scalai.launch.commands import history_picture
from scalai.launch.commands.history_picture import MOST_LAYOUTS, MOST_ROWS, picture
from scalai.launch.commands.job_history import (
    History,
    Losses,
    Point,
    read_folder,
    read_resize,
    timed,
)
from scalai.launch.commands.job_losses import read_losses, read_tensorboard, tensorboard_of
from scalai.launch.config.endpoint import write_card, write_ending
from scalai.launch.coordinator.timeline import PHASES
from support.command import Capsys, logged, run
from support.coordinator_line import TOKEN, running

from .conftest import OpenLine

BEGIN = 1_795_727_000.0
SAVED = sorted((Path(__file__).parents[1] / "data").glob("*/reports"))


def report(number: int, **more: Any) -> dict[str, Any]:
    """The report of a change every 100 s, after 90 s of one step a second."""
    change = {
        "before": "TP2·PP1·DP2", "proven": 8, "bytes_local": 1_500_000, "bytes_remote": 500_000,
        "paused_s": 10.0, "function": "proven: equal",
    }  # fmt: skip
    return {
        "reason": "host b drains" if number else "start", "round": number + 1,
        "step": 90 * number, "after": f"TP2·PP1·DP{2 + number % 2}",
        "workers": {"a": 4, "b": 2 * (number % 2)}, "tensors": 8, "at": BEGIN + 100 * number,
        "seconds": dict.fromkeys(PHASES, 1.0), **(change if number else {}), **more,
    }  # fmt: skip


def write(folder: Path, reports: Sequence[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    for number, each in enumerate(reports, start=1):
        (folder / f"resize-{number:04d}.json").write_text(json.dumps(each))
    return folder


def history(*reports: dict[str, Any]) -> History:
    return History("j", tuple(map(read_resize, reports)))


LOST = report(1, reason="host b is lost", step=60, steps_lost=30, steps_lost_why="no replica")
"""Steps 61 to 90 were made, and are made again."""


# ---------------------------------------------------------------------- reports


@pytest.mark.parametrize("reports", SAVED, ids=[folder.parent.name for folder in SAVED])
def test_the_reports_of_earlier_releases_are_read(reports: Path) -> None:
    start, left, joined = read_folder(reports, "tiny").resizes
    assert (start.is_start, left.is_start) == (True, False)
    assert [change.after for change in (left, joined)] == ["TP1·PP1·DP1", "TP2·PP1·DP1"]
    assert (left.workers, joined.workers) == ({"a": 1}, {"a": 1, "b": 1})
    assert left.proof.is_whole and left.bytes_moved == 528 and left.steps_lost == 0
    assert set(joined.seconds) == set(PHASES)


def test_what_a_report_lacks_is_unknown() -> None:
    bare = {"step": 4, "after": "TP1·PP1·DP1", "paused_s": 2.0, "steps_lost": "many", "workers": 7}
    found = read_resize({**bare, "seconds": {"move": -1, "proof": 10**400, "new": 2.5}}, at=7.0)
    assert (found.at, found.steps_lost, found.bytes_moved) == (7.0, None, None)
    assert (found.reason, found.before, found.ranks) == ("unknown", None, 0)
    assert found.seconds == {"new": 2.5} and str(found.proof) == "-"


@pytest.mark.fault
def test_damaged_reports_are_left_out_by_name(tmp_path: Path, capsys: Capsys) -> None:
    write(tmp_path, [report(0), report(1), report(2), report(3), report(4)])
    torn = (tmp_path / "resize-0002.json").read_text()[:40]
    (tmp_path / "resize-0002.json").write_text(torn)
    (tmp_path / "resize-0003.json").write_text("[]")
    (tmp_path / "resize-0004.json").write_text("[" * 100_000)
    code, said = logged(capsys, "history", tmp_path)
    assert code == 0 and "1 change: 10.0 s without a step, 0 steps lost, 2.0 MB moved" in said
    for name in ("resize-0002.json", "resize-0003.json", "resize-0004.json"):
        assert f"note: {name} is left out: " in said


def test_the_table_has_a_row_for_each_change(tmp_path: Path, capsys: Capsys) -> None:
    write(tmp_path, [report(0), LOST, report(2, before=None, reason="a\x1b[2J\nb")])
    code, said = logged(capsys, "history", tmp_path)
    assert code == 0
    head, start, lost, why, other, summed = said.splitlines()
    assert re.sub(" {2,}", "|", lost.strip()).split("|")[2:] == [
        "host b is lost", "TP2·PP1·DP2 -> TP2·PP1·DP3", "6 on 2 hosts", "10.0 s", "30", "2.0 MB",
        "8 of 8 tensors, function proven",
    ]  # fmt: skip
    assert "steps lost" in head and "start" in start
    # A new coordinator does not know what ran before: the change before it does.
    assert "TP2·PP1·DP3 -> TP2·PP1·DP2" in other and "\x1b" not in said
    assert why.strip() == "steps lost: no replica"
    assert summed == "2 changes: 20.0 s without a step, 30 steps lost, 4.0 MB moved"
    code, said = logged(capsys, "history", tmp_path, "--json")
    found = json.loads(said)
    assert (found["changes"], found["steps_lost"], found["bytes_moved"]) == (2, 30, 4_000_000)
    assert found["reports"][1] == LOST


@pytest.mark.fault
def test_failures_between_changes_come_from_the_events(tmp_path: Path, capsys: Capsys) -> None:
    write(tmp_path, [report(0), report(1)])
    event = {
        "schema": 1, "time": "2026-11-27T21:05:00.000+00:00", "level": "WARNING", "host": "b",
        "from": "coordinator", "event": "workers_failed", "facts": {}, "text": "rank 3 died",
    }  # fmt: skip
    others: list[dict[str, Any]] = [{"event": "no_replica"}, {"schema": 2}, {"from": "b"}]
    lines = [event, *({**event, **other} for other in others), 7]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"schema": 1, "ti'
    (tmp_path / "events.jsonl").write_text(text)
    code, said = logged(capsys, "history", tmp_path)
    assert code == 0 and said.count("workers failed: host b: rank 3 died") == 1
    assert "note: 3 lines of events.jsonl are torn or of another version" in said


def test_a_run_that_begins_anew_ends_the_one_before_at_its_last_event() -> None:
    """Hours may lie between two runs in one folder."""
    again = report(0, at=BEGIN + 9000, step=140, reason="start")
    given = [read_resize(each) for each in (report(0), report(1), again)]
    events = [BEGIN + 1, BEGIN + 150, BEGIN + 8999, BEGIN + 9050]
    stretches = History("j", tuple(given), heard=events).stretches
    assert [each.end for each in stretches] == [BEGIN + 90, BEGIN + 150, BEGIN + 9050]
    assert [each.end for each in History("j", tuple(given)).stretches] == [BEGIN + 90, None, None]


# ---------------------------------------------------------------------- where a history is found


def test_a_running_job_tells_its_changes(
    open_line: OpenLine, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of its folder, if that is here, and those that only the coordinator has."""
    reports = tmp_path / "reports"
    line = open_line("--report-dir", str(reports))
    folder = tmp_path / "store" / "j"
    folder.mkdir(parents=True, mode=0o700)
    write_card(folder, line.address, TOKEN)
    asked = ("history", "j", "--store-dir", folder.parent)
    with running(line):
        code, said = logged(capsys, *asked)
        assert code == 2 and "has made no step yet" in said and "--report-dir" in said
        line.live.timeline.reports += [report(1), report(2)]
        write(reports, [report(0), report(1)])
        code, said = logged(capsys, *asked, "--json")
        found = json.loads(said)
        assert code == 0 and [each["round"] for each in found["reports"]] == [1, 2, 3]
        code, said = logged(capsys, "plot", *asked[1:], "-o", tmp_path / "j.svg")
        assert code == 0 and "without losses; name them" in said and (tmp_path / "j.svg").is_file()
        # A folder that the script names, and nobody has asked for.
        monkeypatch.setattr(history_command, "tensorboard_of", lambda *given: tmp_path / "none")
        code, said = logged(capsys, "plot", *asked[1:], "-o", tmp_path / "j.svg")
        assert code == 0 and re.search("note: without losses: .*none is no directory", said)


def test_an_ended_job_is_known_by_its_name(tmp_path: Path, capsys: Capsys) -> None:
    folder = tmp_path / "j"
    folder.mkdir(mode=0o700)
    reports = write(tmp_path / "reports", [report(0), report(1)])
    asked = ("history", "j", "--store-dir", tmp_path)
    write_ending(folder, 75, "saved", None)
    code, said = logged(capsys, *asked)
    assert code == 1 and "no job 'j' runs here" in said and "exit code 75: saved" in said
    write_ending(folder, 75, "saved", reports)
    code, said = logged(capsys, *asked)
    assert code == 0 and "1 change" in said and "exit code 75: saved" in said


@pytest.mark.fault
@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["history", "{}/empty"], 2, "has no reports (resize-*.json). A job writes a report of"),
        (["history", "{}/none"], 2, "is no directory. Name a job, or the folder of its reports."),
        (["plot", "{}/reports", "-o", "{}/x.gif"], 2, "ends in .png, .svg, .html"),
        (["plot", "{}/reports", "-o", "{}/no/x.svg"], 2, "there is no folder"),
        (["plot", "{0}/reports", "{0}/reports", "-o", "{0}/x.html"], 2, "are drawn as .png or"),
        (["plot", "{}/reports", "-o", "/proc/x.svg"], 1, "x.svg cannot be written: "),
        (["plot", "{}/reports", "-o", "{}/x.svg", "--tensorboard", "{}/empty"], 2, "no event file"),
        (["plot", "{}/reports", "-o", "{}/x.svg", "--losses", "{}/empty"], 2, "with a loss"),
        (["plot", "{}/reports", "-o", "{}/x.svg", "--losses", "{}/odd"], 2, "1 lines, none"),
    ],
)
def test_what_cannot_be_read_or_written_is_said(
    words: list[str], code: int, why: str, tmp_path: Path, capsys: Capsys
) -> None:
    write(tmp_path / "reports", [report(0), report(1)])
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").write_text("\x00\n")
    found, said = logged(capsys, *(word.format(tmp_path) for word in words))
    assert found == code and why in said, said
    assert "Traceback" not in said and not (tmp_path / "x.svg").exists()


def test_several_jobs_are_drawn_as_their_devices_over_time(tmp_path: Path, capsys: Capsys) -> None:
    for name in ("one", "two"):
        write(tmp_path / name, [report(0), report(1)])
    jobs = tmp_path / "one", tmp_path / "two"
    code, said = logged(capsys, "plot", *jobs, "-o", tmp_path / "x.svg")
    drawing = (tmp_path / "x.svg").read_text() if code == 0 else said
    assert code == 0 and drawing.count("<path") > 10, said


@pytest.mark.fault
@pytest.mark.parametrize("lacks", ["matplotlib", "tensorboard"])
def test_a_package_that_lacks_is_one_sentence(
    lacks: str, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, [report(0), report(1)])
    (tmp_path / "events.out.tfevents.1").touch()
    for name in [each for each in sys.modules if each.split(".")[0] == lacks]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, lacks, None)
    monkeypatch.delitem(sys.modules, history_picture.__name__)
    monkeypatch.delattr("scalai.launch.commands.history_picture")
    words = ("plot", tmp_path, "-o", tmp_path / "x.png")
    more = ("--tensorboard", tmp_path) if lacks == "tensorboard" else ()
    code, said = logged(capsys, *words, *more)
    assert code == 3 and f"{lacks} is not installed" in said and "scalai[plot]" in said


# ---------------------------------------------------------------------- losses


def test_steps_that_were_made_again_are_lost() -> None:
    points = tuple(Point(float(n), step, 1.0) for n, step in enumerate([1, 2, 3, 4, 3, 4, 5]))
    assert Losses("loss", points).lost == (False, False, True, True, False, False, False)


def test_steps_without_times_lie_between_the_changes() -> None:
    """The pause is free of steps, and lost ones come before it."""
    steps = [*range(1, 91), *range(61, 151)]
    found = timed([(step, 1.0) for step in steps], history(report(0), LOST), "loss").points
    times = [point.at - BEGIN for point in found]
    assert times == sorted(times)
    assert (times[0], times[60], times[89], times[90]) == pytest.approx((0, 60, 90, 100), abs=1)
    # The end of the last layout is unknown: the pace goes on.
    assert times[-1] == pytest.approx(190, rel=0.02)


@pytest.mark.fault
def test_losses_come_from_the_ledger_of_ranks(tmp_path: Path) -> None:
    for rank in (0, 1):
        lines = [(1, step) for step in range(1, 91)] + [(2, step) for step in range(61, 80)]
        text = "".join(
            line_text(StepLine("r", round, step, 4 * step, 1, step / 10 if rank else None, 0.1))
            for round, step in lines
        )
        (tmp_path / f"rank-{rank}.jsonl").write_text(text[:-9])
    found = read_losses(tmp_path, history(report(0), LOST))
    assert [point.step for point in found.points] == [*range(1, 91), *range(61, 79)]
    assert sum(found.lost) == 30 and not found.is_timed


@pytest.mark.parametrize(("at", "is_of"), [(BEGIN + 50, True), (BEGIN - 999, False)])
def test_losses_of_another_time_are_asked_about(
    at: float, is_of: bool, tmp_path: Path, capsys: Capsys
) -> None:
    write(tmp_path, [report(0), report(1)])
    lines = [{"step": 1, "loss": 2.5, "at": at}, {"step": 2, "loss": 2.5, "at": at + 1}, {"at": 7}]
    (tmp_path / "loss.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = "plot", tmp_path, "--losses", tmp_path / "loss.jsonl", "-o", tmp_path / "x.svg"
    code, said = logged(capsys, *words)
    assert code == 0 and ("are they of another job?" in said) is not is_of


def test_losses_come_from_tensorboard(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    for round, steps in enumerate([range(1, 5), range(3, 7)]):
        with SummaryWriter(str(tmp_path / "runs" / str(round))) as writer:
            for step in steps:
                at = BEGIN + 10 * round + step
                writer.add_scalar("lm loss", step / 2, step, walltime=at)
                writer.add_scalar("lm loss vs samples", step / 2, 12 * step, walltime=at)
                writer.add_scalar("learning-rate", 0.1, step, walltime=at)
    found = read_tensorboard(tmp_path, None)
    assert [(point.step, point.loss) for point in found.points] == [
        (step, step / 2) for step in (1, 2, 3, 4, 3, 4, 5, 6)
    ]
    assert [point.step for point, lost in zip(found.points, found.lost, strict=True) if lost] == [
        3,
        4,
    ]
    assert not read_tensorboard(tmp_path, "lm loss vs samples").has_steps
    with pytest.raises(
        ValueError, match=r"--tag 'x' is no scalar.*'lm loss', 'lm loss vs samples'"
    ):
        read_tensorboard(tmp_path, "x")
    flags = ["--lr", "1", "--tensorboard-dir", "runs"]
    assert tensorboard_of(flags, tmp_path) == tmp_path / "runs"
    assert tensorboard_of(["--tensorboard-dir=none"], tmp_path) is None


# ---------------------------------------------------------------------- pictures


def texts(drawing: bytes) -> list[str]:
    """What an SVG of text says."""
    root = ElementTree.fromstring(drawing)
    return [
        "".join(each.itertext()).strip() for each in root.iter("{http://www.w3.org/2000/svg}text")
    ]


@pytest.fixture
def as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(history_picture.STYLE, "svg.fonttype", "none")


@pytest.mark.usefixtures("as_text")
def test_a_picture_shows_layouts_pauses_losses_and_lost_work() -> None:
    steps = [
        (step, 3.0 if step != 7 else float("nan")) for step in [*range(1, 91), *range(61, 150)]
    ]
    given = history(report(0), LOST, report(2, reason="$x^ and \x1b", before="TP2·PP1·DP3"))
    said = texts(picture(given, timed(steps, given, "lm loss"), "svg"))
    for words in (
        "TP2·PP1·DP2, 4 ranks", "TP2·PP1·DP3, 6 ranks", "2  host b is lost", "3  $x^ and \\x1b",
        "TP2·PP1·DP2 → TP2·PP1·DP3", "10.0 s", "30", "2.0 MB", "lost, and made again",
        "not finite, at 1 steps", "failures", "Layout (hatched: lost steps, made again)", "loss",
        "step", "seconds since the last step before the change",
    ):  # fmt: skip
        assert words in said, (words, said)
    assert any(each.startswith("seconds since 20") for each in said)


@pytest.mark.usefixtures("as_text")
@pytest.mark.fault
def test_many_changes_of_many_hosts_stay_few_labels() -> None:
    hosts = {f"node-{n}.example": 8 for n in range(20)}
    many = [
        report(n, after=f"TP1·PP1·DP{n % 40}", workers=hosts, steps_lost=n % 7) for n in range(201)
    ]
    steps = [(step, 1e30 if step == 99 else float("inf")) for step in range(1, 100_000)]
    given = history(*many)
    said = texts(picture(given, timed(steps, given, "loss"), "svg"))
    assert len(said) < 150 and f"{40 - MOST_LAYOUTS + 1} other layouts" in said
    assert not any("host b" in each for each in said) and "number of the change" in said


@pytest.mark.parametrize("count", [1, 2, 2 + MOST_ROWS])
def test_every_form_of_a_picture_is_written(count: int, tmp_path: Path) -> None:
    """Also of a job without a change, and of one whose changes took no time."""
    odd = {"seconds": {}, "paused_s": 0.0, "at": BEGIN, "workers": {}}
    write(tmp_path, [report(0), *(report(n, **odd) for n in range(1, count))])
    for form in ("png", "svg", "html"):
        assert run("plot", tmp_path, "-o", tmp_path / f"x.{form}") == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    ElementTree.parse(tmp_path / "x.svg")
    page = (tmp_path / "x.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and "</svg>" in page and "steps lost" in page
    assert not re.search(r"<(script|link|img)\b|<\?xml|<!DOCTYPE svg", page)
