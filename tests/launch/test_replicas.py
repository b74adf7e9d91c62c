"""Replicas: fetched over the data plane into the keeper's part, as fast as steps allow."""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scalai.core.errors import DamageError, RoomError, StoreError
from scalai.core.messages.commands import Replicate
from scalai.core.messages.reports import Replicated, Report, Suspected
from scalai.core.messages.shared import Shared
from scalai.core.messages.worker_messages import RankSnapshot
from scalai.core.tensors.collection import Collection, Tensor
from scalai.core.tensors.fingerprint import piece_fingerprint
from scalai.core.tensors.region import Box, whole
from scalai.core.tensors.replica_pace import FIRST_RATE
from scalai.core.tensors.replicas import ring_of
from scalai.launch.agent.data_plane import DataPeer, DataPlaneServer
from scalai.launch.agent.replica_fetch import Kept, ReplicaRate, Replicas
from scalai.store.generation import unite_hosts
from scalai.store.host import HostStore
from scalai.store.manifest import HostManifest
from support.listed import listed
from support.wire import travelled

TOKEN = b"token"
HOSTS = "abc"
WEIGHT = Tensor("param/w", (6, 4), "F32")
"""Held whole by each host."""
TRAINED, FROZEN = Tensor("main/w", (6, 4), "F32"), Tensor("main/f", (12, 4), "F32")
BIG = Tensor("main/b", (3, 6 << 20), "F32")
"""A third is more than the buffers of a connection hold."""
EACH = {TRAINED: 2 * 4 * 4, FROZEN: 4 * 4 * 4, BIG: 4 * (6 << 20)}
"""Bytes of a third."""
ALL_BYTES = EACH[TRAINED] + EACH[FROZEN]


class Job:
    """Three hosts that hold ``WEIGHT``, a third of each other tensor, and replicas of the host
    before them; of b, the rate and the store's budget may be given."""

    def __init__(
        self, folder: Path, rate: ReplicaRate | None = None, budget_bytes: int | None = None
    ) -> None:
        self.stores = {
            host: HostStore("job", host, folder, budget_bytes if host == "b" else None)
            for host in HOSTS
        }
        self.servers = {host: DataPlaneServer(s, TOKEN) for host, s in self.stores.items()}
        rates = {"b": rate}
        self.keepers = {h: Replicas(store, TOKEN, rates.get(h)) for h, store in self.stores.items()}
        self.parts: dict[str, HostManifest] = {}
        self._orders = 0

    def write(self, number: int, content: Mapping[Tensor, int], order: str = HOSTS) -> None:
        """Commit a generation: each element is its place and the ``content`` of its tensor;
        ``order``: the hosts by their thirds."""
        for host, store in self.stores.items():
            third = order.index(host)
            rows = [(t, _third(t, third)) for t in content] + [(WEIGHT, whole(WEIGHT.shape))]
            held = Collection.of(rows)
            slot = store.reserve({third: held})
            path = slot.directory / slot.files[0].name
            data, prints = b"", []
            for tensor, box in rows:
                values = np.arange(box.numel, dtype=np.float32) + box.offset[0] * tensor.shape[1]
                values = (values + content.get(tensor, 7)).reshape(box.shape)
                prints.append(piece_fingerprint(values.view(np.uint32), box, tensor.shape))
                data += values.tobytes()
            path.write_bytes(path.read_bytes()[: -len(data)] + data)
            about = {"consumed_samples": 1, "world_size": 3, "tensors": len(rows)}
            part = RankSnapshot(tuple(prints), f"dp{third}", {"lr": 1}, {"seed": third})
            store.seal(
                slot, step=4, about={**about, "snapshot": f"r-{number}"}, parts={third: part}
            )
            self.parts[host] = store.commit(slot, number)

    def command(self) -> Replicate:
        """Return the next order."""
        ring = ring_of(dict.fromkeys(HOSTS, ""), 1)
        addresses = {name: server.address for name, server in self.servers.items()}
        self._orders += 1
        return Replicate(self._orders, listed(self.parts, addresses, ranks=3), Shared(ring))

    def keep(self, host: str = "b") -> Kept:
        """Have a host make its replicas, and check its whole part."""
        command = self.command()
        self.keepers[host].begin(command.order)
        kept = self.keepers[host].keep(travelled(command))
        with self.stores[host].open_rows(self.parts[host].generation) as rows:
            assert not list(rows.damage())
        return kept

    def replicated(self) -> tuple[Report, ...]:
        """Return b's reports of an order."""
        command = self.command()
        self.keepers["b"].begin(command.order)
        return self.keepers["b"].replicated(travelled(command))

    def is_as_written(self) -> bool:
        """Whether b has neither a replica of the last generation nor a rest of one."""
        part, store = self.parts["b"], self.stores["b"]
        rests = list(store.directory.glob("fetched-*"))
        return store.manifest(part.generation).files == part.files and not rests

    def kept_file(self, number: int) -> Path:
        (found,) = self.stores["b"].generation_directory(number).glob("fetched-*")
        return found

    def close(self) -> None:
        for host in HOSTS:
            self.servers[host].close()
            self.stores[host].close()


def _third(tensor: Tensor, number: int) -> Box:
    rows = tensor.shape[0] // 3
    return Box((number * rows, 0), (rows, tensor.shape[1]))


Maker = Callable[..., Job]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Maker]:
    made: list[Job] = []

    def job(rate: ReplicaRate | None = None, budget_bytes: int | None = None) -> Job:
        made.append(Job(tmp_path / "store", rate, budget_bytes))
        return made[-1]

    yield job
    for each in made:
        each.close()


@pytest.fixture
def job(make: Maker) -> Job:
    """Generation 1, with ``TRAINED`` alone cut into thirds."""
    made = make()
    made.write(1, {TRAINED: 0})
    return made


# ------------------------------------------------------------------ replicas


def test_each_keeps_what_the_one_before_it_holds_alone(job: Job) -> None:
    for host, ward in (("a", "c"), ("b", "a"), ("c", "b")):
        kept = job.keep(host)
        assert kept.reason == "" and kept.size_bytes == EACH[TRAINED]
        assert kept.grown is not None and f"dp{HOSTS.index(ward)}" in kept.grown.rank_state
        rows = kept.grown.collection
        held = {rows.box(row) for row in range(len(rows))}
        assert (TRAINED, _third(TRAINED, HOSTS.index(ward))) in held
    left = [job.stores[host].manifest(1) for host in "ab"]  # c is lost
    found = unite_hosts([replace(part, committed=None) for part in left], [None, None])
    assert found.step == 4 and set(found.rank_state) == {"dp0", "dp1", "dp2"}
    job.parts["b"] = left[1]
    again = job.keep("b")
    assert again.size_bytes == 0 and job.stores["b"].manifest(1).files == left[1].files


def test_states_of_ranks_are_kept_where_no_piece_has_to_be(make: Maker) -> None:
    job = make()
    job.write(1, {})
    kept = job.keep()
    assert kept.size_bytes == 0 and kept.grown is not None
    assert set(kept.grown.rank_state) == {"dp0", "dp1"}
    assert kept.grown.files == job.parts["b"].files


def change(store: HostStore, begin: int, *, is_cut: bool = False) -> None:
    """Change the byte of a host's file at ``begin`` before its end; or cut the file there."""
    (path,) = store.generation_directory(1).glob("rank-*")
    data = bytearray(path.read_bytes())
    data[-begin] ^= 0xFF
    path.write_bytes(data[:-begin] if is_cut else data)


@pytest.mark.fault
@pytest.mark.parametrize("is_cut", [False, True])
def test_what_a_host_has_not_committed_is_not_kept_and_it_is_named(job: Job, is_cut: bool) -> None:
    change(job.stores["a"], 97, is_cut=is_cut)  # the weight is the last 96 bytes
    suspects, given = job.replicated()
    assert isinstance(suspects, Suspected) and suspects.hosts == ("a",)
    assert isinstance(given, Replicated) and re.search(r"\ba\b", given.reason)
    assert job.is_as_written()
    assert job.stores["a"].examine(1), "it finds that itself"
    job.parts["a"] = job.stores["a"].manifest(1)
    *grown, again = job.replicated()
    assert not any(isinstance(report, Suspected) for report in grown)
    assert isinstance(again, Replicated) and again.reason == "", "there is nothing to keep of it"


@pytest.mark.fault
def test_parts_of_a_damaged_piece_are_refused_by_who_has_it(job: Job, tmp_path: Path) -> None:
    """They have no fingerprints of their own."""
    held = job.parts["a"].collection
    (row,) = [row for row in range(len(held)) if held.box(row)[0] == TRAINED]
    tensor, box = held.box(row)
    half, both = (Collection.of([(tensor, Box(box.offset, (rows, 4)))]) for rows in (1, 2))
    path, none, rows = tmp_path / "x", np.zeros(1, np.int64), np.array([row])
    stated = job.parts["a"].fingerprint[rows]
    path.write_bytes(bytes(64))
    peer = DataPeer(job.servers["a"].address, TOKEN, "a")
    assert peer.fetch(1, rows, stated, half, path, none, is_checked=True) == 16
    change(job.stores["a"], 97)  # behind the half
    assert peer.fetch(1, rows, stated, half, path, none) == 16, "a restore is proven as a whole"
    with pytest.raises(DamageError, match=r"refuses: .* has fingerprint"):
        peer.fetch(1, rows, stated, half, path, none, is_checked=True)
    assert peer.fetch(1, rows, stated, both, path, none, is_checked=True), "the other compares it"


def test_a_host_that_gives_nothing_is_named(job: Job) -> None:
    job.servers["a"].close()
    kept = job.keep()
    assert kept.grown is None and kept.reason.startswith("a: ")


@pytest.mark.fault
def test_the_next_snapshot_keeps_its_room(make: Maker) -> None:
    """Without it there would be room for the replicas."""
    part = Tensor("main/w", (3 << 6, 1 << 8), "F32")
    job = make(budget_bytes=(5 << 16) // 2)
    job.write(1, {part: 0})
    with pytest.raises(RoomError, match=r"for this host's next snapshot.*--replicas 0"):
        job.keep()
    assert job.is_as_written()


@pytest.mark.parametrize("is_copied", [False, True], ids=["fetched", "copied"])
def test_what_is_given_up_ends_and_leaves_nothing(make: Maker, is_copied: bool) -> None:
    """A round begins while bytes arrive, or are copied from an older generation."""
    is_begun = False

    def clock() -> float:  # it is read for all that has come
        if is_begun:
            made.keepers["b"].give_up()
        return 0.0

    made = make(ReplicaRate("b", 1.0, clock))
    made.write(1, {TRAINED: 0, FROZEN: 0})
    if is_copied:
        made.keep()
        made.write(2, {TRAINED: 0, FROZEN: 0})
    is_begun = True
    with pytest.raises(StoreError, match="not needed any more"):
        made.keep()
    assert made.is_as_written()


def test_a_later_order_ends_an_earlier_one(job: Job) -> None:
    earlier, later = job.command(), job.command()
    job.keepers["b"].begin(later.order)
    with pytest.raises(StoreError, match="something newer"):
        job.keepers["b"].keep(earlier)


def test_an_agent_whose_memory_runs_out_lives_on(make: Maker) -> None:
    def clock() -> float:
        raise MemoryError

    job = make(ReplicaRate("b", 1.0, clock))
    job.write(1, {TRAINED: 0})
    (found,) = job.replicated()
    assert isinstance(found, Replicated)
    assert found.is_lasting and "memory ran out" in found.reason
    assert job.is_as_written()


# ------------------------------------------------------------------ what has not changed is copied


@pytest.mark.fault
def test_what_is_frozen_crosses_once_and_what_is_trained_each_time(make: Maker) -> None:
    job = make()
    job.write(1, {TRAINED: 1, FROZEN: 0})
    first = job.keep()
    assert (first.size_bytes, first.unchanged_bytes) == (ALL_BYTES, 0)
    for number in (2, 3):
        job.write(number, {TRAINED: number, FROZEN: 0})
        kept = job.keep()
        assert (kept.size_bytes, kept.unchanged_bytes) == (EACH[TRAINED], EACH[FROZEN])
        job.stores["b"].drop(number - 1)
        with job.stores["b"].open_rows(number) as rows:
            assert not list(rows.damage()), "the older generation's files are used again"


@pytest.fixture
def twice(make: Maker) -> Job:
    """Two equal generations, with b's replicas of the first."""
    job = make()
    job.write(1, {TRAINED: 1, FROZEN: 0})
    job.keep()
    job.write(2, {TRAINED: 1, FROZEN: 0})
    return job


@pytest.mark.fault
def test_where_nothing_has_changed_nobody_is_asked_for_bytes(twice: Job) -> None:
    """The copy is proven as what has come, and has bytes of its own."""
    kept = twice.keep()
    assert (kept.size_bytes, kept.unchanged_bytes) == (0, ALL_BYTES)
    assert kept.grown is not None and kept.grown.unproven == (len(kept.grown.files) - 1,)
    with twice.kept_file(2).open("r+b") as file:
        file.write(bytes(64))
    with twice.stores["b"].open_rows(1) as rows:
        assert not list(rows.damage())


@pytest.mark.fault
def test_a_keeper_without_an_older_generation_fetches_all(twice: Job) -> None:
    twice.stores["b"].drop(1)
    kept = twice.keep()
    assert (kept.size_bytes, kept.unchanged_bytes) == (ALL_BYTES, 0)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("order", "copied"), [("cba", 0), ("bac", ALL_BYTES)], ids=["another third", "its own before"]
)
def test_pieces_are_copied_if_they_are_cut_as_before(make: Maker, order: str, copied: int) -> None:
    """The degrees have changed in between."""
    job = make()
    job.write(1, {TRAINED: 1, FROZEN: 0})
    job.keep()
    job.write(2, {TRAINED: 1, FROZEN: 0}, order)
    kept = job.keep()
    assert (kept.size_bytes, kept.unchanged_bytes) == (ALL_BYTES - copied, copied)


@pytest.mark.fault
def test_an_older_generation_that_goes_meanwhile_is_done_without(
    twice: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = twice.stores["b"]
    open_rows = store.open_rows

    def dropped(generation: int) -> object:
        if 1 in store.generations():
            store.drop(1)
        return open_rows(generation)

    monkeypatch.setattr(store, "open_rows", dropped)
    kept = twice.keep()
    assert (kept.size_bytes, kept.unchanged_bytes) == (ALL_BYTES, 0)


@pytest.mark.fault
def test_a_copy_that_is_damaged_is_found_and_fetched_instead(
    twice: Job, caplog: pytest.LogCaptureFixture
) -> None:
    with twice.kept_file(1).open("r+b") as file:
        file.seek(-ALL_BYTES, 2)  # the first element of the first piece
        file.write(b"\xff\xff\xff\x7f")
    kept = twice.keep()
    assert {kept.size_bytes, kept.unchanged_bytes} == {EACH[TRAINED], EACH[FROZEN]}
    assert "event=damaged generation=1 host=b" in caplog.text


# ------------------------------------------------------------------ the rate


class Clock:
    """Time that passes where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def still_needed() -> None: ...


def rate(clock: Clock, slowdown: float = 0.01, every: int = 0) -> ReplicaRate:
    made = ReplicaRate("a", slowdown, clock, clock.sleep)
    made.space(every)
    return made


@pytest.mark.parametrize("looks", [(), ((1, 9), None)], ids=["no workers", "workers are gone"])
def test_replicas_come_at_the_rate(looks: tuple[tuple[int, int] | None, ...]) -> None:
    clock = Clock()
    made = rate(clock, every=10)
    made.begin(8, is_urgent=False)
    for look in looks:
        made.look(look)
    made.expect(int(FIRST_RATE))
    for _ in range(20):
        made.came(int(FIRST_RATE / 20), still_needed)
    assert clock.now - 100 == pytest.approx(0.9, abs=0.05)


@pytest.mark.parametrize(("slowdown", "is_urgent"), [(1.0, False), (0.01, True)])
def test_urgent_ones_and_those_of_who_wants_no_limit_are_not_held_back(
    slowdown: float, is_urgent: bool
) -> None:
    clock = Clock()
    made = rate(clock, slowdown)
    made.begin(8, is_urgent=is_urgent)
    made.came(1 << 50, still_needed)
    assert clock.now == 100


@pytest.mark.fault
def test_the_next_snapshot_ends_the_waiting_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    made = rate(clock, every=10)
    made.look((1, 9))
    made.begin(8, is_urgent=False)
    made.expect(1 << 50)
    with caplog.at_level(logging.INFO):
        made.came(int(100 * FIRST_RATE), lambda: made.look((1, 18)))
        made.came(1 << 49, still_needed)
        assert clock.now == pytest.approx(100.0, abs=0.2)
        assert caplog.text.count("event=replica_hurried host=a step=8") == 1
        for step, is_late in ((18, True), (28, True), (38, False), (48, True)):
            made.end()
            made.look((1, step + 10 * is_late))
            made.begin(step, is_urgent=False)
            made.came(1, still_needed)
    assert caplog.text.count("event=replica_hurried") == 2, "once for each time that it begins"


def test_who_is_not_needed_any_more_does_not_wait_to_the_end() -> None:
    clock = Clock()
    made = rate(clock)
    made.begin(8, is_urgent=False)

    def is_over() -> None:
        if clock.now > 100.5:
            raise StoreError("over")

    with pytest.raises(StoreError, match="over"):
        made.came(int(1000 * FIRST_RATE), is_over)
    assert clock.now < 101


class Training:
    """Workers that step, seen by ticks."""

    def __init__(self, every: int = 0) -> None:
        self._clock = Clock()
        self.rate = rate(self._clock, every=every)
        self._step, self._ends_at = 0, self._clock.now
        self.run(40, 0.5)

    def run(self, seconds: float, step_s: float, *, is_giving: bool = False) -> None:
        until = self._clock.now + seconds
        while self._clock.now < until:
            while self._ends_at <= self._clock.now:
                self._step, self._ends_at = self._step + 1, self._ends_at + step_s
            self.rate.look((1, self._step), is_giving=is_giving)
            self._clock.now += 0.1


def test_a_change_of_the_rate_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Steps take twice as long beside replicas."""
    training = Training()
    with caplog.at_level(logging.INFO):
        training.rate.begin(8, is_urgent=False)
        training.run(100, 1.0)
    first = f"event=replica_rate host=a bytes_per_s={FIRST_RATE / 2:.0f} before={FIRST_RATE:.0f}"
    assert first in caplog.text and training.rate.pace.rate < FIRST_RATE / 2


def test_steps_beside_what_others_fetch_here_are_not_taken_for_usual_ones() -> None:
    training = Training()
    training.run(100, 1.0, is_giving=True)
    assert training.rate.pace.step_s == pytest.approx(0.5, rel=0.1)
    training.rate.begin(8, is_urgent=False)
    training.run(100, 1.0, is_giving=True)
    assert training.rate.pace.rate < FIRST_RATE, "all fetch and give at once, as a rule"


def test_what_is_hurried_says_nothing_of_the_rate() -> None:
    """It comes faster than the rate: that the steps suffer is no reason to lower it."""
    training = Training(every=1000)
    for step, expected, is_lowered in ((8, 1 << 50, False), (1008, 1 << 20, True)):
        training.rate.begin(step, is_urgent=False)
        training.rate.expect(expected)
        if not is_lowered:
            training.rate.came(1 << 20, still_needed)
        training.run(100, 1.0)
        training.rate.end()
        assert (training.rate.pace.rate < FIRST_RATE) == is_lowered


def slow(clock: Clock, sleep: Callable[[float], None]) -> ReplicaRate:
    made = ReplicaRate("b", 0.01, clock, sleep)
    made.pace = replace(made.pace, rate=1e7)
    return made


def test_what_crosses_takes_as_long_as_the_rate_says(make: Maker) -> None:
    clock = Clock()
    job = make(slow(clock, clock.sleep))
    job.write(1, {BIG: 0})
    assert job.keep().size_bytes == EACH[BIG]
    assert clock.now - 100 == pytest.approx(EACH[BIG] / 1e7, abs=0.2)


def test_a_host_that_goes_while_its_bytes_come_slowly_is_named_and_holds_nobody_up(
    make: Maker,
) -> None:
    clock, gave = Clock(), list[bool]()

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        gave.append(made.servers["a"].is_giving)
        made.servers["a"].close()

    made = make(slow(clock, sleep))
    assert not made.servers["a"].is_giving
    made.write(1, {BIG: 0})
    (found,) = made.replicated()
    assert isinstance(found, Replicated) and found.reason and not found.is_lasting, found
    assert gave[0] and made.is_as_written()
