"""How the work of a conversion is dealt out."""

from hypothesis import given
from hypothesis import strategies as st

from scalai.converters.work import BATCH_FILES, TASK_BYTES, TURNS, Task, Unit, batches
from scalai.core.tensors.region import Box


def task(number: int, size_bytes: int) -> Task:
    return Task(number, number, (Unit(number, Box((0,), (size_bytes,)), size_bytes),))


@given(
    sizes=st.lists(st.integers(1, 3 * TASK_BYTES // 2), max_size=300),
    workers=st.integers(0, 8),
)
def test_batches_hold_each_task_once_in_order_and_are_not_larger_than_need_be(
    sizes: list[int], workers: int
) -> None:
    tasks = [task(number, size) for number, size in enumerate(sizes)]
    found = batches(tasks, workers)
    assert [one for batch in found for one in batch] == tasks
    for batch in found:
        assert 1 <= len(batch) <= BATCH_FILES
        assert len(batch) == 1 or sum(one.size_bytes for one in batch) <= TASK_BYTES


def test_small_files_are_brought_to_disk_together_and_every_worker_gets_some() -> None:
    found = batches([task(number, 1000) for number in range(200)], workers=2)
    assert len(found) == TURNS * 2
    assert {len(batch) for batch in found} == {25}
    assert len(batches([task(number, TASK_BYTES) for number in range(5)], workers=2)) == 5
