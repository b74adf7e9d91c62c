"""What may answer nobody holds nobody up, and nothing is lost that there is room for."""

import fcntl
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from scalai.launch import logs
from scalai.launch.logs import PatientHandler, say
from scalai.launch.slow_files import PatientWriter
from support.coordinator_line import wait_until

pytestmark = pytest.mark.fault

PATIENCE_S = 60.0


def test_a_write_is_done_on_return() -> None:
    written, late = list[int](), list[object]()
    writer = PatientWriter("test", PATIENCE_S, lambda: late.append(True), late.append)
    for number in range(100):
        writer.do(lambda number=number: written.append(number))  # type: ignore[misc]
        assert written[-1] == number
    assert not late


def test_a_late_one_is_waited_for_once_until_all_is_written() -> None:
    written: list[str] = []
    goes_on = threading.Event()
    late, back = list[bool](), list[int]()
    writer = PatientWriter("test", 0.1, lambda: late.append(True), back.append, most=2)
    writer.do(lambda: goes_on.wait(PATIENCE_S))
    assert late == [True]
    writer._answer_s = PATIENCE_S
    assert not writer.drain(0.0)
    began = time.monotonic()
    for name in ("a", "b", "left out", "left out"):
        writer.do(lambda name=name: written.append(name))  # type: ignore[misc]
    assert time.monotonic() - began < PATIENCE_S / 2 and written == []
    goes_on.set()
    wait_until(lambda: bool(back), "all is written")
    assert (written, back, late) == (["a", "b"], [2], [True])
    assert writer.drain(0.0)
    writer.do(lambda: written.append("c"))
    assert written[-1] == "c", "it is waited for again"


def test_what_raises_is_said_and_others_are_written(caplog: pytest.LogCaptureFixture) -> None:
    writer = PatientWriter("test", PATIENCE_S, lambda: None, lambda left_out: None)

    def fail() -> None:
        raise KeyError("a slip")

    writer.do(fail)
    written = list[int]()
    writer.do(lambda: written.append(1))
    assert written == [1] and "event=not_written" in caplog.text and "a slip" in caplog.text


LINES = """
import logging
from scalai.launch.logs import configure
from scalai.launch.slow_files import drain
configure("test")
for number in range(2000):
    logging.getLogger("scalai").info("line %d", number)
drain(60.0)
"""


def test_a_process_that_ends_leaves_its_last_lines_to_a_slow_reader() -> None:
    with subprocess.Popen([sys.executable, "-c", LINES], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        time.sleep(3.0)  # 2,000 lines are more than a pipe takes
        said = process.stderr.read().decode()
        assert process.wait(PATIENCE_S) == 0
    assert said.count("line ") == 2000 and "left out" not in said


def test_a_process_whose_standard_error_is_closed_logs_nowhere() -> None:
    command = f"exec {sys.executable} -c '{LINES}' 2>&-"
    assert subprocess.run(["sh", "-c", command], timeout=PATIENCE_S, check=False).returncode == 0


@pytest.fixture
def halted() -> Iterator[tuple[int, int]]:
    """A pipe that takes no byte more: whoever is to read it has stopped."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writing, b" " * 4096)
    os.set_blocking(writing, True)
    yield reading, writing
    os.set_blocking(reading, False)
    for end in (reading, writing):
        os.close(end)


@pytest.mark.parametrize("may_wait", [True, False])
def test_a_log_that_nobody_reads_holds_nobody_up(
    halted: tuple[int, int], may_wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "READ_S", 0.1)
    reading, writing = halted
    os.set_blocking(writing, may_wait)
    size = fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)
    logger = logging.Logger("test")
    logger.addHandler(PatientHandler(writing))
    for number in range(50):
        logger.info("line %d", number)
    text = os.read(reading, size).decode()
    while "line 49\n" not in text:
        text += os.read(reading, size).decode()
    assert text.strip().splitlines() == [f"line {number}" for number in range(50)]


def test_how_many_lines_were_left_out_is_said(
    halted: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "READ_S", 0.1)
    reading, writing = halted
    logger, handler = logging.Logger("test"), PatientHandler(writing)
    handler._lines._most = 10
    logger.addHandler(handler)
    for number in range(50):
        logger.info("line %d", number)
    text = ""
    while "event=log_back" not in text:
        text += os.read(reading, 1 << 20).decode()
    left_out = 50 - text.count("line ")
    assert left_out >= 39 and f"event=log_back {left_out} lines are left out" in text


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("generation=3 round=2 event=went_back steps_lost=94", "WARNING"),
        ("event=lost host=b: its connections have ended", "WARNING"),
        ("event=restart host b is lost; 3 restarts left", "WARNING"),
        ("event=exit code=1 reason='no agent'", "ERROR"),
        ("event=exit code=75 reason='saved'", "INFO"),
        ("event=resized paused_s=2.1", "INFO"),
    ],
)
def test_what_a_job_loses_is_no_information_only(
    line: str, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "scalai")
    say(line)
    assert [record.levelname for record in caplog.records] == [level]
