"""What an agent's commits do where the store has no room, or nothing to commit."""

import errno

import pytest

from scalai.core import events
from scalai.core.commands import Commit
from scalai.core.reports import Report
from scalai.launch.commits import Commits
from scalai.launch.generations import deposit_name
from scalai.store.host import HostStore
from support.store_states import deposit, generation, is_whole


class Told:
    """What the agent has told."""

    def __init__(self, store: HostStore) -> None:
        self.committed: list[int] = []
        self.failed: list[str] = []
        self.commits = Commits(store, self.tell, self.failed.append)

    def tell(self, report: Report) -> None:
        assert isinstance(report, events.Committed)
        self.committed.append(report.generation)


@pytest.fixture
def told(store: HostStore) -> Told:
    """An agent's commits, and what they tell."""
    return Told(store)


def test_what_there_is_no_room_for_stays_sealed_and_is_committed_later(
    store: HostStore, told: Told, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slot, manifest = deposit(store, 3)
    name = deposit_name(manifest)

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("os.fsync", fail)
        told.commits.commit(Commit(3, name, None))
        told.commits.retry()
    assert told.committed == [] and told.failed == []
    assert [sealed.directory for sealed, _ in store.sealed()] == [slot.directory]
    assert caplog.text.count("it stays sealed. Make room") == 1
    told.commits.discard()  # a round begins with it: it has a number
    told.commits.retry()
    assert told.committed == [3] and is_whole(store, 3, step=3)
    told.commits.retry()
    assert told.committed == [3]


def test_a_host_that_the_job_goes_on_without_commits_nothing_late_by_itself(
    store: HostStore, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number may be left behind by then; it would be a newer state of which parts miss."""
    _, manifest = deposit(store, 3)

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("os.fsync", fail)
        told.commits.commit(Commit(3, deposit_name(manifest), None))
    told.commits.forget()
    told.commits.retry()
    assert store.generations() == [] and len(store.sealed()) == 1, "it is told when it joins again"
    told.commits.commit(Commit(3, deposit_name(manifest), None))
    assert told.committed == [3]


def test_nothing_to_commit_is_a_failure_and_no_commit(store: HostStore, told: Told) -> None:
    deposit(store, 3)
    told.commits.commit(Commit(4, "another", None))
    told.commits.retry()
    assert told.committed == [] and store.generations() == []
    assert "deposit 'another' is not sealed" in told.failed[0]


def test_a_commit_that_is_told_twice_is_done_once(store: HostStore, told: Told) -> None:
    made = generation(store, 3, step=3)
    told.commits.commit(Commit(3, deposit_name(made), None))
    assert told.committed == [3] and told.failed == []


def test_what_was_sealed_and_has_no_number_is_given_up(store: HostStore, told: Told) -> None:
    slot, _ = deposit(store, 3)
    told.commits.discard()
    assert store.sealed() == [] and not slot.directory.exists()
