"""What an older release wrote is read, and checked by the fingerprints that it had; those of two
versions are never compared."""

import json
from pathlib import Path

import pytest

from scalai.converters import engine
from scalai.converters import verify as verifying
from scalai.converters.checkpoint import REPORT, Checkpoint, Target, WriteOptions
from scalai.converters.engine import reshard
from scalai.converters.fingerprints import fingerprints
from scalai.converters.journal import NAME
from scalai.converters.layouts import layout_named, open_checkpoint
from scalai.converters.parts import Part
from scalai.converters.verify import compare, verify
from scalai.core.errors import ProofError, UsageError
from scalai.core.fingerprint import VERSION
from support.checkpoints import LIMITS, write
from support.older_release import reported_by_an_older_release, saved_by_an_older_release


def older(folder: Path, layout: str) -> Checkpoint:
    """Return a checkpoint that notes fingerprints of version 1 only."""
    checkpoint = write(folder, layout)
    if layout == "torch_dist":
        reported_by_an_older_release(folder, checkpoint)
    else:
        (folder / REPORT).unlink()
        saved_by_an_older_release([next(folder.glob("generation-*/*/"))])
    return open_checkpoint(folder)


def damage(checkpoint: Checkpoint) -> None:
    """Flip a bit of a tensor that has no second copy."""
    placed = checkpoint.placed
    names = [placed.collection.box(row)[0].name for row in range(len(placed.collection))]
    row = names.index("exp_avg/decoder.layers.1.mlp.linear_fc2.weight")
    path = checkpoint.directory / placed.files[placed.file[row]].path
    data = bytearray(path.read_bytes())
    data[int(placed.begin[row]) + 9] ^= 1
    path.write_bytes(data)


def target_of(source: Checkpoint) -> Target:
    return layout_named("torch_dist").lay_out(source, WriteOptions({"pp": 2}))


@pytest.mark.parametrize("layout", ["torch_dist", "scalai"])
def test_older_fingerprints_are_taken_and_what_is_written_has_new_ones(
    tmp_path: Path, layout: str
) -> None:
    source = older(tmp_path / "old", layout)
    found = verify(source, 1)
    assert found == fingerprints(source, 1) != fingerprints(source, 1, 1)
    report = reshard(source, target_of(source), tmp_path / "new", LIMITS)
    assert report is not None and report["fingerprint_version"] == VERSION
    assert verify(open_checkpoint(tmp_path / "new"), 1) == found
    notes = [note for note in report["notes"] if "fingerprints of version 1" in note]
    assert len(notes) == (layout == "scalai")


@pytest.mark.parametrize("layout", ["torch_dist", "scalai"])
def test_damage_of_what_an_older_release_wrote_is_found(tmp_path: Path, layout: str) -> None:
    source = older(tmp_path / "old", layout)
    damage(source)
    with pytest.raises(ProofError, match="says was written"):
        verify(source, 1)
    with pytest.raises(ProofError, match="says was written"):
        reshard(source, target_of(source), tmp_path / "new", LIMITS)
    assert not (tmp_path / "new").exists()


def test_a_run_that_an_older_release_began_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "source")
    with monkeypatch.context() as older_release:
        older_release.setattr(engine, "VERSION", VERSION - 1)
        assert reshard(source, target_of(source), tmp_path / "new", LIMITS, part=Part(1, 2)) is None
    with pytest.raises(UsageError, match="another release"):
        reshard(source, target_of(source), tmp_path / "new", LIMITS, part=Part(2, 2))
    report = reshard(source, target_of(source), tmp_path / "new", LIMITS)
    assert report is not None and report["resumed_tasks"] == 0


def test_a_journal_says_the_version_of_its_fingerprints(tmp_path: Path) -> None:
    source = write(tmp_path / "source")
    assert reshard(source, target_of(source), tmp_path / "new", LIMITS, part=Part(1, 2)) is None
    [path] = (tmp_path / ".new.partial").glob(f"{NAME}*")
    assert json.loads(path.read_bytes().split(b"\n")[0][9:])["fingerprint_version"] == VERSION


def test_two_checkpoints_are_compared_by_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where fingerprints were equal by chance."""
    one, two = write(tmp_path / "one"), write(tmp_path / "two")
    damage(two)
    names = {tensor.name for tensor in one.placed.collection.tensors}
    monkeypatch.setattr(verifying, "fingerprints", lambda *arguments: dict.fromkeys(names, 0))
    [line] = compare(one, open_checkpoint(tmp_path / "two"), 1)
    assert line.startswith("exp_avg/decoder.layers.1.mlp.linear_fc2.weight[0:1,2:3]: 1 elements")
