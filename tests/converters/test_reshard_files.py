"""Conversions of small checkpoints, without a framework: equal states, kills, room, remains."""

import contextlib
import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalai.converters import consistency, engine
from scalai.converters.consistency import compare, verify
from scalai.converters.engine import Limits, table_bytes_of
from scalai.converters.layouts import open_checkpoint
from scalai.converters.streaming import Gatherer
from scalai.converters.work import BATCH_FILES, TASK_BYTES, TURNS, Task, Unit, batches, plan_work
from scalai.core.errors import RefusedError, StoreError, UsageError
from scalai.core.tensors.region import Box
from support import full_disk
from support.checkpoints import SHAPES, carry, lay_out, state, write
from support.command import Capsys, run
from support.full_disk import ALONE, can_mount

MANY = {f"decoder.layers.{layer}.mlp.linear_fc2.bias": (4,) for layer in range(2, 40)}


@pytest.mark.parametrize("layout", ["torch_dist", "scalai"])
def test_a_state_is_the_same_in_every_layout_and_at_all_degrees(
    tmp_path: Path, layout: str
) -> None:
    one = write(tmp_path / "one", layout, tp=2)
    two = write(tmp_path / "two", "torch_dist", one, tp=4, pp=2)
    three = write(tmp_path / "three", "scalai", two)
    four = write(tmp_path / "four", "torch_dist", three)
    for other in (two, three, four):
        assert verify(other, 1) == verify(one, 1)
        assert list(compare(one, other, 1)) == []
        assert other.values.scheduler == one.values.scheduler
        assert other.values.param_groups[0]["betas"] == (0.9, 0.95)


def test_two_models_differ_by_name_and_that_is_no_refusal(tmp_path: Path, capsys: Capsys) -> None:
    wider = {name: (2 * shape[0], *shape[1:]) for name, shape in SHAPES.items() if "word" in name}
    write(tmp_path / "one")
    write(tmp_path / "two", "torch_dist", state(shapes={**SHAPES, **wider}))
    assert run("verify", tmp_path / "one", tmp_path / "two") == 4
    said = capsys.readouterr()
    assert "param/embedding.word_embeddings.weight is F32" in said.out and not said.err


def test_an_existing_destination_is_left_alone_and_replaced_on_demand(
    tmp_path: Path, capsys: Capsys
) -> None:
    write(tmp_path / "source")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "precious").write_text("data")
    assert run("reshard", tmp_path / "source", tmp_path / "there") == 2
    assert "exists" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["precious"]
    assert run("reshard", tmp_path / "source", tmp_path / "there", "--overwrite") == 0
    assert run("verify", tmp_path / "source", tmp_path / "there") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "there"]


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: Capsys) -> None:
    write(tmp_path / "source")
    arguments = ["reshard", tmp_path / "source", tmp_path / "new" / "place", "--tp", 2]
    assert run(*arguments, "--dry-run", "--json") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    outlook = next(event for event in events if event["event"] == "outlook")
    assert outlook["tensors"] == 3 * len(SHAPES)
    # Megatron keeps an fp32 parameter twice: in the model and in the optimizer.
    assert outlook["read_bytes"] == 4 * 4 * sum(int(np.prod(s)) for s in SHAPES.values())
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_degrees_that_do_not_divide_the_model_are_refused(tmp_path: Path, capsys: Capsys) -> None:
    write(tmp_path / "source")
    assert run("reshard", tmp_path / "source", tmp_path / "new", "--tp", 3) == 3
    assert "vocabulary of 8 rows. Give --repad" in capsys.readouterr().err
    assert run("reshard", tmp_path / "source", tmp_path / "new", "--pp", 4) == 3
    assert "does not divide num_layers=2" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["torch_dist", "dcp"])
def test_too_little_room_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    source = write(tmp_path / "source")
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(StoreError, match=r"1000 bytes free, and \d+ are needed"):
        carry(source, tmp_path / "new", layout)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.fault
@pytest.mark.skipif(not can_mount(), reason="mounts a file system of its own: root alone can")
def test_a_disk_that_fills_up_leaves_no_checkpoint(tmp_path: Path) -> None:
    layouts = ["torch_dist", "torch", "fsdp_dtensor", "dcp"]
    command = [*ALONE, sys.executable, full_disk.__file__, str(tmp_path), *layouts]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == layouts


def test_memory_that_is_too_little_names_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Give at least"):
        _ = Limits(memory_bytes=1 << 20, workers=1).buffer_bytes


def test_the_tables_of_very_many_tensors_count_as_memory(tmp_path: Path) -> None:
    few, many = (
        write(tmp_path / name, source=state(shapes=shapes))
        for name, shapes in (("few", SHAPES), ("many", {**SHAPES, **MANY}))
    )
    sizes = [table_bytes_of(source, lay_out(source)) for source in (few, many)]
    rows = 7 * len(MANY)  # a parameter, its moments and its step; in the target it lies twice
    assert sizes[1] - sizes[0] >= rows * 1400
    limits = Limits(memory_bytes=64 << 20, workers=1, table_bytes=sizes[0])
    assert limits.buffer_bytes == 4 << 20
    with pytest.raises(UsageError, match=r"and 60000000 bytes of tables. Give at least 8\d{7},"):
        _ = Limits(memory_bytes=64 << 20, workers=1, table_bytes=60_000_000).buffer_bytes


def test_what_differs_is_named_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    one = write(tmp_path / "one")
    two = write(tmp_path / "two")
    rows = [two.placed.collection.box(row)[0].name for row in range(len(two.placed.collection))]
    row = rows.index("exp_avg/decoder.layers.1.mlp.linear_fc2.weight")
    path = two.directory / two.placed.files[two.placed.file[row]].path
    data = bytearray(path.read_bytes())
    data[int(two.placed.begin[row]) + 4 * 17 + 1] ^= 1  # row 1, column 1 of [4, 16]
    path.write_bytes(data)
    assert run("verify", tmp_path / "one", tmp_path / "two") == 4
    expected = "exp_avg/decoder.layers.1.mlp.linear_fc2.weight[1:2,1:2]: 1 elements differ"
    assert expected in capsys.readouterr().out
    assert run("verify", tmp_path / "two") == 4
    assert "scalai.json says was written" in capsys.readouterr().err
    # Also where fingerprints are equal by chance.
    monkeypatch.setattr(consistency, "fingerprints", lambda *arguments: dict.fromkeys(rows, 0))
    assert [*compare(one, open_checkpoint(tmp_path / "two"), 1)] == [expected]


def test_inspect_shows_any_layout_and_prints_values(tmp_path: Path, capsys: Capsys) -> None:
    checkpoint = write(tmp_path / "one")
    assert run("inspect", tmp_path / "one", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["layout"], report["step"], report["is_whole"]) == ("torch_dist", 3, True)
    name = "param/decoder.final_layernorm.weight"
    assert run("inspect", tmp_path / "one", "--tensor", name, "--json") == 0
    values = json.loads(capsys.readouterr().out)["values"]
    expected = next(f.content for f in state().placed.files if f.path == name)
    assert values == np.frombuffer(expected or b"", np.float32).tolist()
    assert checkpoint.values.counters == {}


def test_a_source_without_hyperparameters_is_refused_with_the_way_out(tmp_path: Path) -> None:
    source = state()
    bare = tuple({k: v for k, v in g.items() if k != "betas"} for g in source.values.param_groups)
    poor = replace(source, values=replace(source.values, param_groups=bare))
    with pytest.raises(RefusedError, match="--args-from"):
        lay_out(poor)
    target = lay_out(poor, reference=source.values)
    assert any("betas" in note and "--args-from" in note for note in target.notes)


@pytest.mark.fault
@pytest.mark.parametrize("place", ["/proc/nothing-goes-here", "{}/file/new"])
def test_a_destination_that_cannot_be_written_is_refused_in_words(
    tmp_path: Path, capsys: Capsys, place: str
) -> None:
    write(tmp_path / "source")
    (tmp_path / "file").write_text("")
    assert run("reshard", tmp_path / "source", place.format(tmp_path), "--tp", 2) == 3
    logged = capsys.readouterr().err
    assert "cannot be written" in logged and "Name a destination that this user can write" in logged


@pytest.mark.fault
@pytest.mark.parametrize("is_there", [True, False])
def test_a_destination_that_is_a_link_is_filled_where_it_leads(
    tmp_path: Path, is_there: bool
) -> None:
    write(tmp_path / "source")
    (tmp_path / "disk").mkdir()
    if is_there:
        (tmp_path / "disk" / "place").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "place")
    assert run("reshard", tmp_path / "source", tmp_path / "link", "--tp", 2) == 0
    assert (tmp_path / "link").is_symlink()
    assert run("verify", tmp_path / "source", tmp_path / "link") == 0
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["place"]
    assert run("reshard", tmp_path / "source", tmp_path / "link") == 2
    assert run("reshard", tmp_path / "source", tmp_path / "link", "--overwrite") == 0
    assert run("verify", tmp_path / "source", tmp_path / "link") == 0


def test_a_link_that_names_itself_is_refused_in_words(tmp_path: Path, capsys: Capsys) -> None:
    write(tmp_path / "one")
    os.symlink("loop", tmp_path / "loop")
    assert run("reshard", tmp_path / "one", tmp_path / "loop", "--tp", "2") == 2
    assert "is a link that leads nowhere" in capsys.readouterr().err


def test_a_file_that_was_replaced_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "one")
    (tmp_path / "there").write_text("a file")
    assert run("reshard", tmp_path / "one", tmp_path / "there", "--tp", "2", "--overwrite") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "there"]


@pytest.mark.fault
@pytest.mark.parametrize("task_bytes", [TASK_BYTES, 64], ids=["a task a file", "tasks"])
def test_a_file_that_is_gone_when_a_run_goes_on_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task_bytes: int
) -> None:
    write(tmp_path / "source")
    monkeypatch.setattr("scalai.converters.work.TASK_BYTES", task_bytes)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(engine, "complete", interrupt)
        carry(open_checkpoint(tmp_path / "source"), tmp_path / "new", tp=2)
    gone = min((tmp_path / ".new.partial").rglob("*.distcp"))
    gone.unlink()
    carry(open_checkpoint(tmp_path / "source"), tmp_path / "new", tp=2)
    assert run("verify", tmp_path / "source", tmp_path / "new") == 0


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_files_that_were_read_are_closed_with_their_reader(tmp_path: Path) -> None:
    source = write(tmp_path / "one")
    target = lay_out(source, tp=2)
    work = plan_work(source, target, 1 << 20)
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        with Gatherer(work, source.directory) as gatherer:
            for task in work.tasks:
                for unit in task.units:
                    gatherer.gather(unit)
            assert open_files(source.directory)
            reader = gatherer.files.opened(source.placed.files[0].path)
        assert len(open_files(source.directory)) == 1  # somebody reads it
        assert os.pread(reader.descriptor, 2, 0) == b"PK"
        del reader
        assert not open_files(source.directory)
    assert not reported


def open_files(directory: Path) -> list[str]:
    """Return the files below a directory that this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if path.startswith(str(directory))]


def task(number: int, size_bytes: int) -> Task:
    return Task(number, number, (Unit(number, Box((0,), (size_bytes,)), size_bytes),))


@given(
    sizes=st.lists(st.integers(1, 3 * TASK_BYTES // 2), max_size=300),
    workers=st.integers(0, 8),
)
def test_batches_hold_each_task_once_in_order_and_are_not_larger_than_need_be(
    sizes: list[int], workers: int
) -> None:
    tasks = [task(number, size) for number, size in enumerate(sizes)]
    found = batches(tasks, workers)
    assert [one for batch in found for one in batch] == tasks
    for batch in found:
        assert 1 <= len(batch) <= BATCH_FILES
        assert len(batch) == 1 or sum(one.size_bytes for one in batch) <= TASK_BYTES


def test_small_files_are_brought_to_disk_together_and_every_worker_gets_some() -> None:
    found = batches([task(number, 1000) for number in range(200)], workers=2)
    assert len(found) == TURNS * 2
    assert {len(batch) for batch in found} == {25}
    assert len(batches([task(number, TASK_BYTES) for number in range(5)], workers=2)) == 5
