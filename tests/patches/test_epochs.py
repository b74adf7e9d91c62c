"""An epoch has one order, and each step of it the same samples, on any number of replicas."""

from collections.abc import Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import RandomSampler, SequentialSampler

from scalai.core.degrees.batches import Batches
from scalai.core.errors import RefusedError
from scalai.patches.hugging_face import loop_hooks
from scalai.patches.hugging_face.sharded_loaders import EpochBatches, check_ranks


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


def test_an_order_that_seed_and_epoch_do_not_give_is_refused() -> None:
    random: Any = RandomSampler(range(20))
    with pytest.raises(RefusedError, match="use_seedable_sampler"):
        EpochBatches(random, Batches(4, 2, 2), 0, drop_last=False)
    few: Any = SequentialSampler(range(3))
    with pytest.raises(RefusedError, match="fewer than a global batch"):
        EpochBatches(few, Batches(4, 2, 2), 0, drop_last=True)


class Wrapper:
    """Accelerate's wrapper, as far as a schedule is carried."""

    def __init__(self, total: int) -> None:
        self.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda at: 1 - at / total
        )


def test_a_prepared_schedule_goes_on_where_it_was() -> None:
    before, after = Wrapper(4096 * 8), Wrapper(4096 * 8)
    for _ in range(5 * 2):
        before.optimizer.step()
        before.scheduler.step()
    assert loop_hooks.put(loop_hooks.taken(before, 2), after) is None
    assert after.optimizer.param_groups[0]["lr"] == before.optimizer.param_groups[0]["lr"]
    for _ in range(2):
        after.optimizer.step()
        after.scheduler.step()
    assert after.optimizer.param_groups[0]["lr"] == pytest.approx(1 - 6 * 2 / (4096 * 8))


@pytest.mark.parametrize("follows", [True, False])
def test_a_script_that_is_told_the_ranks_of_now_has_its_schedule_stepped_as_it_made_it(
    follows: bool,
) -> None:
    """In units of these ranks, or of the first ones whatever the ranks."""
    now = 4 if follows else 2
    before, after = Wrapper(4096 * 2), Wrapper(4096 * now)
    for _ in range(5 * 2):
        before.optimizer.step()
        before.scheduler.step()
    assert loop_hooks.put(loop_hooks.taken(before, 2), after, told=4) == (now, follows)
    assert after.optimizer.param_groups[0]["lr"] == 1 - 5 / 4096
    for _ in range(now):
        after.optimizer.step()
        after.scheduler.step()
    assert after.optimizer.param_groups[0]["lr"] == pytest.approx(1 - 6 / 4096)


def test_a_trainer_that_counts_one_process_a_rank_is_refused() -> None:
    """As Accelerate does without GPUs, where the script does not say that it has none."""
    session: Any = SimpleNamespace(tp=1, pp=1, dp=2)
    check_ranks(session, 2, "Accelerate")
    with pytest.raises(RefusedError, match=r"counts 1 process\(es\), the round has DP2"):
        check_ranks(session, 1, "Accelerate")
