"""Failures of other tools, by numbers of a list of public issue threads: what must hold here."""

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest import MonkeyPatch

from scalai.converters import engine, forked
from scalai.converters.checkpoint import Checkpoint
from scalai.converters.consistency import compare, verify
from scalai.converters.layouts import open_checkpoint
from scalai.converters.torch_archive import NewTensor
from scalai.converters.work import plan_work
from scalai.core.errors import ProofError, RefusedError
from support.checkpoints import (
    LIMITS,
    SHAPES,
    carry,
    convert,
    deepspeed_state,
    gpt,
    lay_out,
    state,
    write,
)
from support.command import Capsys, logged
from support.damage import change_tree, merge
from support.peak import peak_bytes
from support.rejects import edit_values


def test_a_wrong_shape_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    """3. A norm of 9 in one rank's file, and its moments of 8."""
    source = convert(gpt(), tmp_path / "source", is_split=False, tp=2)

    def other_shape(tree: Any) -> Any:
        name = "decoder.final_layernorm.weight"
        wide = NewTensor("F32", (9,), bytes(36))
        return {**tree, "model": {**tree["model"], name: wide}}

    change_tree(source.directory / "mp_rank_01" / "model_optim_rng.pt", other_shape)
    with pytest.raises(RefusedError) as refused:
        open_checkpoint(tmp_path / "source")
    text = str(refused.value)
    assert "decoder.final_layernorm.weight" in text
    assert "[8]" in text and "[9]" in text
    assert "use another" in text.lower() or "save it" in text


def test_what_becomes_of_random_streams_is_told(tmp_path: Path, capsys: Capsys) -> None:
    """4."""
    convert(gpt(), tmp_path / "source", "torch_dist")
    code, said = logged(capsys, "reshard", tmp_path / "source", tmp_path / "new", "--tp", 2)
    assert code == 0 and "RNG states begin anew at every rank, from seed" in said
    one, two = open_checkpoint(tmp_path / "source"), open_checkpoint(tmp_path / "new")
    assert list(compare(one, two, 1)) == []


def test_experts_that_are_missing_are_missed(tmp_path: Path) -> None:
    """13. Keys of one rank's experts hide those of the others: no hole is left."""
    shapes = {name: shape for name, shape in SHAPES.items() if ".mlp." not in name}
    for layer in range(2):
        for expert in range(2):
            name = f"decoder.layers.{layer}.mlp.experts.experts.{expert}.linear_fc2.weight"
            shapes[name] = (4, 16)
    write(tmp_path / "source", source=state(shapes=shapes))
    common = tmp_path / "source" / "iter_0000003" / "common.pt"
    merge(common, {"args": argparse.Namespace(num_experts=2, num_layers=2)})
    verify(open_checkpoint(tmp_path / "source"), 0)
    merge(common, {"args": argparse.Namespace(num_experts=8, num_layers=2)})
    with pytest.raises(RefusedError, match="has 2 experts by its tensors, and 8 by its arguments"):
        open_checkpoint(tmp_path / "source")


def interrupted(tmp_path: Path, monkeypatch: MonkeyPatch) -> tuple[Checkpoint, Any, Path]:
    """Return a source, its target, and what lies on disk before the first file is ended."""
    monkeypatch.setattr("scalai.converters.work.TASK_BYTES", 300)
    monkeypatch.setattr(engine, "map_forked", lambda f, items, _: forked.map_forked(f, items, 0))
    source = write(tmp_path / "source")
    target = lay_out(source, tp=2, pp=2)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(engine, "complete", stop)
        carry(source, tmp_path / "new", tp=2, pp=2)
    shutil.move(tmp_path / ".new.partial", tmp_path / "interrupted")
    return source, target, tmp_path / "interrupted"


def test_a_kill_at_any_byte_of_the_journal_is_made_good(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """15. Whatever the journal does not note may be anything on disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(os, "fdatasync", lambda _: None)
    source, target, left = interrupted(tmp_path, monkeypatch)
    expected = verify(source, 0)
    recorded = (left / ".scalai-journal").read_bytes()
    starts = [0] + [at + 1 for at, byte in enumerate(recorded) if byte == 10]
    ends = sorted({at + shift for at in starts for shift in (-9, 0)} | {len(recorded)})
    for end in (end for end in ends if 0 <= end <= len(recorded)):
        partial = tmp_path / ".new.partial"
        shutil.copytree(left, partial)
        (partial / ".scalai-journal").write_bytes(recorded[:end])
        done = len(recorded[:end].splitlines()) - (recorded[:end][-1:] != b"\n")
        spoil_what_is_not_recorded(partial, source, target, max(done - 1, 0))
        report = carry(source, tmp_path / "new", tp=2, pp=2)
        assert report is not None and report["resumed_tasks"] == max(done - 1, 0)
        assert verify(open_checkpoint(tmp_path / "new"), 0) == expected
        shutil.rmtree(tmp_path / "new")


def spoil_what_is_not_recorded(partial: Path, source: Checkpoint, target: Any, done: int) -> None:
    """Overwrite what tasks from number ``done`` on were to write."""
    work = plan_work(source, target, LIMITS.buffer_bytes)
    for task in work.tasks[done:]:
        with open(partial / target.placed.files[task.file].path, "r+b") as file:
            for unit in task.units:
                file.seek(int(target.placed.begin[unit.row]))
                file.write(b"\xff" * min(unit.size_bytes, 4))


CALLS = ("open", "os.rename", "os.remove", "os.mkdir", "os.truncate", "fcntl.flock", "os.rmdir")


@pytest.mark.parametrize("layout", ["torch_dist", "dcp"])
def test_a_kill_at_any_call_leaves_nothing_or_all(
    tmp_path: Path, monkeypatch: MonkeyPatch, layout: str
) -> None:
    """15. A process that ends at its n-th call that changes the disk; then the same command."""
    monkeypatch.setattr(engine, "map_forked", lambda f, items, _: forked.map_forked(f, items, 0))
    source = write(tmp_path / "source", tp=2)
    expected = verify(source, 0)
    new = tmp_path / "new"
    killed = 0
    for number in range(1, 400, 3):
        if not run_until(number, lambda: carry(source, new, layout, tp=1)):
            break
        killed += 1
        if not new.exists():
            carry(source, new, layout, tp=1)
        assert verify(open_checkpoint(new), 0) == expected
        shutil.rmtree(new)
    assert killed > 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "source"]


def run_until(number: int, function: Callable[[], object]) -> bool:
    """Run in a process that dies at its n-th call that opens, renames or locks a file; return
    whether it did."""
    pid = os.fork()
    if not pid:
        left = [number]

        def count(event: str, _: object) -> None:
            left[0] -= event in CALLS
            if left[0] <= 0:
                os._exit(9)

        sys.addaudithook(count)
        function()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.campaign), 3])
@pytest.mark.parametrize(("before", "after"), [(4, 6), (8, 16), (32, 128)])
def test_zero_at_any_number_of_ranks(
    tmp_path: Path, stage: int, before: int, after: int, monkeypatch: MonkeyPatch
) -> None:
    """16."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(os, "fdatasync", lambda _: None)
    layout = f"deepspeed_zero{stage}"
    one = write(tmp_path / "one", layout, deepspeed_state(), dp=before)
    two = write(tmp_path / "two", layout, one, dp=after)
    assert len(list(two.directory.glob("*_optim_states.pt"))) == after
    assert verify(two, 0) == verify(deepspeed_state(), 0)


def test_replicas_that_differ_are_not_converted(tmp_path: Path) -> None:
    """20. Every tensor-parallel rank has the norms."""
    source = convert(gpt(), tmp_path / "source", is_split=False, tp=2)
    verify(source, 0)
    name = "exp_avg/decoder.final_layernorm.weight"
    placed = source.placed
    begin = next(
        int(placed.begin[row])
        for row, file in enumerate(placed.file)
        if placed.collection.box(row)[0].name == name
        and placed.files[file].path.startswith("mp_rank_01")
    )
    data = np.memmap(source.directory / "mp_rank_01" / "model_optim_rng.pt", np.uint8, "r+")
    data[begin] ^= 1
    data.flush()
    (tmp_path / "source" / "scalai.json").unlink()
    damaged = open_checkpoint(tmp_path / "source")
    with pytest.raises(ProofError, match=r"replicas of .* differ"):
        carry(damaged, tmp_path / "new", tp=1)
    with pytest.raises(ProofError, match=r"replicas of .* differ"):
        verify(damaged, 0)


@pytest.mark.parametrize(
    ("layout", "degrees"),
    [
        ("torch_dist", {"tp": 2, "pp": 2}),
        ("scalai", {}),
        ("safetensors", {}),
        ("dcp", {"dp": 3}),
        ("deepspeed_zero1", {"dp": 3}),
        ("deepspeed_zero3", {"dp": 3}),
        ("deepspeed_universal", {"dp": 1}),
    ],
)
def test_a_target_takes_hardly_more_than_its_tensors(
    tmp_path: Path, layout: str, degrees: dict[str, int]
) -> None:
    """24. Of each layout's own tensors: Megatron and ZeRO keep fp32 weights twice, universal
    thrice."""
    shapes = {**SHAPES, "embedding.word_embeddings.weight": (512, 1024)}
    source = deepspeed_state(shapes=shapes)
    source = replace(source, values=replace(source.values, degrees={}))
    write(tmp_path / "new", layout, source, **degrees)
    target = lay_out(source, layout, **degrees)
    logical = int(target.placed.collection.size_bytes().sum())
    files = [path for path in (tmp_path / "new").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 1.05 * logical
    assert sum(path.stat().st_blocks * 512 for path in files) <= 1.05 * logical + 4096 * len(files)


GROWTH = 1.3
"""Of the peak of memory. A little grows with the lists of tensors and files."""
BOUNDS = ["--workers", 1, "--memory", "36MB"]


def test_memory_does_not_grow_with_the_state(tmp_path: Path) -> None:
    """11. A state of 16 MB, and one of 80."""
    peaks = []
    for rows in (1024, 5120):
        source, new = tmp_path / f"{rows}", tmp_path / f"new-{rows}"
        shapes = {**SHAPES, "embedding.word_embeddings.weight": (rows, 1024)}
        write(source, source=state(shapes=shapes))
        size = sum(path.stat().st_size for path in source.rglob("*.distcp"))
        assert size > 4 * rows * 4096
        changed = peak_bytes("reshard", source, new, "--tp", 4, *BOUNDS)
        peaks.append((changed, peak_bytes("verify", source, new, "--workers", 1)))
    for small, large in zip(*peaks, strict=True):
        assert large < GROWTH * small
    assert max(peaks[1]) < size / 2


@pytest.mark.parametrize("shards", [64, pytest.param(256, marks=pytest.mark.campaign)])
def test_memory_does_not_grow_with_the_shards(
    tmp_path: Path, shards: int, monkeypatch: MonkeyPatch
) -> None:
    """25."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(os, "fdatasync", lambda _: None)
    shapes = {**SHAPES, "embedding.word_embeddings.weight": (1024, 1024)}
    peaks = []
    for dp in (2, shards):
        source = tmp_path / f"{dp}"
        write(source, "deepspeed_zero1", deepspeed_state(shapes=shapes), dp=dp)
        peaks.append(peak_bytes("reshard", source, tmp_path / f"new-{dp}", "--dp", 3, *BOUNDS))
    assert peaks[1] < GROWTH * peaks[0]


def test_a_source_that_changes_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """44."""
    source = write(tmp_path / "source")

    def change(done: int, total: int) -> None:
        if done == total:
            name = "param/decoder.final_layernorm.weight"
            edit_values(tmp_path / "source", name, lambda values: values.fill(0))
            for path in source.directory.glob("*.distcp"):
                os.utime(path, ns=(1, 1))

    with pytest.raises(RefusedError, match="was changed while it was read"):
        carry(source, tmp_path / "new", tp=2, progress=change)
    assert not (tmp_path / "new").exists()
