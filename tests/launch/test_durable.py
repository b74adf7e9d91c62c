"""What an agent finds in the durable directory, and what it leaves there."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scalai.core.errors import ProofError, RefusedError, StoreError
from scalai.core.tensors.collection import Collection
from scalai.core.tensors.region import Box
from scalai.launch.agent import durable
from scalai.launch.agent.durable import (
    attach_durable,
    check_writable,
    look,
    refuse_finished,
    set_aside,
    write_finished,
)
from scalai.launch.agent.fetch import check_arrived
from scalai.store.archive import retire
from scalai.store.host import HostStore
from scalai.store.manifest import HostManifest, read_saved_manifest, write_manifest
from scalai.store.moves import FetchList
from scalai.store.parts import piece_keys, pieces_of
from support.store_states import Opener, generation, two_ranks

pytestmark = pytest.mark.fault

MOMENTS = ["before it is read", "while it is read", "before it is attached"]


def saved(open_store: Opener, folder: Path, *numbers: int) -> None:
    """Leave generations of one host on the disk."""
    with open_store(host="gone") as store:
        for number in numbers:
            generation(store, number, step=10 * number)
            store.copy_to(number, folder)
            store.drop(number)


def test_all_that_can_be_seen_is_attached_and_what_cannot_be_read_is_told(
    open_store: Opener, tmp_path: Path
) -> None:
    folder = tmp_path / "disk" / "job"
    saved(open_store, folder, 3, 5, 7, 9, 11)
    torn = folder / "generation-7" / "gone" / "manifest.json"
    torn.write_text(torn.read_text()[:-30])
    (folder / "generation-9" / "gone" / "rank-0.safetensors").unlink()
    moved = folder / "generation-5" / "gone"
    write_manifest(moved, replace(look(folder).parts[5][0][1], generation=6))
    silent = look(folder).parts[11][0][1]
    about = {name: logged for name, logged in silent.about.items() if name != "tensors"}
    write_manifest(folder / "generation-11" / "gone", replace(silent, about=about))
    (folder / "generation-3" / ".other.partial").mkdir()
    (folder / "finished.json").write_text("{}")
    store = open_store(host="a")
    damaged = attach_durable(store, folder)
    assert store.generations() == [3]
    assert sorted(damaged) == [5, 7, 9, 11] and "about says no tensors" in damaged[11]
    assert "generation 6" in damaged[5] and str(torn) in damaged[7] and "missing" in damaged[9]


@pytest.mark.parametrize("moment", MOMENTS)
def test_what_a_running_job_removes_meanwhile_is_not_there_and_not_damaged(
    open_store: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    folder = tmp_path / "disk" / "job"
    saved(open_store, folder, 3, 5)
    store, read = open_store(host="a"), read_saved_manifest
    attach, listed = HostStore.attach, Path.iterdir

    def read_late(path: Path, number: int) -> HostManifest:
        if moment == "while it is read":
            retire(folder, 5)
        return read(path, number)

    def attach_late(self: HostStore, parts: Sequence[tuple[Path, HostManifest]]) -> HostManifest:
        if moment == "before it is attached":
            retire(folder, 5)
        return attach(self, parts)

    def list_late(self: Path) -> Iterator[Path]:
        if moment == "before it is read":
            retire(folder, 5)
        return listed(self)

    monkeypatch.setattr(durable, "read_saved_manifest", read_late)
    monkeypatch.setattr(HostStore, "attach", attach_late)
    monkeypatch.setattr(Path, "iterdir", list_late)
    assert attach_durable(store, folder) == {}
    monkeypatch.undo()
    assert 5 in store.generations()
    if 3 in store.generations():  # its links lead nowhere by now: it is seen when it is read
        assert moment == "before it is attached"


def test_no_directory_is_nothing_seen(open_store: Opener, tmp_path: Path) -> None:
    assert attach_durable(open_store(), tmp_path / "nowhere" / "job") == {}


def test_a_directory_that_cannot_be_written_is_refused_with_its_reason(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "disk")
    assert list((tmp_path / "new" / "disk").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"--durable-dir .*file/disk cannot be written \("):
        check_writable(tmp_path / "file" / "disk")


def test_a_job_that_has_finished_is_refused_and_says_when(tmp_path: Path) -> None:
    folder = tmp_path / "disk" / "gpt"
    refuse_finished(folder)
    write_finished(folder, 120, 8)
    reported = json.loads((folder / "finished.json").read_text())
    assert (reported["step"], reported["generation"]) == (120, 8)
    logged = (
        r"job 'gpt' finished at step 120 on \d{4}-.*--fresh.*--job gpt --durable-dir .* --force"
    )
    with pytest.raises(RefusedError, match=logged):
        refuse_finished(folder)
    (folder / "finished.json").write_text("torn")
    with pytest.raises(RefusedError, match="finished at an unknown step"):
        refuse_finished(folder)


def test_what_is_set_aside_is_renamed_and_never_removed(open_store: Opener, tmp_path: Path) -> None:
    folder = tmp_path / "disk" / "job"
    for _ in range(2):
        saved(open_store, folder, 3)
        moved = set_aside(folder)
        assert moved is not None and moved.name.startswith("job.set-aside-")
        assert not folder.exists() and sorted(look(moved).parts) == [3]
    assert len(list(folder.parent.iterdir())) == 2
    assert set_aside(folder) is None


def test_what_arrives_is_compared_with_what_its_host_says(open_store: Opener) -> None:
    part = generation(open_store(), 1, 1, {0: two_ranks()[0]})
    rows = np.arange(len(part.collection))
    asked = [FetchList("a", rows, part.collection, rows)]
    check_arrived(asked, {"a": pieces_of(part)}, part.fingerprint)
    number = [key[0] for key in piece_keys(part.collection)].index("param/w")
    wrong = part.fingerprint.copy()
    wrong[number] += np.uint64(1)
    with pytest.raises(ProofError, match=r"1 fetched pieces.*'param/w' \[0:6,0:4\] of host 'a'"):
        check_arrived(asked, {"a": pieces_of(part)}, wrong)
    # A part of a piece has no fingerprint to compare with.
    tensor, _ = part.collection.box(number)
    some = Collection.of([(tensor, Box((0, 0), (2, 2)))])
    row = np.array([number])
    check_arrived(
        [FetchList("a", row, some, row)], {"a": pieces_of(part)}, np.zeros(1, dtype=np.uint64)
    )
