"""Durable generations as a host's own: by links, never copied, and never changed."""

import builtins
import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scalai.core.errors import StoreError
from scalai.core.messages.reports import Examined
from scalai.core.tensors.collection import Collection
from scalai.core.tensors.fingerprint import Committed
from scalai.core.tensors.region import Box, whole
from scalai.launch.agent.holdings import Holdings
from scalai.launch.agent.leftovers import find_leftovers
from scalai.launch.agent.loop import DISK
from scalai.launch.config.flags import parse_options
from scalai.launch.config.job_spec import JobSpec
from scalai.store import held as held_module
from scalai.store.generation import unite_hosts
from scalai.store.host import HostStore
from scalai.store.manifest import HostManifest, read_manifest
from scalai.store.parts import attachment
from support.store_states import HALF, WEIGHT, Opener, generation, is_whole, snapshot

pytestmark = pytest.mark.fault

STATED = Committed(("a", "b"), {"param/w": 7})


def saved(open_store: Opener, disk: Path, hosts: str = "ab") -> list[tuple[Path, HostManifest]]:
    """Have each host save its half of generation 3 and lose its memory; return the durable
    parts."""
    for number, host in enumerate(hosts):
        store = open_store(host=host)
        held = [(WEIGHT, Box((0, 4 * number), (6, 4))), (HALF, whole(HALF.shape))]
        slot, _ = snapshot(store, 3, {number: Collection.of(held)})
        store.commit(slot, 3, STATED)
        store.copy_to(3, disk)
        store.remove()
    return parts_of(disk)


def parts_of(disk: Path) -> list[tuple[Path, HostManifest]]:
    return [(path, read_manifest(path)) for path in sorted((disk / "generation-3").iterdir())]


def content(disk: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in disk.rglob("*") if path.is_file()}


def test_a_file_that_was_cut_after_it_was_attached_is_told_as_damage(
    open_store: Opener, tmp_path: Path
) -> None:
    """By the examination after a proof that failed, which ends nothing."""
    store = open_store(host="c")
    parts = saved(open_store, tmp_path / "disk")
    store.attach(parts)
    for path in store.generation_directory(3).iterdir():
        if path.is_symlink():
            os.truncate(path.resolve(), 1)
    reported: list[Any] = []
    beside: Any = SimpleNamespace(submit=lambda lane, name, work: work())
    holdings = Holdings(
        JobSpec.read(parse_options(["--job", "job", "script.py"])), store,
        reported.append, beside, lambda due: due(),
    )  # fmt: skip
    holdings.examine(3)
    (report,) = reported
    assert isinstance(report, Examined) and "the file has 1 bytes" in report.damage[0]
    assert report.directory.startswith(str(tmp_path / "disk")) and report.manifest is not None
    assert holdings.found().examined == ((3, report.damage),), "the next coordinator hears of it"
    store.attach(parts)
    assert not len(store.manifest(3).collection), "what was damaged there is not attached again"


def found_by(store: HostStore, *flags: str) -> dict[int, str]:
    """Return what a host says that it cannot use when it joins."""
    spec = JobSpec.read(parse_options(["--job", "job", *flags, "script.py"]))
    beside: Any = None
    holdings = Holdings(spec, store, lambda *logged: None, beside, lambda due: None)
    holdings.attach()
    return dict(holdings.found().damaged)


def test_what_this_machine_has_left_under_another_name_is_told(open_store: Opener) -> None:
    """A container has another name at each start; its shared memory may be the machine's."""
    earlier = open_store(host="old")
    generation(earlier, 5, step=100)
    store = open_store(host="new")
    assert not found_by(store), "its agent lives, and brings it"
    earlier.close()
    (logged,) = found_by(store).items()
    assert logged[0] == 5 and "generation-5 holds generation 5 of host old, step 100" in logged[1]
    assert "--host-id old" in logged[1]
    generation(store, 1, step=2)
    assert not found_by(store), "it has a state of its own"


def test_a_job_that_begins_anew_uses_no_number_that_a_disk_shows(
    open_store: Opener, tmp_path: Path
) -> None:
    """The disk of a host that comes late keeps them: at a later start they would be the newest."""
    config = tmp_path / "elastic.toml"
    config.write_text("[model]\nglobal_batch_size = 12\n")
    (tmp_path / "disk" / "job" / "generation-7").mkdir(parents=True)
    flags = ("--elastic", str(config), "--durable-dir", str(tmp_path / "disk"), "--fresh")
    assert list(found_by(open_store(host="late"), *flags)) == [7]


def test_an_attached_generation_is_read_where_it_lies(open_store: Opener, tmp_path: Path) -> None:
    parts = saved(open_store, tmp_path / "disk")
    before = content(tmp_path / "disk")
    store = open_store(host="c")
    manifest = store.attach(parts)
    assert manifest.host == "c" and manifest.committed == STATED
    assert manifest.rank_state == {"tp0": [0], "tp1": [1]}
    assert manifest.scalars == {"lr": 0.5, "of": {"r0": 0, "r1": 1}}
    with store.open_rows(3) as rows:
        assert not list(rows.damage())
        assert len(rows.manifest.collection) == 3  # the replicated tensor once
    links = [path for path in store.generation_directory(3).iterdir() if path.is_symlink()]
    assert len(links) == 2 and all(link.resolve().is_relative_to(tmp_path) for link in links)
    assert store._folders.room().in_use < 5000, "bytes on a disk are none of the memory's"
    store.drop(3)
    assert not list((store.directory / "recycled").iterdir()), "durable files are not reused"
    assert content(tmp_path / "disk") == before


def test_removing_a_store_leaves_what_was_attached(open_store: Opener, tmp_path: Path) -> None:
    parts = saved(open_store, tmp_path / "disk")
    before = content(tmp_path / "disk")
    store = open_store(host="c")
    store.attach(parts)
    store.remove()
    assert content(tmp_path / "disk") == before


def test_an_agent_that_comes_back_has_what_was_attached_and_notices_what_is_gone(
    open_store: Opener, tmp_path: Path
) -> None:
    parts = saved(open_store, tmp_path / "disk")
    store = open_store(host="c")
    attached = store.attach(parts)
    store.close()
    again = open_store(host="c")
    assert again.manifest(3).digest() == attached.digest()
    assert again.attach(parts).digest() == attached.digest()
    again.close()
    shutil.rmtree(tmp_path / "disk" / "generation-3" / "b")
    last = open_store(host="c")
    assert last.generations() == [] and "missing" in last.damaged[3]
    last.attach(parts_of(tmp_path / "disk"))
    assert last.generations() == [3] and not last.damaged


def test_a_damaged_part_that_made_way_is_put_back_where_the_attached_one_is_given_up(
    open_store: Opener, tmp_path: Path
) -> None:
    """The disk may hold other hosts' parts alone."""
    parts = saved(open_store, tmp_path / "disk")
    store = open_store(host="c")
    generation(store, 3, step=1)
    manifest = store.generation_directory(3) / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text[:-9])
    store.close()
    again = open_store(host="c")
    again.attach(parts)
    assert again.generations() == [3]
    [left] = find_leftovers(again.directory)[1:]
    assert left.is_resumable and left.path.name == "damaged-3"
    again.detach()
    assert again.generations() == [] and 3 in again.damaged
    again.close()
    manifest.write_text(text)  # it is mended
    assert is_whole(open_store(host="c"), 3, step=1)


def test_where_there_is_no_room_to_attach_it_is_said_and_can_be_done_later(
    open_store: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = saved(open_store, tmp_path / "disk")
    store = open_store(host="c")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(held_module, "write_manifest", full)
        with pytest.raises(StoreError, match=r"cannot be attached .*No space left.*Make room"):
            store.attach(parts)
    assert store.generations() == []
    store.attach(parts)
    assert store.generations() == [3]


def test_two_hosts_attach_one_directory(open_store: Opener, tmp_path: Path) -> None:
    parts = saved(open_store, tmp_path / "disk")
    stores = [open_store(host=host) for host in "cd"]
    for store in stores:
        store.attach(parts)
    stores[0].drop(3)
    with stores[1].open_rows(3) as rows:
        assert not list(rows.damage())


def test_a_host_adds_what_its_memory_lacks(open_store: Opener, tmp_path: Path) -> None:
    """It died while the others saved: its own part is in memory, theirs on the disk."""
    saved(open_store, tmp_path / "other", "ab")
    part_of_b = [part for part in parts_of(tmp_path / "other") if part[1].host == "b"]
    store = open_store(host="a")
    held = [(WEIGHT, Box((0, 0), (6, 4))), (HALF, whole(HALF.shape))]
    slot, _ = snapshot(store, 3, {0: Collection.of(held)})
    store.commit(slot, 3, STATED)
    grown = store.attach(part_of_b)
    assert sorted(grown.rank_state) == ["tp0", "tp1"] and len(grown.files) == 2
    with store.open_rows(3) as rows:
        assert not list(rows.damage())


def test_another_state_of_the_same_number_is_refused(open_store: Opener, tmp_path: Path) -> None:
    parts = saved(open_store, tmp_path / "disk")
    store = open_store(host="c")
    generation(store, 3, step=9)
    with pytest.raises(StoreError, match=r"different states under the number 3.*Move one"):
        store.attach(parts)
    assert is_whole(store, 3, step=9)


def test_what_was_attached_is_found_saved_and_only_what_is_new_is_added(
    open_store: Opener, tmp_path: Path
) -> None:
    parts = saved(open_store, tmp_path / "disk")
    before = content(tmp_path / "disk")
    store = open_store(host="c")
    store.attach(parts)
    assert store.copy_to(3, tmp_path / "disk") == tmp_path / "disk" / "generation-3"
    assert content(tmp_path / "disk") == before
    # On a disk of its own all of it is new.
    assert store.copy_to(3, tmp_path / "mine") == tmp_path / "mine" / "generation-3" / "c"
    # And a piece that was fetched lies beside the part that is there.
    fetch(store, parts[1][1], parts[1][0], rows=[0], box=Box((0, 4), (3, 4)))
    beside = store.copy_to(3, tmp_path / "mine")
    assert beside == tmp_path / "mine" / "generation-3" / "c.2"
    assert store.copy_to(3, tmp_path / "mine").parent == beside.parent
    assert len(read_manifest(beside).collection) == 1
    unite_hosts([part for _, part in parts_of(tmp_path / "mine")])


def fetch(
    store: HostStore, source: HostManifest, directory: Path, rows: list[int], box: Box | None = None
) -> HostManifest:
    """Add pieces of a durable part to a store as if they had come over the network."""
    pieces = source.collection.select(np.array(rows))
    if box is not None:
        pieces = Collection.of([(pieces.box(0)[0], box)])
    staged = store.stage(pieces)
    with open(staged.path, "r+b") as file:
        for row, begin in enumerate(staged.begins.tolist()):
            file.seek(begin)
            file.write(bytes(int(pieces.size_bytes()[row])))
    store.adopt_empty(source)
    return store.extend(source.generation, staged)


def test_what_an_agent_that_died_while_it_attached_has_left_is_no_obstacle(
    open_store: Opener, tmp_path: Path
) -> None:
    parts = saved(open_store, tmp_path / "disk")
    store = open_store(host="c")
    store.attach(parts[:1])
    stray = store.generation_directory(3) / "1-rank-1.safetensors"
    stray.symlink_to(tmp_path / "gone")  # made before the manifest that names it
    store.attach(parts)
    with store.open_rows(3) as rows:
        assert not list(rows.damage())


def test_an_attached_file_gets_a_name_that_no_other_has(open_store: Opener, tmp_path: Path) -> None:
    """Of three files the middle one was never proven, and has gone."""
    parts = saved(open_store, tmp_path / "disk")
    store = open_store(host="c")
    first = store.attach(parts[:1])
    own = replace(first, files=(replace(first.files[0], name="1-rank-1.safetensors"),))
    grown = attachment("c", parts, own)
    assert len({file.name for file in grown.manifest.files}) == 2


def test_fetched_files_never_take_the_place_of_earlier_ones(
    open_store: Opener, tmp_path: Path
) -> None:
    """A new owner counts its folders anew."""
    (directory, source), *_ = saved(open_store, tmp_path / "disk")
    store = open_store(host="c")
    for _ in range(4):
        store.unstage(store.stage(source.collection))
    fetch(store, source, directory, [0])
    store.prove(3)
    store.close()
    again = open_store(host="c")
    before = content(again.generation_directory(3))
    for column in range(4):
        fetch(again, source, directory, [0], Box((0, column), (2, 1)))
    names = [file.name for file in again.manifest(3).files]
    assert len(set(names)) == 5
    before = {path: data for path, data in before.items() if not path.endswith(".json")}
    assert before.items() <= content(again.generation_directory(3)).items()


def test_what_was_fetched_gives_its_room_back_where_there_is_none_for_the_manifest(
    open_store: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, source), *_ = saved(open_store, tmp_path / "disk")
    store = open_store(host="c")
    store.adopt_empty(source)
    staged = store.stage(source.collection)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(held_module, "write_manifest", full)
        with pytest.raises(OSError, match="No space left"):
            store.extend(3, staged)
    store.unstage(staged)
    assert not list(store.directory.glob("*/fetched-*")) and not staged.path.parent.exists()
    assert store.manifest(3).files == ()


def test_what_was_fetched_counts_as_unproven_until_a_proof_has_passed(
    open_store: Opener, tmp_path: Path
) -> None:
    (directory, source), *_ = saved(open_store, tmp_path / "disk")
    store = open_store(host="c")
    store.attach([(directory, source)])
    attached = store.manifest(3)
    fetch(store, source, directory, [0], Box((0, 0), (2, 2)))
    store.close()
    store = open_store(host="c")  # also after the agent has died
    assert store.manifest(3).unproven == (1,)
    kept = store.forget_unproven(3)
    assert kept is not None and kept.digest() == attached.digest()
    assert len(list(store.generation_directory(3).glob("*.safetensors"))) == 1
    fetch(store, source, directory, [0], Box((0, 0), (2, 2)))
    store.prove(3)
    proven = store.forget_unproven(3)
    assert proven is not None and len(proven.files) == 2 and not proven.unproven


def test_a_part_of_nothing_but_unproven_pieces_goes_wholly(
    open_store: Opener, tmp_path: Path
) -> None:
    (directory, source), *_ = saved(open_store, tmp_path / "disk")
    store = open_store(host="c")
    fetch(store, source, directory, [0])
    assert store.forget_unproven(3) is None and store.generations() == []


def test_a_manifest_says_what_was_committed_and_older_ones_are_read(
    open_store: Opener, tmp_path: Path
) -> None:
    (directory, part), *_ = saved(open_store, tmp_path / "disk")
    assert part.committed == STATED
    assert read_manifest(directory).to_json()["committed"]["fingerprints"] == {
        "param/w": f"{7:016x}"
    }
    older = replace(part, committed=None)
    assert "committed" not in older.to_json()
    assert HostManifest.from_json(older.to_json(), "it").committed is None


def test_new_folders_of_the_durable_directory_are_brought_to_disk(
    open_store: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    generation(store, 3, step=1)
    synced = set()
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    store.copy_to(3, tmp_path / "disk" / "job")
    below = tmp_path / "disk" / "job" / "generation-3"
    folders = {str(folder) for folder in (below, *list(below.parents)[:3])}
    assert folders <= synced


def test_a_host_that_holds_something_joins_again_without_a_disk(
    store: HostStore, tmp_path: Path
) -> None:
    """The coordinator may be waiting for its workers, and the disk for somebody to repair it."""
    config = tmp_path / "elastic.toml"
    config.write_text("[model]\nglobal_batch_size = 12\n")
    flags = ["--job", "job", "--elastic", str(config), "--durable-dir", str(tmp_path / "disk")]
    spec = JobSpec.read(parse_options([*flags, "script.py"]))
    asked: list[Any] = []
    beside: Any = SimpleNamespace(submit=lambda *given: asked.append(given))
    holdings = Holdings(spec, store, lambda *logged: None, beside, lambda due: due())
    went: list[Exception | None] = []
    holdings.attach_beside(went.append)
    assert not went and asked[0][0] == DISK, "an empty one looks at the disk first, beside the loop"
    (tmp_path / "disk").write_text("no folder")
    asked[0][2]()
    assert isinstance(went[0], StoreError)
    generation(store, 3, step=3)
    holdings.attach_beside(went.append)
    assert went[1:] == [None] and len(asked) == 1


def test_a_disk_that_answers_nobody_never_holds_up_the_memory_of_a_host(
    open_store: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever touches what is attached does so without the store's mutex, for which the agent's
    loop waits."""
    disk, locked = tmp_path / "disk", list[str]()
    parts = saved(open_store, disk)
    store = open_store(host="c")
    mutex: Any = store._mutex
    names = [(os, name) for name in ("stat", "lstat", "listdir", "scandir", "unlink")]
    names += [(builtins, "open")]  # what ``map_file`` opens by
    reals = {name: getattr(module, name) for module, name in names}
    realpath = os.path.realpath

    def watched(name: str) -> Any:
        def call(path: Any, *arguments: Any, **named: Any) -> Any:
            with monkeypatch.context() as context:
                for module, each in names:
                    context.setattr(module, each, reals[each])
                is_left = name in ("lstat", "unlink") or named.get("follow_symlinks") is False
                there = path if is_left or isinstance(path, int) else realpath(path)
            if mutex._is_owned() and str(there).startswith(str(disk)):
                locked.append(f"{name} {path}")
            return reals[name](path, *arguments, **named)

        return call

    for module, name in names:
        monkeypatch.setattr(module, name, watched(name))
    store.attach(parts)
    generation(store, 4, step=4)
    with store.open_rows(3) as rows:
        assert len(rows.files) == 2 and all(len(file) for file in rows.files)
    rot = disk / "generation-3" / "b" / "rank-1.safetensors"
    os.truncate(rot, 10)
    assert store.examine(3)
    store.attach(parts)
    store.most_bytes()
    store._folders.expire_dropped()
    store.copy_to(4, tmp_path / "another")
    store.detach()
    assert store.generations() == [4] and locked == []
