"""Loaders under hooks: one order of samples, whatever layouts a job goes through."""

import contextlib
import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from scalai.core.dataset.drawn import Number
from scalai.core.dataset.ledger import Ledger, judge
from scalai.core.degrees.batches import Batches, Shares, fit_batches
from scalai.core.errors import RefusedError
from scalai.patches.data.clock import REMEMBERED, Clock, Glances
from scalai.patches.data.loaders import Feed, FirstBatches, PassObserver
from scalai.patches.deepspeed.micro_batches import Accumulation, AsThen, tell
from scalai.patches.hugging_face.sharded_loaders import EpochBatches, check_ranks
from scalai.runtime.consumption import LEDGER, Consumption

GLOBAL_BATCH, MICRO_BATCH = 12, 3
DPS = (1, 2, 3, 4, 6, 12)
Saved = Sequence[Mapping[str, Any]]


class Numbers(Dataset[int]):
    """A data set whose samples are their own numbers."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


@contextlib.contextmanager
def hooked(dp: int | None = 1, first_dp: int = 4, saved: Saved | None = None) -> Iterator[Feed]:
    """Hook torch for one process of a round, as long as the context lasts. The script makes its
    loaders before the engine is built, and the state ``saved`` is put."""
    places = [(DistributedSampler, "__init__"), (DataLoader, "__init__")]
    places += [(DataLoader, "__iter__"), (_BaseDataLoaderIter, "__next__")]
    originals = [(owner, name, owner.__dict__[name]) for owner, name in places]
    feed = Feed()
    feed.install()
    if dp is not None:
        micro = fit_batches(GLOBAL_BATCH, first_dp, MICRO_BATCH).micro_batch_size
        first = FirstBatches(GLOBAL_BATCH, micro, first_dp)
        feed.start(fit_batches(GLOBAL_BATCH, dp, MICRO_BATCH), first, MICRO_BATCH)
    if saved is not None:
        feed.clocks.put([*saved])
    try:
        yield feed
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def loader_of(
    samples: int, dp: int = 1, rank: int = 0, *, shuffle: bool = True, drop_last: bool = False,
    workers: int = 0, batch_size: int = MICRO_BATCH, seed: int = 0,
) -> "DataLoader[int]":  # fmt: skip
    data = Numbers(samples)
    sampler: DistributedSampler[int] = DistributedSampler(
        data, dp, rank, shuffle=shuffle, drop_last=drop_last, seed=seed
    )
    return DataLoader(data, batch_size, sampler=sampler, drop_last=drop_last, num_workers=workers)


def set_epoch(loader: "DataLoader[int]", epoch: int) -> None:
    assert isinstance(loader.sampler, DistributedSampler)
    loader.sampler.set_epoch(epoch)


def train(
    feed: Feed, loader: "DataLoader[int]", steps: int, *, epochs: int = 3, sets_epoch: bool = True
) -> list[list[int]]:
    """Go through the epochs as a script does, from the first one on, for so many steps at most.
    Returns the samples of each step."""
    assert feed.batches is not None
    made: list[list[int]] = []
    seen: list[int] = []
    drawn = 0
    for epoch in range(epochs):
        if sets_epoch:
            set_epoch(loader, epoch)
        for batch in loader:
            seen += batch.tolist()
            drawn += 1
            if drawn % feed.batches.num_micro_batches == 0:
                made.append(seen)
                seen = []
                feed.step()
                if len(made) == steps:
                    return made
    return made


def left_at(steps: int, samples: int = 24, *, epochs: int = 3, sets_epoch: bool = True) -> Saved:
    """Return the state of a job of one rank behind so many steps, of two an epoch."""
    with hooked() as feed:
        train(feed, loader_of(samples), steps, epochs=epochs, sets_epoch=sets_epoch)
        assert not feed.clocks.is_replaying
        saved: Saved = feed.clocks.take()
        return saved


def uninterrupted(samples: int, *, shuffle: bool, sets_epoch: bool, epochs: int) -> list[set[int]]:
    """Return the samples of each step as torch deals them to one rank, which keeps the order."""
    steps = []
    loader = loader_of(samples, shuffle=shuffle, batch_size=GLOBAL_BATCH)
    for epoch in range(epochs):
        if sets_epoch:
            set_epoch(loader, epoch)
        steps += [set(batch.tolist()) for batch in loader]
    return steps


Script = Callable[[Feed, int, int, int], list[list[int]]]
"""Trains (DP, rank, steps)."""


def played(script: Script, rounds: Sequence[tuple[int, int]]) -> list[set[int]]:
    """Play rounds of (DP, steps); return the samples of each step over all ranks."""
    made: list[set[int]] = []
    saved: Saved = []
    for dp, steps in rounds:
        parts = []
        for rank in range(dp):
            with hooked(dp, rounds[0][0], saved) as feed:
                parts.append(script(feed, dp, rank, steps))
                after = feed.clocks.take()
        saved = after
        together = [[n for part in step for n in part] for step in zip(*parts, strict=True)]
        assert all(len(step) == GLOBAL_BATCH for step in together)
        made += [set(step) for step in together]
    return made


@settings(max_examples=40, deadline=None)
@given(
    rounds=st.lists(st.tuples(st.sampled_from(DPS), st.integers(1, 7)), min_size=1, max_size=6),
    shuffle=st.booleans(),
    sets_epoch=st.booleans(),
)
def test_any_changes_of_dp_leave_every_global_batch_as_it_was(
    rounds: Sequence[tuple[int, int]], shuffle: bool, sets_epoch: bool
) -> None:
    reference = uninterrupted(48, shuffle=shuffle, sets_epoch=sets_epoch, epochs=3)

    def script(feed: Feed, dp: int, rank: int, steps: int) -> list[list[int]]:
        return train(feed, loader_of(48, dp, rank, shuffle=shuffle), steps, sets_epoch=sets_epoch)

    assert played(script, (*rounds, (2, len(reference)))) == reference


@pytest.mark.parametrize("has_loader_each", [True, False], ids=["a loader each", "a look before"])
def test_a_script_with_its_own_passes_is_taken_up_within_them(has_loader_each: bool) -> None:
    """It makes a loader for each of three passes, or looks at a batch before."""

    def script(feed: Feed, dp: int, rank: int, steps: int) -> list[list[int]]:
        made: list[list[int]] = []
        loader = loader_of(24, dp, rank)
        for _ in range(3):
            if has_loader_each:
                loader = loader_of(24, dp, rank)
            else:
                assert len(next(iter(loader))) == MICRO_BATCH
            made += train(feed, loader, steps - len(made), epochs=1, sets_epoch=False)
            if len(made) == steps:
                break
        return made

    expected = played(script, [(1, 6)])
    assert played(script, [(1, 1), (2, 2), (1, 1), (2, 2)]) == expected and len(expected) == 6


@pytest.mark.parametrize("dp", DPS)
@pytest.mark.parametrize("workers", [0, 2])
def test_while_nothing_changes_a_rank_draws_what_torch_gives_it(dp: int, workers: int) -> None:
    micro = fit_batches(GLOBAL_BATCH, dp, MICRO_BATCH).micro_batch_size
    plain = [b.tolist() for b in loader_of(48, dp, dp - 1, batch_size=micro)]
    with hooked(dp, dp):
        loader = loader_of(48, dp, dp - 1, batch_size=micro, workers=workers)
        assert len(loader) == len(plain)
        assert [batch.tolist() for batch in loader] == plain


@pytest.mark.parametrize(("drop_last", "steps"), [(False, 5), (True, 4)])
@pytest.mark.parametrize("dp", DPS)
def test_a_pass_ends_with_a_whole_global_batch(dp: int, drop_last: bool, steps: int) -> None:
    made: list[list[int]] = [[] for _ in range(steps)]
    for rank in range(dp):
        with hooked(dp) as feed:
            loader = loader_of(50, dp, rank, drop_last=drop_last, shuffle=False)
            for step, samples in enumerate(train(feed, loader, 100, epochs=1)):
                made[step] += samples
    numbers = [sorted(step) for step in made]
    assert numbers[:4] == [list(range(at, at + 12)) for at in range(0, 48, 12)]
    assert drop_last or numbers[4] == [*range(10), 48, 49]


def test_a_loader_is_as_long_as_in_the_first_round() -> None:
    """Before the engine is built it is as long as torch's was then."""
    for dp in DPS:
        with hooked(dp, first_dp=4):
            assert len(loader_of(48, dp)) == 4
    for samples, drop_last in ((47, False), (48, False), (50, False), (47, True), (50, True)):
        plain = len(loader_of(samples, 4, drop_last=drop_last))
        with hooked(None) as feed:
            feed.first_dp = lambda: 4
            assert len(loader_of(samples, 3, drop_last=drop_last)) == plain


def test_micro_batches_that_are_drawn_ahead_are_drawn_again() -> None:
    with hooked(2) as feed:
        batches = iter(loader_of(48, 2, shuffle=False))
        first = [next(batches).tolist() for _ in range(3)]  # one more than a step has
        feed.step()
        saved = feed.clocks.take()
    with hooked(2) as feed:
        loader = loader_of(48, 2, shuffle=False)
        feed.clocks.put(saved)
        assert next(iter(loader)).tolist() == first[2]


def test_a_batch_drawn_ahead_at_the_end_of_a_pass_is_drawn_again() -> None:
    """By a script that draws the next batch before it trains on this one, over its epochs."""

    def play(saved: Saved, steps: int) -> tuple[list[list[int]], Saved]:
        made: list[list[int]] = []
        with hooked(4, saved=saved) as feed:
            loader = loader_of(24, 4)
            batches = chain.from_iterable(loader for _ in range(3))  # two steps an epoch
            ahead = next(batches)
            while ahead is not None:
                batch, ahead = ahead, next(batches, None)
                if len(made) == steps:  # a job stops as the next forward pass begins
                    break
                made.append(batch.tolist())
                feed.step()
            return made, feed.clocks.take()

    expected, _ = play([], 6)
    for steps in range(1, 6):
        made, saved = play([], steps)
        assert made + play(saved, 6)[0] == expected and len(expected) == 6


def test_an_evaluation_neither_counts_nor_is_cut() -> None:
    with hooked(2) as feed:
        loader, other = loader_of(48, 2), loader_of(50, 2, shuffle=False)
        train(feed, loader, 2)
        feed.is_evaluating = lambda: True
        assert sum(len(batch) for batch in other) == 25
        assert len(other) == 9
        feed.is_evaluating = lambda: False
        with torch.no_grad():
            assert sum(len(batch) for batch in other) == 25
            next(iter(other))
        train(feed, loader, 1)
        assert [entry["consumed"] for entry in feed.clocks.take()] == [12, 0]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_was_begun_before_an_evaluation_is_not_counted(workers: int) -> None:
    with hooked(2) as feed:
        loader = loader_of(48, 2)
        other = iter(loader_of(48, 2, workers=workers))  # its workers begin at once
        feed.is_evaluating = lambda: True
        for _ in range(4):
            next(other)
        feed.is_evaluating = lambda: False
        train(feed, loader, 2)
        assert [entry["consumed"] for entry in feed.clocks.take()] == [24, 0]


def test_a_script_may_turn_training_on_behind_the_draw() -> None:
    with hooked() as feed:
        expected = train(feed, loader_of(24), 6)
    with hooked() as feed:
        loader = loader_of(24)
        made = train(feed, loader, 1, epochs=1)
        feed.is_evaluating = lambda: True  # what it evaluates by has no such sampler
        feed.clocks.put(feed.clocks.take())
        made += train(feed, loader, 5)
        assert made == expected
    with hooked() as feed:
        feed.is_evaluating = lambda: True
        with pytest.raises(RefusedError, match=r"began in eval\(\); call engine.train\(\) before"):
            train(feed, loader_of(24), 1)


def test_what_a_script_leaves_of_its_epochs_is_not_taken_for_drawn_ahead() -> None:
    with hooked() as feed:
        loader = loader_of(48)
        for _ in range(12):
            batches = iter(loader)
            for _ in range(9):  # two steps, and one micro-batch at which the script breaks
                next(batches)
            feed.step()
            feed.step()
        (place,) = feed.clocks.take()
        assert (place["pass"], place["consumed"], place["glanced"]) == ([0, 11], 24, [])
        assert place["ends"] == [[24, 11]]


@pytest.mark.parametrize(
    ("begins", "runs"),
    [
        (lambda n: (n, 0), 1),
        (lambda n: (0, 2 * n), 1),
        (lambda n: (n * n, n % 3), REMEMBERED),
    ],
    ids=["each epoch", "each pass but one", "now and then"],
)
def test_passes_that_are_only_looked_into_are_known_again_in_bounded_memory(
    begins: Callable[[int], tuple[int, int]], runs: int
) -> None:
    glanced = Glances()
    passes = [Number(*begins(n)) for n in range(1000)]
    for number in passes:
        glanced.append(number)
    assert len(glanced.runs) == runs and glanced.has_forgotten == (runs == REMEMBERED)
    known = [number for number in passes if number in glanced]
    assert known == passes[-len(known) :] and len(known) >= runs
    assert Number(*begins(1000)) not in glanced and Number(500, 1999) not in glanced


def test_batches_that_are_skipped_are_refused() -> None:
    with hooked() as feed:
        loader = loader_of(48)
        batches = iter(loader)
        for _ in range(16):
            next(batches)
        feed.step()
        assert list(batches) == []
        with pytest.raises(RefusedError, match="12 micro-batches were drawn and not trained on"):
            next(iter(loader))


def test_what_was_done_at_the_end_of_a_pass_is_not_done_again() -> None:
    with hooked() as feed:
        loader = loader_of(24)
        train(feed, loader, 2, sets_epoch=False)
        next(iter(loader))  # the script is in its second epoch
        saved = feed.clocks.take()
    with hooked(saved=saved) as feed:
        loader = loader_of(24, workers=2)
        batches = iter(loader)
        assert not isinstance(batches, _BaseDataLoaderIter), "no worker is started for it"
        assert list(batches) == [] and feed.clocks.is_replaying
        assert len(list(loader)) == 8


def test_passes_that_are_over_are_replayed_until_the_present_one() -> None:
    with hooked(saved=left_at(4)) as feed:
        loader = loader_of(24)
        assert feed.clocks.is_replaying
        assert list(loader) == []
        set_epoch(loader, 1)
        # The second epoch was at its end: what a script does behind it has not been done.
        assert list(loader) == [] and not feed.clocks.is_replaying


def test_a_pass_that_is_over_may_be_followed_by_one_that_is_not() -> None:
    with hooked(saved=left_at(4, sets_epoch=False)) as feed:
        loader, other = loader_of(24), loader_of(24)
        for _ in range(2):
            assert feed.clocks.may_yield_nothing and list(loader) == []
        assert feed.clocks.may_yield_nothing and len(list(loader)) == 8
        assert not feed.clocks.may_yield_nothing, "an empty loader is empty now"
        assert len(list(other)) == 8


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("saved_after", "epoch"), [(2, 0), (3, 1), (4, 1)])
def test_a_script_that_resumes_at_a_checkpoint_goes_on_where_the_job_is(
    saved_after: int, epoch: int, workers: int
) -> None:
    """It begins with the epoch in which it saved, and not with its first one; five steps were
    made, of two an epoch."""
    with hooked() as feed:
        train(feed, loader_of(24, workers=workers), saved_after, sets_epoch=False)
        over, saved = feed.clocks.over(), feed.clocks.take()
    with hooked(saved=saved) as feed:
        train(feed, loader_of(24, workers=workers), 5 - saved_after, sets_epoch=False)
        saved = feed.clocks.take()
    with hooked(saved=saved) as feed:
        feed.clocks.begin_after(over)
        loader = loader_of(24, workers=workers)
        assert len(train(feed, loader, 100, epochs=3 - epoch, sets_epoch=False)) == 1


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(48))


class StatefulDataLoader:
    """Stands for torchdata's, which makes itself without torch's own."""


def of_torchdata(feed: Feed) -> None:
    module = SimpleNamespace(StatefulDataLoader=StatefulDataLoader)
    feed.hook_torchdata(module)
    module.StatefulDataLoader()


def drawing(make: Callable[[], Any]) -> Callable[[Feed], Any]:
    return lambda feed: next(iter(make()))


@pytest.mark.parametrize(
    ("draw", "dp", "said"),
    [
        (drawing(lambda: DataLoader(Stream(), 3)), 1, "an iterable data set has no order"),
        (
            drawing(lambda: DataLoader(Numbers(48), 3, shuffle=True)), 1,
            "RandomSampler is not torch's DistributedSampler",
        ),
        (
            drawing(lambda: loader_of(48, batch_size=5)), 1,
            "a loader has batches of 5, the engine of 3",
        ),
        (drawing(lambda: loader_of(11, drop_last=True)), 1, "11 samples, fewer than a global"),
        (drawing(lambda: loader_of(48, 4)), 2, "deals to 4 replicas, the job has DP2"),
        (of_torchdata, 1, "StatefulDataLoader keeps its place by rank"),
    ],
    ids=["iterable", "random", "batches", "too small", "replicas", "torchdata"],
)  # fmt: skip
def test_an_order_that_nobody_knows_is_refused_with_the_reason(
    draw: Callable[[Feed], Any], dp: int, said: str
) -> None:
    with hooked(dp) as feed, pytest.raises(RefusedError, match=said):
        draw(feed)
        feed.step()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_ledger_has_each_place_once_over_changes_in_mid_epoch(workers: int) -> None:
    """50 samples make passes of 60 places, of which the last ten are the first ones again."""
    ledger, saved = Ledger.begun(0, 0), list[Mapping[str, Any]]()
    for dp, steps in ((4, 3), (2, 4), (6, 6)):
        with hooked(dp) as feed:
            loader = loader_of(50, dp, dp - 1, workers=workers)
            feed.clocks.put(saved)
            count = feed.step

            def step(count: Any = count, feed: Feed = feed) -> None:
                nonlocal ledger
                count()
                assert not list(ledger.objections(feed.clocks.draws))
                samples = (ledger.at[1] or 0) + GLOBAL_BATCH
                ledger = ledger.stepped(ledger.at[0] + 1, samples, feed.clocks.draws)

            feed.step = step  # type: ignore[method-assign]
            train(feed, loader, steps)
            saved = feed.clocks.take()
    assert judge(ledger, 13, 156).is_kept
    assert [(each.first.epoch, each.last.epoch, str(each.taken)) for each in ledger.passes] == [
        (0, 1, "0:60"), (2, 2, "0:36")
    ]  # fmt: skip
    whole = ledger.passes[0]
    assert whole.is_dealt and (whole.size, whole.length) == (50, 60)


@pytest.mark.fault
@pytest.mark.parametrize(("samples", "seed"), [(51, 0), (50, 3)])
def test_data_that_became_another_one_between_rounds_is_refused_before_it_is_drawn(
    samples: int, seed: int
) -> None:
    def begin(ledger: Consumption, samples: int = 50, seed: int = 0) -> None:
        with hooked(2) as feed:
            feed.on_pass = lambda name, facts: ledger.know({name: facts})
            next(iter(loader_of(samples, 2, seed=seed)))

    first, later = Consumption("run-1", {"dp": 2}), Consumption("run-2", {"dp": 2})
    first.begin(0, 0)
    begin(first)
    first.step_ended(1, GLOBAL_BATCH)
    later.restore(first.scalars()[LEDGER], 1, GLOBAL_BATCH)
    begin(later)
    with pytest.raises(RefusedError, match=r"'loader-0' is another one.*(size=51|seed=3)"):
        begin(later, samples, seed)


class Ends(PassObserver):
    """Notes the ends that the observer hears of."""

    def __init__(self, ends: list[Any]) -> None:
        self.ends = ends

    def ends_otherwise(self, clock: Clock) -> None:
        self.ends.append(clock.until if clock.ends_as_one else clock.ends[-2:])


@pytest.mark.fault
def test_a_pass_that_was_always_broken_off_at_one_place_ends_there_when_it_is_taken_up() -> None:
    """A count of the script's own begins anew within it, and the loader knows better."""
    ends: list[Any] = []

    def play(saved: Any, steps: int, at: int = 5) -> tuple[Any, Any]:
        """Train passes of at most ``at`` micro-batches, counted by ``enumerate``."""
        made: list[list[int]] = []
        with hooked(None) as feed:
            batch = fit_batches(MICRO_BATCH, 1, MICRO_BATCH)
            feed.start(batch, FirstBatches(MICRO_BATCH, MICRO_BATCH, 1), MICRO_BATCH)
            feed.observer = Ends(ends)
            loader = loader_of(24, shuffle=False)
            feed.clocks.put(json.loads(json.dumps(saved)))
            for _ in range(4):
                for place, samples in enumerate(loader):
                    if place == at:
                        break
                    if len(made) == steps:
                        return made, feed.clocks.take()
                    made.append(samples.tolist())
                    feed.step()
            return made, feed.clocks.take()

    expected, _ = play([], 100)
    assert len(expected) == 20
    for left, said in ((7, [15]), (12, [])):
        made, saved = play([], left)
        then, _ = play(saved, 100)
        assert made + then == expected and set(ends) == set(said)
        ends.clear()
    made, saved = play([], 3)  # nobody knows yet where passes end
    then, _ = play(saved, 100)
    assert len(made + then) == 23 and ends == [[(None, 1), (15, 1)]]


@pytest.mark.fault
def test_a_script_that_begins_behind_the_pass_under_way_is_refused() -> None:
    """By an epoch that it has noted itself, of a run that went on further than the state."""
    with hooked(saved=left_at(1)) as feed:
        loader = loader_of(24)
        set_epoch(loader, 1)
        with pytest.raises(
            RefusedError, match="in epoch 0, of which 12 of 24 samples are consumed"
        ):
            next(iter(loader))
    with hooked(saved=left_at(2, epochs=1)) as feed:  # one at its end leaves nothing out
        loader = loader_of(24)
        assert len(train(feed, loader, 2, epochs=1)) == 0
        assert len(train(feed, loader, 2, epochs=2)) == 2


@pytest.mark.fault
def test_a_loader_begun_before_the_engine_is_refused_within_a_pass() -> None:
    """Torch has dealt it from the beginning of the pass, before the state was there."""
    saved = left_at(1)
    with hooked(None) as feed:
        loader = loader_of(24)
        batches = iter(loader)
        next(batches)
        now = fit_batches(GLOBAL_BATCH, 1, MICRO_BATCH)
        feed.start(now, FirstBatches(GLOBAL_BATCH, MICRO_BATCH, 1), MICRO_BATCH)
        feed.clocks.put([*saved])
        for _ in range(3):
            feed.use(is_trained=True)
            next(batches)
        feed.use(is_trained=True)
        with pytest.raises(RefusedError, match=r"begin it behind deepspeed\.initialize"):
            feed.step()


def test_what_the_engine_only_evaluates_is_drawn_by_no_step() -> None:
    """By a script that turns gradients off within its loop, and does not say eval()."""
    with hooked() as feed:
        loader, other = loader_of(24), loader_of(24)
        batches, steps = iter(loader), 0
        for number in range(1, 9):
            next(batches)
            if steps == 0:
                feed.use(is_trained=False)  # it evaluates something else before its first step
            feed.use(is_trained=True)
            if number % 4 == 0:
                feed.step()
                steps += 1
                for _ in other:
                    feed.use(is_trained=False)
        assert [(line["pass"], line["consumed"]) for line in feed.clocks.take()] == [
            ([0, 0], 24), ([0, 1], 0)
        ]  # fmt: skip


@pytest.mark.parametrize("workers", [0, 2])
def test_a_model_that_is_trained_in_eval_draws_as_in_train(workers: int) -> None:
    """A backward pass says what is trained on; evaluations stay whole, and are drawn by no step."""

    def play(saved: Any, steps: int, dp: int, *, is_in_eval: bool) -> tuple[list[Any], Any]:
        made: list[Any] = []
        with hooked(dp, first_dp=2) as feed:
            feed.is_evaluating = lambda: is_in_eval
            loader, other = loader_of(51, dp, workers=workers), loader_of(50, dp)
            feed.clocks.put(saved)
            seen: list[int] = []
            for _ in range(3):
                for batch in loader:
                    seen += batch.tolist()
                    feed.use(is_trained=not is_in_eval)  # the forward pass
                    feed.use(is_trained=True)  # the backward pass
                    if len(seen) < GLOBAL_BATCH // dp:
                        continue
                    feed.step()
                    made.append(seen)
                    seen = []
                    if len(made) == steps:
                        return made, json.loads(json.dumps(feed.clocks.take()))
                evaluated = 0
                for batch in other if is_in_eval else ():
                    feed.use(is_trained=False)
                    evaluated += len(batch)
                assert evaluated == -(-50 // dp) * is_in_eval
        return made, None

    expected, _ = play([], 100, 2, is_in_eval=False)
    made, saved = play([], 7, 2, is_in_eval=True)
    assert [line["consumed"] for line in saved] == [24, 0]
    then, _ = play(saved, 100, 2, is_in_eval=True)
    assert made + then == expected and len(expected) == 15
    then, _ = play(saved, 100, 1, is_in_eval=True)
    assert len(made) + len(then) == 15


# ------------------------------------------------------------------ Hugging Face's loaders


class SeedableRandomSampler(RandomSampler):
    """Accelerate's in short: its order follows from the epoch."""

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(3)
        return super().__iter__()


def steps_of(samples: int, batches: Batches, consumed: int, drop_last: bool) -> list[list[int]]:
    """Return the samples of each step of an epoch, of all replicas."""
    sampler: Any = SeedableRandomSampler(range(samples))
    found = []
    for rank in range(batches.dp):
        epoch = EpochBatches(sampler, batches, rank, drop_last=drop_last)
        of = list(epoch.after(consumed))
        assert consumed or len(of) == len(epoch)
        each = batches.num_micro_batches
        found.append([list(chain(*of[at : at + each])) for at in range(0, len(of), each)])
    return [sorted(chain(*step)) for step in zip(*found, strict=True)]


@given(st.integers(12, 60), st.sampled_from([1, 2, 3, 4, 6, 12]), st.booleans(), st.integers(0, 4))
def test_steps_have_the_same_samples_on_any_number_of_replicas(
    samples: int, dp: int, drop_last: bool, step: int
) -> None:
    expected = steps_of(samples, Batches(12, 12, 1), 0, drop_last)
    assert steps_of(samples, Batches(12, 1, dp), 12 * step, drop_last) == expected[step:]
    seen = list(chain(*expected))
    once = np.bincount(seen, minlength=samples)
    if drop_last:
        assert once.max() == 1 and len(seen) == samples // 12 * 12
    else:
        assert once.min() == 1 and len(seen) == -(-samples // 12) * 12


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        (RandomSampler(range(20)), "use_seedable_sampler"),
        (SequentialSampler(range(3)), "fewer than a global batch"),
    ],
)
def test_an_order_that_seed_and_epoch_do_not_give_is_refused(sampler: Any, said: str) -> None:
    with pytest.raises(RefusedError, match=said):
        EpochBatches(sampler, Batches(4, 2, 2), 0, drop_last=True)


def test_a_trainer_that_counts_one_process_a_rank_is_refused() -> None:
    """As Accelerate does without GPUs, where the script does not say that it has none."""
    session: Any = SimpleNamespace(tp=1, pp=1, dp=2)
    check_ranks(session, 2, "Accelerate")
    with pytest.raises(RefusedError, match=r"counts 1 process\(es\), the round has DP2"):
        check_ranks(session, 1, "Accelerate")


# ------------------------------------------------------------------ micro-batches of a step


def engine_of(each: int) -> Any:
    return SimpleNamespace(
        set_gradient_accumulation_boundary=lambda is_boundary: None,
        no_sync=contextlib.nullcontext,
        backward=lambda loss, retain_graph=False, scale_wrt_gas=True: loss,
        gradient_accumulation_steps=lambda: each,
    )


def accumulating(each: int) -> tuple[Any, Accumulation]:
    engine, accumulation = engine_of(each), Accumulation()
    accumulation.install(engine)
    return engine, accumulation


def by_boundary(engine: Any, micro_batches: int) -> None:
    """As DeepSpeed's documentation has it."""
    engine.set_gradient_accumulation_boundary(False)
    by_deepspeed(engine, micro_batches - 1)
    engine.set_gradient_accumulation_boundary(is_boundary=True)
    engine.backward(1.0)


def by_no_sync(engine: Any, micro_batches: int) -> None:
    with engine.no_sync():
        by_deepspeed(engine, micro_batches - 1)
    engine.backward(1.0)


def by_deepspeed(engine: Any, micro_batches: int) -> None:
    """Two losses of one micro-batch count twice: DeepSpeed counts steps, and is right."""
    for _ in range(micro_batches):
        engine.backward(1.0)


def called(module: str, code: str, **names: Any) -> Any:
    """Run code as a module's own; return what it names ``found``."""
    namespace: dict[str, Any] = {"__name__": module, **names}
    exec(code, namespace)
    return namespace.get("found")


@pytest.mark.parametrize("accumulate", [by_boundary, by_no_sync])
@pytest.mark.parametrize("each", [1, 2, 8])
def test_a_number_of_the_scripts_own_is_refused_in_a_round_that_has_another(
    accumulate: Any, each: int
) -> None:
    """More micro-batches than the round has would make the batch larger in silence."""
    engine, accumulation = accumulating(each)
    for _ in range(2):
        accumulate(engine, each)
        accumulation.end_step(each)
    accumulate(engine, 4)
    with pytest.raises(RefusedError, match=f"accumulated 4 micro-batches .* round has {each}"):
        accumulation.end_step(each)


@pytest.mark.parametrize("call", ["1.0, scale_wrt_gas=False", "1.0, False, False"])
def test_losses_that_nobody_divides_by_their_number_are_refused_but_of_trainer(call: str) -> None:
    engine, _ = accumulating(2)
    code = f"def found(engine): return engine.backward({call})"
    # Accelerate hands on what its script has said; a trainer's training_step may be a script's own.
    for module in ("__main__", "accelerate.utils.deepspeed"):
        backward = called(module, code)
        with pytest.raises(RefusedError, match="scale_wrt_gas=False"):
            backward(engine)
        inner = {"inner": backward, "engine": engine}
        assert called("transformers.trainer", "found = inner(engine)", **inner) == 1.0
    assert engine.backward(1.0, scale_wrt_gas=True) == 1.0


def test_what_deepspeed_or_a_trainer_counts_is_left_to_it() -> None:
    engine, accumulation = accumulating(2)
    by_deepspeed(engine, 4)
    accumulation.end_step(2)
    call = "engine.set_gradient_accumulation_boundary(is_boundary=True)"
    called("accelerate.utils.deepspeed", call, engine=engine)
    by_deepspeed(engine, 4)
    accumulation.end_step(2)


def with_shares(module: torch.nn.Module, shares: Shares, replica: int) -> tuple[Any, Accumulation]:
    """Return an engine that counts as DeepSpeed does, in a round with shares."""
    engine = engine_of(shares.passes)
    engine.module, engine.forward, engine.micro_steps = module, module.forward, 0
    engine.backward = lambda loss, retain_graph=False, scale_wrt_gas=True: loss.div(
        shares.passes if scale_wrt_gas else 1
    ).backward()
    engine._running_engine_backward, engine._backward_prologue = False, lambda: None
    engine._backward_prologue_per_tensor = lambda gradient: gradient / shares.passes
    accumulation = Accumulation()
    accumulation.install(engine)
    accumulation.share(engine, shares, replica)
    return engine, accumulation


@pytest.mark.parametrize("way", ["counted", "stated", "by the loss"])
@pytest.mark.parametrize(("micro_batches", "dp"), [(5, 3), (4, 3), (7, 2), (8, 5)])
def test_each_micro_batch_of_uneven_shares_counts_alike_and_fillers_not_at_all(
    micro_batches: int, dp: int, way: str
) -> None:
    """DeepSpeed counts passes, or a framework around the engine states the end of a step; there the
    loss's own ``backward`` may be called."""
    is_stated = way != "counted"
    shares, rows = Shares(micro_batches, dp), torch.randn(2 * micro_batches, 8, 4).double()

    def made() -> torch.nn.Sequential:
        torch.manual_seed(5)
        return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).double()

    whole, modules = made(), [made() for _ in range(dp)]
    for each in rows:
        (whole(each).square().sum() / micro_batches).backward()
    for rank, module in enumerate(modules):
        engine, accumulation = with_shares(module, shares, rank)
        for step in range(2):
            for count, batch in enumerate(
                Batches(micro_batches, 1, dp, True).samples(step * micro_batches, rank).ravel(), 1
            ):
                loss = engine.forward(rows[batch]).square().sum()
                assert accumulation.has_fillers == (count == shares.passes)
                if is_stated:
                    engine._is_gradient_accumulation_boundary = count == shares.passes
                if way == "by the loss":
                    engine._backward_prologue()
                    loss.register_hook(engine._backward_prologue_per_tensor)
                    loss.backward()
                else:
                    engine.backward(loss)
                engine.micro_steps += not is_stated
            accumulation.end_step(shares.passes)
        assert module[1].num_batches_tracked == 2 * shares.of_replica(rank)
    for expected, *of_replicas in zip(
        whole.parameters(), *(m.parameters() for m in modules), strict=True
    ):
        mean = torch.stack([of.grad for of in of_replicas]).mean(0)
        assert torch.allclose(mean, expected.grad, rtol=1e-5, atol=1e-6)
    assert accumulation.without_fillers(torch.arange(dp)).tolist() == [*range(micro_batches % dp)]


def test_a_number_that_is_stored_follows_what_the_round_has_drawn() -> None:
    has_drawn = False
    stored = AsThen(6, 3, lambda: has_drawn)
    assert (24 // stored, 24 / stored, 5 * stored, stored + 1, str(stored)) == (8, 8.0, 15, 4, "3")
    assert stored == 3 and stored < 4 and hash(stored) == hash(3) and 7 % stored == 1
    has_drawn = True
    assert (24 // stored, 5 * stored, stored + 1, f"{stored}") == (4, 30, 7, "6")
    assert stored == 6 and 7 % stored == 1 and list(range(stored)) == [0, 1, 2, 3, 4, 5]
    assert type(pickle.loads(pickle.dumps(stored))) is int


@pytest.mark.fault
def test_a_script_is_told_the_accumulation_that_belongs_to_the_length_of_its_loaders() -> None:
    engine, feed = engine_of(6), Feed()
    feed.first = FirstBatches(24, 2, 4)
    tell(engine, feed)

    def asked(module: str = "__main__") -> Any:
        return called(module, "found = engine.gradient_accumulation_steps() + 0", engine=engine)

    assert (asked(), asked("deepspeed.runtime.engine")) == (3, 6)
    feed.is_counting = False  # the script places its data itself, by the ranks of now
    assert asked() == 6
    feed.is_counting = feed.has_drawn = True
    assert asked() == 6
