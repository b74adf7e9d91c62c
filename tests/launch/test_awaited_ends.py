"""Killed workers are waited for, and not for ever."""

import subprocess
import time

import pytest

from scalai.launch.agent import awaited_ends


@pytest.mark.fault
@pytest.mark.parametrize(
    ("ends_s", "is_over"),
    [(0.3, False), (60.0, False), (60.0, True)],
    ids=["it ends", "it does not", "its agent ends"],
)
def test_a_killed_worker_whose_memory_the_kernel_still_holds_is_waited_for(
    ends_s: float,
    is_over: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As where its device hangs; for ever it is not."""
    monkeypatch.setattr(awaited_ends, "GONE_REPORT_S", 0.1)
    monkeypatch.setattr(awaited_ends, "GONE_S", 30.0 if is_over else 1.5)
    began = time.monotonic()
    with subprocess.Popen(["sleep", str(ends_s)]) as process:
        with awaited_ends.awaited_ends([process.pid, 1 << 22], lambda: is_over):
            pass
        has_ended = process.poll() is not None
        process.kill()
    assert has_ended == (ends_s < 1) and time.monotonic() - began < 25
    assert (f"event=stuck pids={process.pid}" in caplog.text) == (not has_ended)
