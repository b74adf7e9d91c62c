"""What the launcher does beside its agent."""

import threading

import pytest

from scalai.launch import run


def test_a_loop_that_stands_still_does_not_outlive_a_second_signal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run, "STOP_S", 0.1)
    forever = threading.Event()
    loop = threading.Thread(target=forever.wait, daemon=True)
    loop.start()
    run._wait(loop, [15, 15])
    assert loop.is_alive() and "event=stuck" in caplog.text
    forever.set()
    run._wait(loop, [])
    assert not loop.is_alive()
