"""What a planner learns is computed beside the job: nobody waits for it."""

import threading
from pathlib import Path

import pytest

from scalai.core.degrees.degrees import Degrees
from scalai.core.job.succession import remember
from scalai.core.messages.shared import JsonText
from scalai.core.planner import preference
from scalai.core.planner.fit import calibrate
from scalai.core.planner.meter import ChangeTime
from scalai.core.planner.preference import Measured
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.live_job import LiveJob
from support.coordinator_line import NoStores
from support.lines import Lines
from support.waiting import wait_until

SCRIPT = (
    "pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 8 --bf16 "
    "--padded-vocab-size 1024"
)


def live_job(folder: Path, log: Lines, term: int = 1) -> LiveJob:
    config = folder / "elastic.toml"
    config.write_text('[planner]\ngpu = "a100-80gb"\n')
    flags = ["--nnodes", "1:2", "--nproc-per-node", "2", "--elastic", str(config)]
    spec = JobSpec.read(parse_options([*flags, *SCRIPT.split()]))
    return LiveJob(
        spec, "127.0.0.1", NoStores(), log, threading.RLock(), term, is_successor=term > 1
    )


def test_what_a_coordinator_had_measured_is_computed_beside_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Lines()
    before, after = live_job(tmp_path, Lines()), live_job(tmp_path, log, term=2)
    for degrees, seconds in ((Degrees(1, 1, 4), 2.0), (Degrees(2, 1, 2), 1.0)):
        found = before.sizing.with_measured(Measured(degrees, 1, 50, seconds), ChangeTime(10.0))
        assert found is not None
        before.sizing.adopt(*found)
    may_compute = threading.Event()

    def slowly(*given: object) -> object:
        assert may_compute.wait(60)
        return calibrate(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(preference, "calibrate", slowly)
    known = remember(before.state, before.run, 1, 1, before.sizing.request)
    after.memory.hear(known, has_begun=False, is_own=False)
    assert after.sizing.request == before.sizing.request, "at once"
    assert not any("event=recalled" in line for line in log)
    may_compute.set()
    wait_until(lambda: any("event=recalled layouts=2" in line for line in log), "it is computed")
    assert after.sizing.recalibrated() is None


@pytest.mark.fault
def test_a_slip_of_what_is_computed_beside_the_job_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slip(*_: object) -> None:
        raise ZeroDivisionError("a slip")

    log = Lines()
    before, after = live_job(tmp_path, Lines()), live_job(tmp_path, log, term=2)
    found = before.sizing.with_measured(Measured(Degrees(1, 1, 4), 1, 50, 2.0), ChangeTime(10.0))
    assert found is not None
    before.sizing.adopt(*found)
    monkeypatch.setattr(preference, "calibrate", slip)
    known = remember(before.state, before.run, 1, 1, before.sizing.request)
    after.memory.hear(known, has_begun=False, is_own=False)
    wait_until(lambda: any("event=ahead failed" in line for line in log), "it is told")
    assert after.sizing.request == before.sizing.request


def test_a_request_of_another_shape_is_told_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = live_job(tmp_path, Lines()), live_job(tmp_path, Lines(), term=2)
    own = after.sizing.request
    known = remember(before.state, before.run, 1, 1, JsonText.of(["of", "another", "shape"]))
    assert after.memory.hear(known, has_begun=False, is_own=False) == known
    assert after.sizing.request == own and "event=not_taken_over" in caplog.text
