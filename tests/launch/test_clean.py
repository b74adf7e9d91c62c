"""``scalai clean``: what killed jobs left goes, what lives stays."""

import argparse
import json
from pathlib import Path

import pytest

from scalai.core.errors import RefusedError, StoreError, UsageError
from scalai.launch.agent.durable import attach_durable, write_finished
from scalai.launch.commands import clean
from scalai.launch.coordinator import leases
from scalai.launch.coordinator.registers import FolderRegister, LeaseEntry
from support.store_states import Opener, generation, snapshot, two_ranks


def run(root: Path, *arguments: str) -> None:
    parser = argparse.ArgumentParser()
    clean.add_parser(parser.add_subparsers())
    args = parser.parse_args(["clean", "--store-dir", str(root), *arguments])
    assert args.run(args) == 0


def leave(open_store: Opener, job: str, *hosts: str) -> Path:
    """Leave a job's generations behind, its agents gone; return its directory."""
    for host in hosts:
        store = open_store(job, host)
        generation(store, 1, step=1)
        store.close()
    return store.directory.parent


def test_dead_jobs_are_removed_and_live_ones_left(
    open_store: Opener, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = leave(open_store, "dead", "a", "b")
    alive = leave(open_store, "alive", "a")
    open_store("alive", "b")
    (dead / "coordinator.json").write_text("torn")
    (dead / "coordinator.lock").touch()
    run(dead.parent, "--force")
    text = capsys.readouterr().out
    assert not dead.exists() and (alive / "a" / "generation-1").exists()
    assert f"remove  {dead}" in text and f"left      {alive}  host b is in use by process" in text


def test_a_named_job_that_lives_is_refused(open_store: Opener) -> None:
    store = open_store("alive", "a")
    other = leave(open_store, "other", "a")
    with pytest.raises(StoreError, match=r"'alive' is alive: host a is in use by process \d+"):
        run(other.parent, "--job", "alive")
    store.close()
    run(other.parent, "--job", "alive", "--force")
    assert not store.directory.parent.exists() and other.exists()


def test_a_dry_run_removes_nothing(open_store: Opener, capsys: pytest.CaptureFixture[str]) -> None:
    job = leave(open_store, "dead", "a")
    run(job.parent, "--dry-run", "--force")
    assert job.exists() and f"would remove  {job}" in capsys.readouterr().out
    run(job.parent, "--dry-run", "--job", "dead")
    assert job.exists() and "step 1," in capsys.readouterr().out


def test_a_machine_reads_what_goes_and_what_stays(
    open_store: Opener, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = leave(open_store, "dead", "a")
    open_store("alive", "b")
    run(dead.parent, "--dry-run", "--force", "--json")
    found = json.loads(capsys.readouterr().out)
    alive, gone = found["entries"]
    assert "in use by process" in alive["why_left"] and alive["size_bytes"] == 0
    assert gone["path"] == str(dead) and found["freed_bytes"] == gone["size_bytes"] > 0
    assert "step 1," in gone["states"][0]["text"] and found["dry_run"] is True


def test_nothing_there_is_nothing_to_do(tmp_path: Path) -> None:
    run(tmp_path / "none")
    with pytest.raises(UsageError, match="no job 'x'"):
        run(tmp_path, "--job", "x")
    with pytest.raises(UsageError, match="cannot name a directory"):
        run(tmp_path, "--job", "../x")


@pytest.mark.parametrize("stranger", ["home/pictures/", "home/letter", "letter"])
def test_a_directory_that_is_no_store_is_refused(tmp_path: Path, stranger: str) -> None:
    path = tmp_path / stranger
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if stranger.endswith("/") else path.touch()
    with pytest.raises(UsageError, match="is no store"):
        run(tmp_path)
    if (tmp_path / "home").exists():
        with pytest.raises(UsageError, match="is no store"):
            run(tmp_path, "--job", "home")
    assert path.exists()


@pytest.mark.fault
def test_what_could_be_resumed_is_named_and_left_without_force(
    open_store: Opener, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store("dead", "a")
    generation(store, 2, step=20)
    snapshot(store, 25)
    store.close()
    job = store.directory.parent
    run(job.parent)
    text = capsys.readouterr().out
    assert f"left      {job}  could be resumed; --job dead --force removes it" in text
    assert "a/generation-2: generation 2 of host a, step 20, " in text and "s old" in text
    assert "a sealed snapshot of host a, step 25" in text and "freed 0 bytes" in text
    lost = r"could be resumed .*\n.*step 20.*\n.*step 25.*\n.*--force"
    with pytest.raises(StoreError, match=lost):
        run(job.parent, "--job", "dead")
    (job / "a" / "generation-2" / "manifest.json").write_text("{}")
    with pytest.raises(StoreError, match="damaged: "):
        run(job.parent, "--job", "dead")
    assert job.exists()
    run(job.parent, "--job", "dead", "--force")
    assert not job.exists()


@pytest.mark.fault
def test_torn_leftovers_and_untrained_states_go_without_force(open_store: Opener) -> None:
    store = open_store("dead", "a")
    generation(store, 1, step=0)
    store.reserve(two_ranks())
    store.close()
    run(store.directory.parent.parent)
    assert not store.directory.parent.exists()


def save(open_store: Opener, durable: Path, *, keep: bool) -> Path:
    """Leave a job's state in the durable directory, and in the store too or not."""
    store = open_store("dead", "a")
    generation(store, 1, step=100)
    store.copy_to(1, durable / "dead")
    store.close() if keep else store.remove()
    return store.directory.parent


@pytest.mark.fault
@pytest.mark.parametrize("keep", [True, False])
def test_what_a_job_has_saved_goes_by_force_and_its_name_begins_anew(
    open_store: Opener, tmp_path: Path, keep: bool
) -> None:
    durable = tmp_path / "durable"
    job = save(open_store, durable, keep=keep)
    write_finished(durable / "dead", 100, 1)
    (durable / "other").mkdir()
    arguments = ["--job", "dead", "--durable-dir", str(durable)]
    with pytest.raises(StoreError, match=r"durable/dead/generation-1/a: .*step 100"):
        run(job.parent, *arguments)
    run(job.parent, *arguments, "--dry-run")
    assert (durable / "dead" / "generation-1" / "a").is_dir() and job.exists() == keep
    run(job.parent, *arguments, "--force")
    assert [path.name for path in durable.iterdir()] == ["other"] and not job.exists()


@pytest.mark.fault
def test_what_a_living_run_has_saved_is_left(
    open_store: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 0.05)
    durable = tmp_path / "durable"
    job = save(open_store, durable, keep=False)
    lease = leases.Lease(FolderRegister(durable, "dead"), LeaseEntry(1, "127.0.0.1", 1))
    lease.start()
    arguments = ["--job", "dead", "--durable-dir", str(durable), "--force"]
    with pytest.raises(RefusedError, match="is in use by run"):
        run(job.parent, *arguments)
    lease.end(is_over=True)
    run(job.parent, *arguments)
    assert not (durable / "dead").exists()


def test_the_mark_of_a_finished_job_alone_needs_no_force(tmp_path: Path) -> None:
    durable = tmp_path / "durable"
    write_finished(durable / "done", 100, None)
    run(tmp_path / "none", "--job", "done", "--durable-dir", str(durable))
    assert not (durable / "done").exists()


@pytest.mark.fault
def test_a_durable_directory_with_something_else_is_left(
    open_store: Opener, tmp_path: Path
) -> None:
    durable = tmp_path / "durable"
    job = save(open_store, durable, keep=True)
    (durable / "dead" / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"thesis\.tex is neither a generation nor finished\.json"):
        run(job.parent, "--job", "dead", "--durable-dir", str(durable), "--force")
    assert (durable / "dead" / "thesis.tex").exists() and job.exists()
    with pytest.raises(UsageError, match="--durable-dir needs --job"):
        run(job.parent, "--durable-dir", str(durable), "--force")


def test_what_was_attached_lies_elsewhere_and_goes_without_force(
    open_store: Opener, tmp_path: Path
) -> None:
    save(open_store, tmp_path / "durable", keep=False)
    store = open_store("dead", "b")
    assert attach_durable(store, tmp_path / "durable" / "dead") == {}
    store.close()
    run(store.directory.parent.parent, "--job", "dead")
    assert not store.directory.parent.exists()
    assert (tmp_path / "durable" / "dead" / "generation-1" / "a").is_dir()
