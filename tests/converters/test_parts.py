"""One conversion by several processes that share nothing but the file system."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch

from scalai.converters import engine, journal
from scalai.converters.checkpoint import Checkpoint
from scalai.converters.consistency import verify
from scalai.converters.journal import Journal, RunPart, alone, try_lock
from scalai.converters.layouts import open_checkpoint
from scalai.core.errors import PeerError, StoreError, UsageError
from scalai.core.tensors.fingerprint import VERSION
from support.checkpoints import carry, lay_out, state, write

WIDTH = 256
SHAPES = {
    "embedding.word_embeddings.weight": (1024, WIDTH),
    **{f"decoder.layers.{n}.mlp.linear_fc2.weight": (WIDTH, 1024) for n in range(4)},
    "decoder.final_layernorm.weight": (WIDTH,),
}
DEGREES: dict[str, Any] = {"tp": 2, "pp": 4}
"""Eight files of equal size."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write(tmp_path_factory.mktemp("source") / "source", source=state(shapes=SHAPES))


def convert(
    source: Checkpoint, folder: Path, number: int = 1, count: int = 1, **degrees: int
) -> Mapping[str, Any] | None:
    """Do a part of a conversion into ``folder/new``; None: another one finishes it."""
    part = RunPart(number, count)
    report: Mapping[str, Any] | None = carry(
        source, folder / "new", part=part, **(degrees or DEGREES)
    )
    return report


def start(source: Checkpoint, destination: Path, part: str) -> "subprocess.Popen[str]":
    """Start a part as on a host of its own."""
    arguments = [source.directory, destination, "--tp", 2, "--pp", 4, "--workers", 1, "--json"]
    command = [sys.executable, "-m", "scalai.launch.cli", "reshard", *map(str, arguments)]
    return subprocess.Popen(
        [*command, "--part", part], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def last_events(processes: Sequence["subprocess.Popen[str]"]) -> list[str]:
    """Return the last event of each process, which must have ended well."""
    events = []
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        events.append(json.loads(out.splitlines()[-1])["event"])
    return events


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16])
def test_parts_are_whole_files_and_about_equal(count: int) -> None:
    sizes = [70, 3, 3, 50, 0, 20, 20, 20, 10]
    shares = [RunPart(number, count).files(sizes) for number in range(1, count + 1)]
    assert sorted(file for share in shares for file in share) == list(range(len(sizes)))
    loads = [sum(sizes[file] for file in share) for share in shares]
    assert max(loads) <= max(max(sizes), 1.34 * sum(sizes) / count)


@pytest.mark.parametrize("text", ["", "0/2", "3/2", "1", "1/0", "a/b", "-1/2", "1/2/3"])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--part"):
        RunPart.parse(text)


def test_three_processes_make_what_one_makes(tmp_path: Path, source: Checkpoint) -> None:
    processes = [start(source, tmp_path / "new", f"{number}/3") for number in (1, 2, 3)]
    assert sorted(last_events(processes)) == ["done", "part", "part"]
    carry(source, tmp_path / "one", **DEGREES)
    for path in sorted((tmp_path / "one").rglob("*.distcp")):
        other = tmp_path / "new" / path.relative_to(tmp_path / "one")
        assert other.read_bytes() == path.read_bytes()
    one, new = (json.loads((tmp_path / at / "scalai.json").read_text()) for at in ("one", "new"))
    assert one["fingerprints"] == new["fingerprints"]
    assert verify(open_checkpoint(tmp_path / "new"), 1) == verify(source, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "one"]
    assert not list((tmp_path / "new").glob(".*"))


def test_a_part_that_was_killed_is_started_again(tmp_path: Path, source: Checkpoint) -> None:
    first = start(source, tmp_path / "new", "1/2")
    assert first.stdout is not None
    events = (json.loads(line)["event"] for line in first.stdout)
    assert sum(1 for _ in zip(range(2), filter("progress".__eq__, events), strict=False)) == 2
    first.send_signal(signal.SIGKILL)  # its worker must not go on holding the journal
    first.communicate(timeout=60)
    second = start(source, tmp_path / "new", "2/2")
    assert last_events([second]) == ["part"]
    assert not (tmp_path / "new").exists()
    assert last_events([start(source, tmp_path / "new", "1/2")]) == ["done"]
    assert verify(open_checkpoint(tmp_path / "new"), 1) == verify(source, 1)
    assert convert(source, tmp_path, 2, 2)


def test_a_run_of_the_whole_does_what_parts_have_left(tmp_path: Path, source: Checkpoint) -> None:
    assert convert(source, tmp_path, 2, 3) is None
    report = convert(source, tmp_path)
    assert report is not None
    mine = RunPart(2, 3).files(
        [file.size_bytes for file in lay_out(source, **DEGREES).placed.files]
    )
    assert report["resumed_tasks"] == len(mine) > 0
    assert verify(open_checkpoint(tmp_path / "new"), 1) == verify(source, 1)


def test_more_parts_than_files_finish_too(tmp_path: Path, source: Checkpoint) -> None:
    ends = [convert(source, tmp_path, number, 3, tp=2, pp=1) for number in (1, 2, 3)]
    assert [end is None for end in ends] == [True, False, False]
    assert ends[1] == ends[2]


def test_a_destination_that_is_another_conversions_is_left_alone(
    tmp_path: Path, source: Checkpoint
) -> None:
    convert(source, tmp_path, 1, 2)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="begun with another source, target or --memory"):
        convert(source, tmp_path, 2, 2, tp=1, pp=2)
    for name in (".scalai-journal-1-of-4", RunPart(2, 2).journal):  # a stranger; the same part
        with (
            Journal(tmp_path / ".new.partial", "x", name),
            pytest.raises(PeerError, match="another process is writing"),
        ):
            convert(source, tmp_path, 2, 2)
        (tmp_path / ".new.partial" / name).unlink()
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / ".new.partial" / RunPart(1, 2).journal).rename(tmp_path / "kept")
    with pytest.raises(UsageError, match="in the way"):  # it may be of anybody
        convert(source, tmp_path)
    (tmp_path / "kept").rename(tmp_path / ".new.partial" / RunPart(1, 2).journal)
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "precious").write_text("data")
    with pytest.raises(UsageError, match="exists"):
        convert(source, tmp_path, 2, 2)


def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, source: Checkpoint, monkeypatch: MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(StoreError, match="cannot be locked"):
        convert(source, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_lock_beside_the_destination_is_held_by_one_and_goes(tmp_path: Path) -> None:
    counter, script = tmp_path / "counter", tmp_path / "add.py"
    counter.write_text("0")
    script.write_text(
        "import pathlib, sys\n"
        "from scalai.converters.journal import alone\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "for _ in range(60):\n"
        "    with alone(path.parent / 'new'):\n"
        "        path.write_text(str(int(path.read_text()) + 1))\n"
    )
    adders = [subprocess.Popen([sys.executable, script, counter]) for _ in range(3)]
    with alone(tmp_path / "new"):
        assert (tmp_path / ".new.lock").exists()
    assert [adder.wait(60) for adder in adders] == [0, 0, 0]
    assert counter.read_text() == "180"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["add.py", "counter"]


READ = """
import sys
from scalai.launch import cli
try:
    cli.main(sys.argv[1:])
except SystemExit as ended:
    assert not ended.code
print(open("/proc/self/io").read())
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="the kernel counts no bytes")
def test_each_part_reads_its_share_of_the_bytes(tmp_path: Path, source: Checkpoint) -> None:
    """Adding hosts must not add bytes that each of them reads."""
    # Along the first axis: what is cut along others is read by a mapping, which is not counted.
    arguments = [str(source.directory), str(tmp_path / "new"), "--tp", "1", "--pp", "4"]
    total = sum(path.stat().st_size for path in source.directory.glob("*.distcp"))
    read = []
    for part in ("1/4", "4/4", "plan"):
        mode = ["--dry-run"] if part == "plan" else ["--part", part]
        out = subprocess.run(
            [sys.executable, "-c", READ, "reshard", *arguments, "--workers", "1", *mode],
            check=True, capture_output=True, text=True, timeout=60,
        ).stdout  # fmt: skip
        found = re.search(r"rchar: (\d+)", out)
        assert found
        read.append(int(found[1]))
    *parts, planned = read
    # What is read of the source, and read back of the destination; a dry run reads neither.
    shares = [(size - planned) / (2 * total) for size in parts]
    assert all(0.2 < share < 0.3 for share in shares), shares


@pytest.mark.fault
def test_a_wait_for_another_process_is_told_of_and_ends_with_it(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SILENT_S", 0.0)
    other = open(tmp_path / ".there.lock", "a+b")
    assert try_lock(other)
    reported: list[str] = []

    class Told(logging.Handler):
        """Ends the other process once it is told of."""

        def emit(self, record: logging.LogRecord) -> None:
            reported.append(record.getMessage())
            other.close()

    handler = Told()
    journal.log.addHandler(handler)
    try:
        with alone(tmp_path / "there"):
            assert reported and ".there.lock" in reported[0]
    finally:
        journal.log.removeHandler(handler)
        other.close()
    assert not list(tmp_path.iterdir())


def test_a_part_of_another_version_of_fingerprints_is_not_gone_on_from(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    source = write(tmp_path / "source")
    with monkeypatch.context() as other_release:
        other_release.setattr(engine, "VERSION", VERSION + 1)
        assert convert(source, tmp_path, 1, 2) is None
    with pytest.raises(UsageError, match="another release"):
        convert(source, tmp_path, 2, 2)
    report = convert(source, tmp_path)
    assert report is not None and report["resumed_tasks"] == 0
