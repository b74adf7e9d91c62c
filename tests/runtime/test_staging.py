"""What several threads copy is what one would have copied."""

import pytest
import torch

from scalai.runtime import staging
from scalai.runtime.staging import MOST_COPIERS, copiers, move

SHAPES = [(), (1,), (3,), (1000,), (7, 1000), (1, 5000), (5000, 1), (3, 40, 50)]


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_memory_of_any_shape_and_stride_is_copied_whole(
    shape: tuple[int, ...], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "SHARED_BYTES", 64)
    source = torch.randint(-1000, 1000, tuple(2 * n for n in shape), dtype=torch.int16)
    source = source[tuple(slice(None, None, 2) for _ in shape)]
    assert source.shape == shape
    target = torch.zeros(shape, dtype=torch.int16)
    move(target, source, threads)
    assert torch.equal(target, source)


def test_ranks_of_a_host_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    found = []
    for ranks in (1, 4, 8, 32):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        found.append(copiers())
    assert found == [MOST_COPIERS, 4, 2, 1]
