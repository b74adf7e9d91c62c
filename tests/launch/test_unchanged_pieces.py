"""What a host keeps for others and has not changed since an older generation does not cross again:
it is copied on the host, and proven as what has come."""

from collections.abc import Iterator

import pytest

from scalai.core.errors import StoreError
from scalai.core.tensors.collection import Tensor
from scalai.store.files import contiguous_chunks
from scalai.store.host import HostStore
from support.keeping_hosts import KeepingHosts
from support.store_states import Opener

pytestmark = pytest.mark.fault

TRAINED, FROZEN = Tensor("main/w", (6, 4), "F32"), Tensor("main/f", (12, 4), "F32")
EACH = {TRAINED: 2 * 4 * 4, FROZEN: 4 * 4 * 4}
"""Bytes of a third of each."""


@pytest.fixture
def job(open_store: Opener) -> Iterator[KeepingHosts]:
    made = KeepingHosts(open_store)
    yield made
    made.close()


def test_what_is_frozen_crosses_once_and_what_is_trained_each_time(job: KeepingHosts) -> None:
    job.write(1, {TRAINED: 1, FROZEN: 0})
    first = job.keep()
    assert (first.size_bytes, first.unchanged_bytes) == (sum(EACH.values()), 0)
    for number in (2, 3):
        job.write(number, {TRAINED: number, FROZEN: 0})
        kept = job.keep()
        assert (kept.size_bytes, kept.unchanged_bytes) == (EACH[TRAINED], EACH[FROZEN])
        job.stores["b"].drop(number - 1)
        with job.stores["b"].open_rows(number) as rows:
            assert not list(rows.damage()), "the older generation's files are used again"


def test_where_nothing_has_changed_nobody_is_asked_for_bytes(job: KeepingHosts) -> None:
    """It is proven as what has come, and as little taken for proven until the state is."""
    job.write(1, {TRAINED: 1, FROZEN: 0})
    job.keep()
    job.write(2, {TRAINED: 1, FROZEN: 0})
    kept = job.keep()
    assert (kept.size_bytes, kept.unchanged_bytes) == (0, sum(EACH.values()))
    assert kept.grown is not None and kept.grown.unproven == (len(kept.grown.files) - 1,)


def test_a_keeper_without_an_older_generation_fetches_all(job: KeepingHosts) -> None:
    job.write(1, {TRAINED: 1, FROZEN: 0})
    job.keep()
    job.write(2, {TRAINED: 1, FROZEN: 0})
    job.stores["b"].drop(1)
    kept = job.keep()
    assert (kept.size_bytes, kept.unchanged_bytes) == (sum(EACH.values()), 0)


def test_an_older_generation_that_goes_meanwhile_is_done_without(
    job: KeepingHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.write(1, {TRAINED: 1, FROZEN: 0})
    job.keep()
    job.write(2, {TRAINED: 1, FROZEN: 0})
    store = job.stores["b"]
    open_rows = store.open_rows

    def dropped(generation: int) -> object:
        if 1 in store.generations():
            store.drop(1)
        return open_rows(generation)

    monkeypatch.setattr(store, "open_rows", dropped)
    kept = job.keep()
    assert (kept.size_bytes, kept.unchanged_bytes) == (sum(EACH.values()), 0)


def test_a_copy_that_is_damaged_is_found_and_fetched_instead(
    job: KeepingHosts, caplog: pytest.LogCaptureFixture
) -> None:
    job.write(1, {TRAINED: 1, FROZEN: 0})
    job.keep()
    with open(job.kept_file(1), "r+b") as file:
        file.seek(-EACH[TRAINED] - EACH[FROZEN], 2)  # the first element of the first piece
        file.write(b"\xff\xff\xff\x7f")
    job.write(2, {TRAINED: 1, FROZEN: 0})
    kept = job.keep()
    assert {kept.size_bytes, kept.unchanged_bytes} == set(EACH.values())
    assert "event=damaged generation=1 host=b" in caplog.text


def test_pieces_that_are_cut_otherwise_now_are_fetched(job: KeepingHosts) -> None:
    """The degrees have changed in between: b keeps another third than before."""
    job.write(1, {TRAINED: 1, FROZEN: 0})
    job.keep()
    job.write(2, {TRAINED: 1, FROZEN: 0}, "cba")
    kept = job.keep()
    assert (kept.size_bytes, kept.unchanged_bytes) == (sum(EACH.values()), 0)


def test_what_this_host_had_written_itself_need_not_cross_either(job: KeepingHosts) -> None:
    job.write(1, {TRAINED: 1, FROZEN: 0})
    job.write(2, {TRAINED: 1, FROZEN: 0}, "bac")  # of what b has written, a has the content now
    kept = job.keep()
    assert (kept.size_bytes, kept.unchanged_bytes) == (0, sum(EACH.values()))


def test_a_drop_and_later_writes_harm_neither(job: KeepingHosts) -> None:
    job.write(1, {TRAINED: 1, FROZEN: 0})
    job.keep()
    job.write(2, {TRAINED: 1, FROZEN: 0})
    job.keep()
    with open(job.kept_file(2), "r+b") as file:
        file.write(bytes(64))
    with job.stores["b"].open_rows(1) as rows:
        assert not list(rows.damage())


def test_what_is_given_up_while_it_is_copied_ends_and_leaves_nothing(
    job: KeepingHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.write(1, {TRAINED: 1, FROZEN: 0})
    job.keep()
    job.write(2, {TRAINED: 1, FROZEN: 0})

    def chunks(*given: object) -> object:
        job.keepers["b"].give_up()
        return contiguous_chunks(*given)  # type: ignore[arg-type]

    monkeypatch.setattr("scalai.store.host.contiguous_chunks", chunks)
    with pytest.raises(StoreError, match="not needed any more"):
        job.keep()
    store: HostStore = job.stores["b"]
    assert store.manifest(2).files == job.parts["b"].files
    assert not list(store.directory.glob("fetched-*"))
