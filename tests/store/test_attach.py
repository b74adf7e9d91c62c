"""Durable generations as a host's own: by links, never copied, and never changed."""

import builtins
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scalai.core.errors import StoreError
from scalai.core.messages.reports import Examined
from scalai.core.tensors.collection import Collection
from scalai.core.tensors.fingerprint import CommitStatement
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
from support.steps import DEADLINE_S
from support.store_states import (
    HALF,
    WEIGHT,
    Opener,
    full_disk,
    generation,
    is_undamaged,
    is_whole,
    snapshot,
)

pytestmark = pytest.mark.fault

STATED = CommitStatement(("a", "b"), {"param/w": 7})
Parts = list[tuple[Path, HostManifest]]


def commit_half(store: HostStore, rank: int) -> None:
    held = [(WEIGHT, Box((0, 4 * rank), (6, 4))), (HALF, whole(HALF.shape))]
    slot, _ = snapshot(store, 3, {rank: Collection.of(held)})
    store.commit(slot, 3, STATED)


def parts_of(disk: Path) -> Parts:
    return [(path, read_manifest(path)) for path in sorted((disk / "generation-3").iterdir())]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def parts(open_store: Opener, disk: Path) -> Parts:
    """The durable parts of two hosts that have saved generation 3 and lost their memory."""
    for rank, host in enumerate("ab"):
        store = open_store(host=host)
        commit_half(store, rank)
        store.copy_to(3, disk)
        store.remove()
    return parts_of(disk)


@pytest.fixture
def late(open_store: Opener) -> HostStore:
    """A host that comes late."""
    return open_store(host="c")


def content(disk: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in disk.rglob("*") if path.is_file()}


def holdings_of(store: HostStore, *flags: str, told: Any = print, submit: Any = None) -> Holdings:
    """Return what an agent has of a store; its lanes work at once."""
    spec = JobSpec.read(parse_options(["--job", "job", *flags, "script.py"]))
    beside: Any = SimpleNamespace(submit=submit or (lambda lane, name, work: work()))
    return Holdings(spec, store, told, beside, lambda due: due())


def durable(tmp_path: Path) -> tuple[str, ...]:
    config = tmp_path / "elastic.toml"
    config.write_text("[model]\nglobal_batch_size = 12\n")
    return "--elastic", str(config), "--durable-dir", str(tmp_path / "disk")


def found_by(store: HostStore, *flags: str) -> dict[int, str]:
    """Return what a host says that it cannot use when it joins."""
    holdings = holdings_of(store, *flags)
    holdings.attach()
    return dict(holdings.found().damaged)


def test_a_file_that_was_cut_after_it_was_attached_is_told_as_damage(
    parts: Parts, late: HostStore, disk: Path
) -> None:
    """By the examination after a proof that failed, which ends nothing."""
    late.attach(parts)
    for path in late.generation_directory(3).iterdir():
        if path.is_symlink():
            os.truncate(path.resolve(), 1)
    reported: list[Any] = []
    holdings = holdings_of(late, told=reported.append)
    holdings.examine(3)
    (report,) = reported
    assert isinstance(report, Examined) and "the file has 1 bytes" in report.damage[0]
    assert report.directory.startswith(str(disk)) and report.manifest is not None
    assert holdings.found().examined == ((3, report.damage),), "the next coordinator hears of it"
    late.attach(parts)
    assert not len(late.manifest(3).collection), "what was damaged there is not attached again"


def test_what_this_machine_has_left_under_another_name_is_told(open_store: Opener) -> None:
    """A container has another name at each start; its shared memory may be the machine's."""
    earlier = open_store(host="old")
    generation(earlier, 5, step=100)
    store = open_store(host="new")
    assert not found_by(store), "its agent lives, and brings it"
    earlier.close()
    ((number, told),) = found_by(store).items()
    assert number == 5 and "generation-5 holds generation 5 of host old, step 100" in told
    assert "--host-id old" in told
    generation(store, 1, step=2)
    assert not found_by(store), "it has a state of its own"


def test_a_job_that_begins_anew_uses_no_number_that_a_disk_shows(
    late: HostStore, tmp_path: Path, disk: Path
) -> None:
    """The disk of a host that comes late keeps them: at a later start they would be the newest."""
    (disk / "job" / "generation-7").mkdir(parents=True)
    assert list(found_by(late, *durable(tmp_path), "--fresh")) == [7]


def test_an_attached_generation_is_read_where_it_lies(
    parts: Parts, open_store: Opener, disk: Path, tmp_path: Path
) -> None:
    before = content(disk)
    stores = [open_store(host=host) for host in "cde"]
    for store in stores:
        manifest = store.attach(parts)
        assert manifest.host == store.host and manifest.committed == STATED
        assert manifest.rank_state == {"tp0": [0], "tp1": [1]}
        assert manifest.scalars == {"lr": 0.5, "of": {"r0": 0, "r1": 1}}
        assert len(manifest.collection) == 3  # the replicated tensor once
        links = [path for path in store.generation_directory(3).iterdir() if path.is_symlink()]
        assert len(links) == 2 and all(link.resolve().is_relative_to(tmp_path) for link in links)
        assert store.room().in_use < 5000, "bytes on a disk are none of the memory's"
    stores[0].drop(3)
    assert not list((stores[0].directory / "recycled").iterdir()), "durable files are not reused"
    stores[1].remove()
    assert content(disk) == before
    assert is_undamaged(stores[2], 3)


def test_an_agent_that_comes_back_has_what_was_attached_and_notices_what_is_gone(
    parts: Parts, open_store: Opener, disk: Path
) -> None:
    store = open_store(host="c")
    attached = store.attach(parts)
    store.close()
    again = open_store(host="c")
    assert again.manifest(3).digest() == attached.digest() == again.attach(parts).digest()
    again.close()
    shutil.rmtree(disk / "generation-3" / "b")
    last = open_store(host="c")
    assert last.generations() == [] and "missing" in last.damaged[3]
    last.attach(parts_of(disk))
    assert last.generations() == [3] and not last.damaged


def test_a_damaged_part_that_made_way_is_put_back_where_the_attached_one_is_given_up(
    parts: Parts, open_store: Opener
) -> None:
    """The disk may hold other hosts' parts alone."""
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
    parts: Parts, late: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(held_module, "write_manifest", full_disk)
        with pytest.raises(StoreError, match=r"cannot be attached .*No space left.*Make room"):
            late.attach(parts)
    assert late.generations() == []
    late.attach(parts)
    assert late.generations() == [3]


def test_a_host_adds_what_its_memory_lacks(parts: Parts, open_store: Opener) -> None:
    """It died while the others saved: its own part is in memory, theirs on the disk."""
    store = open_store(host="a")
    commit_half(store, 0)
    grown = store.attach(parts[1:])
    assert sorted(grown.rank_state) == ["tp0", "tp1"] and len(grown.files) == 2
    assert is_undamaged(store, 3)


def test_another_state_of_the_same_number_is_refused(parts: Parts, late: HostStore) -> None:
    generation(late, 3, step=9)
    with pytest.raises(StoreError, match=r"different states under the number 3.*Move one"):
        late.attach(parts)
    assert is_whole(late, 3, step=9)


def test_what_was_attached_is_found_saved_and_only_what_is_new_is_added(
    parts: Parts, late: HostStore, disk: Path, tmp_path: Path
) -> None:
    before = content(disk)
    late.attach(parts)
    assert late.copy_to(3, disk) == disk / "generation-3"
    assert content(disk) == before
    # On a disk of its own all of it is new.
    mine = tmp_path / "mine"
    assert late.copy_to(3, mine) == mine / "generation-3" / "c"
    # And a piece that was fetched lies beside the part that is there.
    fetch(late, parts[1][1], Box((0, 4), (3, 4)))
    beside = late.copy_to(3, mine)
    assert beside == mine / "generation-3" / "c.2"
    assert late.copy_to(3, mine).parent == beside.parent
    assert len(read_manifest(beside).collection) == 1
    unite_hosts([part for _, part in parts_of(mine)])


def fetch(store: HostStore, source: HostManifest, box: Box | None = None) -> None:
    """Add the first piece of a durable part, or a box of it, as if it had come over the network."""
    tensor, own = source.collection.box(0)
    staged = store.stage(Collection.of([(tensor, box or own)]))
    store.adopt_empty(source)
    store.extend(source.generation, staged)


def test_what_an_agent_that_died_while_it_attached_has_left_is_no_obstacle(
    parts: Parts, late: HostStore, tmp_path: Path
) -> None:
    late.attach(parts[:1])
    stray = late.generation_directory(3) / "1-rank-1.safetensors"
    stray.symlink_to(tmp_path / "gone")  # made before the manifest that names it
    late.attach(parts)
    assert is_undamaged(late, 3)


def test_an_attached_file_gets_a_name_that_no_other_has(parts: Parts, late: HostStore) -> None:
    """Of three files the middle one was never proven, and has gone."""
    first = late.attach(parts[:1])
    own = replace(first, files=(replace(first.files[0], name="1-rank-1.safetensors"),))
    grown = attachment("c", parts, own)
    assert len({file.name for file in grown.manifest.files}) == 2


def test_fetched_files_never_take_the_place_of_earlier_ones(
    parts: Parts, open_store: Opener
) -> None:
    """A new owner counts its folders anew."""
    _, source = parts[0]
    store = open_store(host="c")
    for _ in range(4):
        staged = store.stage(source.collection)
        store.unstage(staged)
        assert not staged.path.parent.exists(), "what is not taken is given back"
    fetch(store, source)
    store.prove(3)
    store.close()
    again = open_store(host="c")
    before = content(again.generation_directory(3))
    for column in range(4):
        fetch(again, source, Box((0, column), (2, 1)))
    assert len({file.name for file in again.manifest(3).files}) == 5
    before = {path: data for path, data in before.items() if not path.endswith(".json")}
    assert before.items() <= content(again.generation_directory(3)).items()


def test_what_was_fetched_gives_its_room_back_where_there_is_none_for_the_manifest(
    parts: Parts, late: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, source = parts[0]
    late.adopt_empty(source)
    staged = late.stage(source.collection)
    with monkeypatch.context() as patched:
        patched.setattr(held_module, "write_manifest", full_disk)
        with pytest.raises(OSError, match="No space left"):
            late.extend(3, staged)
    late.unstage(staged)
    assert not list(late.directory.glob("*/fetched-*")) and not staged.path.parent.exists()
    assert late.manifest(3).files == ()


def test_what_was_fetched_counts_as_unproven_until_a_proof_has_passed(
    parts: Parts, open_store: Opener
) -> None:
    _, source = parts[0]
    store = open_store(host="c")
    fetch(store, source)
    assert store.forget_unproven(3) is None and store.generations() == [], "nothing else is there"
    attached = store.attach(parts[:1])
    fetch(store, source, Box((0, 0), (2, 2)))
    store.close()
    store = open_store(host="c")  # also after the agent has died
    assert store.manifest(3).unproven == (1,)
    kept = store.forget_unproven(3)
    assert kept is not None and kept.digest() == attached.digest()
    assert len(list(store.generation_directory(3).glob("*.safetensors"))) == 1
    fetch(store, source, Box((0, 0), (2, 2)))
    store.prove(3)
    proven = store.forget_unproven(3)
    assert proven is not None and len(proven.files) == 2 and not proven.unproven


def test_a_manifest_says_what_was_committed_and_older_ones_are_read(parts: Parts) -> None:
    directory, part = parts[0]
    assert part.committed == STATED
    stated = read_manifest(directory).to_json()["committed"]
    assert stated["fingerprints"] == {"param/w": f"{7:016x}"}
    older = replace(part, committed=None)
    assert "committed" not in older.to_json()
    assert HostManifest.from_json(older.to_json(), "it").committed is None


def test_new_folders_of_the_durable_directory_are_brought_to_disk(
    store: HostStore, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation(store, 3, step=1)
    synced = set()
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    store.copy_to(3, disk / "job")
    below = disk / "job" / "generation-3"
    assert {str(folder) for folder in (below, *list(below.parents)[:3])} <= synced


def test_a_host_that_holds_something_joins_again_without_a_disk(
    store: HostStore, tmp_path: Path, disk: Path
) -> None:
    """The coordinator may be waiting for its workers, and the disk for somebody to repair it."""
    asked: list[Any] = []
    holdings = holdings_of(store, *durable(tmp_path), submit=lambda *given: asked.append(given))
    went: list[Exception | None] = []
    holdings.attach_beside(went.append)
    assert not went and asked[0][0] == DISK, "an empty one looks at the disk first, beside the loop"
    disk.write_text("no folder")
    asked[0][2]()
    assert isinstance(went[0], StoreError)
    generation(store, 3, step=3)
    holdings.attach_beside(went.append)
    assert went[1:] == [None] and len(asked) == 1


def test_a_disk_that_answers_nobody_never_holds_up_the_memory_of_a_host(
    parts: Parts, late: HostStore, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever touches what is attached does so while the store answers others: the agent's loop
    waits for that."""
    names = [(os, name) for name in ("stat", "lstat", "listdir", "scandir", "unlink")]
    names += [(builtins, "open")]  # what ``map_file`` opens by
    reals = {name: getattr(module, name) for module, name in names}
    realpath, looked = os.path.realpath, list[str]()

    def watched(name: str) -> Any:
        def call(path: Any, *arguments: Any, **named: Any) -> Any:
            with monkeypatch.context() as context:
                for module, each in names:
                    context.setattr(module, each, reals[each])
                is_left = name in ("lstat", "unlink") or named.get("follow_symlinks") is False
                there = path if is_left or isinstance(path, int) else realpath(path)
                if str(there).startswith(str(disk)):
                    looked.append(f"{name} {path}")
                    others.submit(late.generations).result(DEADLINE_S)
            return reals[name](path, *arguments, **named)

        return call

    with ThreadPoolExecutor(1) as others:
        for module, name in names:
            monkeypatch.setattr(module, name, watched(name))
        late.attach(parts)
        generation(late, 4, step=4)
        with late.open_rows(3) as rows:
            assert len(rows.files) == 2 and all(len(file) for file in rows.files)
        os.truncate(disk / "generation-3" / "b" / "rank-1.safetensors", 10)
        assert late.examine(3)
        late.attach(parts)
        late.most_bytes()
        late.check_spare(1)
        late.copy_to(4, tmp_path / "another")
        late.detach()
    assert late.generations() == [4] and looked
