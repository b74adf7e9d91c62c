"""What may answer nobody holds nobody up, and nothing is lost that there is room for."""

import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator

import pytest

from scalai.launch import logs
from scalai.launch.logs import PatientHandler
from scalai.launch.patient_writer import PatientWriter
from support.coordinator_line import wait_until

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
    began = time.monotonic()
    for name in ("a", "b", "left out", "left out"):
        writer.do(lambda name=name: written.append(name))  # type: ignore[misc]
    assert time.monotonic() - began < PATIENCE_S / 2 and written == []
    goes_on.set()
    wait_until(lambda: bool(back), "all is written")
    assert (written, back, late) == (["a", "b"], [2], [True])
    writer.do(lambda: written.append("c"))
    assert written[-1] == "c", "it is waited for again"


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
    while "event=log_back" not in text:
        text += os.read(reading, size).decode()
    lines = text.strip().splitlines()
    assert lines[:-1] == [f"line {number}" for number in range(50)]
    assert lines[-1].startswith("event=log_back 0 lines are left out")
