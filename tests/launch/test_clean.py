"""``scalai clean``: what killed jobs left goes, what lives stays."""

import argparse
from pathlib import Path

import pytest
from store_states import Opener, generation

from scalai.core.errors import StoreError, UsageError
from scalai.launch import clean


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
    run(dead.parent)
    text = capsys.readouterr().out
    assert not dead.exists() and (alive / "a" / "generation-1").exists()
    assert f"remove  {dead}" in text and f"left      {alive}  host b is in use by process" in text


def test_a_named_job_that_lives_is_refused(open_store: Opener) -> None:
    store = open_store("alive", "a")
    with pytest.raises(StoreError, match=r"'alive' is alive: host a is in use by process \d+"):
        run(store.directory.parent.parent, "--job", "alive")
    store.close()
    run(store.directory.parent.parent, "--job", "alive")
    assert not store.directory.parent.exists()


def test_one_job_is_removed_and_no_other(open_store: Opener) -> None:
    one, two = leave(open_store, "one", "a"), leave(open_store, "two", "a")
    run(one.parent, "--job", "one")
    assert not one.exists() and two.exists()


def test_a_dry_run_removes_nothing(open_store: Opener, capsys: pytest.CaptureFixture[str]) -> None:
    job = leave(open_store, "dead", "a")
    run(job.parent, "--dry-run")
    assert job.exists() and f"would remove  {job}" in capsys.readouterr().out


def test_nothing_there_is_nothing_to_do(tmp_path: Path) -> None:
    run(tmp_path / "none")
    with pytest.raises(UsageError, match="no job 'x'"):
        run(tmp_path, "--job", "x")
    with pytest.raises(UsageError, match="no job's name"):
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


def test_a_coordinators_files_go_with_the_job(open_store: Opener) -> None:
    job = leave(open_store, "dead", "a")
    (job / "coordinator.json").write_text("torn")
    (job / "coordinator.lock").touch()
    run(job.parent)
    assert not job.exists()
