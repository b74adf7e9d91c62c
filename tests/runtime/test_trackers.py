"""A change of the job is noted in the trackers that the user's script has open."""

import json
import logging
import os
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scalai.runtime.trackers import note_round
from support.agents import TINY_JOB, Agents
from support.needed import need
from support.waiting import wait_until

TRACKED_JOB = TINY_JOB.with_name("tracked_job.py")
BLOCK = 32768
"""Bytes of a block of a ``.wandb`` file: LevelDB's log format, behind 7 bytes of its own."""


@pytest.mark.fault
@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_that_hangs_or_fails_holds_up_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_over, written = threading.Event(), list[dict[str, float]]()

    def hang(numbers: dict[str, float], **more: Any) -> None:
        is_over.wait(60.0)
        written.append(numbers)

    def fail(*_: Any, **more: Any) -> None:
        raise OSError("the disk is full")

    def module(write: Any) -> SimpleNamespace:
        run = SimpleNamespace(log=write, info=SimpleNamespace(run_id="r"))
        return SimpleNamespace(run=run, active_run=lambda: run, log_metrics=write)

    caplog.set_level(logging.DEBUG, "scalai.runtime.trackers")
    monkeypatch.setitem(sys.modules, name, module(hang))
    note_round({"tp": 2}, 3)
    assert not written, "it returns while the tracker hangs"
    is_over.set()
    wait_until(lambda: written == [{"scalai/tp": 2}], "it is written")
    for broken in (module(fail), SimpleNamespace()):
        caplog.clear()
        monkeypatch.setitem(sys.modules, name, broken)
        note_round({"tp": 2}, 3)
        wait_until(lambda: f"event=no_tracker_note name={name}" in caplog.text, "it is said")


def test_no_tracker_is_imported_nor_written_without_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: Any = SimpleNamespace(run=None, active_run=lambda: None, log_metrics=pytest.fail)
    monkeypatch.setitem(sys.modules, "wandb", closed)
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    note_round({"tp": 2}, 3)
    assert "mlflow" not in sys.modules
    assert not [each for each in threading.enumerate() if each.name.startswith("note-")]


def rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Step and values of each row in a ``.wandb`` file."""
    from wandb.proto import wandb_internal_pb2

    wire: Any = wandb_internal_pb2
    data, at, content = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        content += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole one, or the last part of one
            record = wire.Record.FromString(content)
            content = b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                yield (
                    record.history.step.num,
                    {
                        item.key or ".".join(item.nested_key): json.loads(item.value_json)
                        for item in items
                    },
                )


@pytest.mark.campaign
@pytest.mark.turns
@pytest.mark.timeout(600)
def test_each_round_is_noted_beside_the_scripts_own_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("wandb", "mlflow"):
        need(package, "pip install -e '.[trackers]'", of_file=False)
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    environment = {
        "TRACKED": str(tmp_path), "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    script = [
        str(TRACKED_JOB), "--steps", "100000", "--step-s", "0.1",
        "--metrics", str(tmp_path / "metrics.jsonl"), "--enough", str(tmp_path / "enough"),
    ]  # fmt: skip
    degrees = '2 = "tp2"\n1 = "tp1"'
    with Agents(tmp_path, degrees, script, nodes="1", environment=environment) as agents:
        agents.start("a")
        agents.wait_for_all(2)
        agents.scale(nproc=1)
        agents.wait_for_all(1)
        (tmp_path / "enough").touch()
        assert agents.exit_code("a") == 0, agents.logs()
    expected = [(1, 2, 2), (2, 1, 1)]
    files = {path.resolve() for path in tmp_path.glob("wandb/*/*.wandb")}
    found = [row for path in sorted(files, key=os.path.getmtime) for row in rows(path)]
    notes = [row for _, row in found if "scalai/round" in row]
    named = [tuple(row[f"scalai/{key}"] for key in ("round", "tp", "ranks")) for row in notes]
    assert named == expected, found
    assert all(row["own"] == step for step, row in found if "own" in row), "steps are the script's"
    client = MlflowClient(str(tmp_path / "mlruns"))
    run = (tmp_path / "mlflow-run").read_text()
    kept = [client.get_metric_history(run, f"scalai/{key}") for key in ("round", "tp", "ranks")]
    assert list(zip(*[[each.value for each in of] for of in kept], strict=True)) == expected
    assert [each.step for each in kept[0]] == sorted(each.step for each in kept[0])
