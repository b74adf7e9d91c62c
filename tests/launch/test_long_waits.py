"""A wait that has no deadline is said."""

import logging
import threading

import pytest

from scalai.launch.slow_files import said
from support.coordinator_line import wait_until

pytestmark = pytest.mark.fault

DEADLINE_S = 60.0


def test_what_takes_long_is_said_and_said_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "scalai")

    def lines() -> list[str]:
        return [text for text in caplog.messages if "event=waiting for the disk" in text]

    with said("the disk", 0.05):
        wait_until(lambda: len(lines()) >= 2, "it is said twice")
    count, threads = len(lines()), threading.enumerate()
    for thread in threads:
        if thread.name == "long-wait":
            thread.join(DEADLINE_S)
    assert len(lines()) == count, "and never when it is over"


def test_what_is_done_at_once_is_not_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "scalai")
    with pytest.raises(OSError, match="full"), said("the disk"):
        raise OSError("full")
    assert not caplog.messages
