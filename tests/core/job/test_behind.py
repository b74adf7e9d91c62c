"""For whom the others wait in a training that hangs."""

import pytest

from scalai.core.job.overdue import behind
from scalai.core.messages.reports import SILENT, Stalled

pytestmark = pytest.mark.fault

BACKWARD = '"torch/autograd/graph.py", line 829 in _engine_run_backward < "t.py", line 9 in main'
REDUCE = '"/x/torch/distributed/c10d.py", line 2 in all_reduce < "train.py", line 11 in main'
SLEEP = '"train.py", line 7 in load'
STOPPED = f"{SILENT}: state='T (stopped)' wchan=do_signal_stop"


def stalls(*hosts: list[str]) -> dict[str, Stalled]:
    """Return what hosts a, b, c say whose ranks stand at these places, all behind step 5."""
    found, first = {}, 0
    for name, places in zip("abc", hosts, strict=False):
        ranks = tuple(range(first, first + len(places)))
        where = tuple(zip(ranks, places, strict=True))
        found[name] = Stalled(ranks, 5, 400.0, where=where)
        first += len(places)
    return found


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ([[REDUCE, REDUCE], [REDUCE, STOPPED]], {"b": (3,)}),
        ([[REDUCE], [STOPPED]], {"b": (1,)}),
        ([[STOPPED], [STOPPED], [REDUCE]], {}),
        ([[STOPPED], [STOPPED]], {}),
        ([[REDUCE, REDUCE], [REDUCE, SLEEP]], {"b": (3,)}),
        ([[SLEEP, SLEEP], [REDUCE, REDUCE]], {"a": (0, 1)}),
        ([[SLEEP, SLEEP, SLEEP], [REDUCE]], {}),
        ([[BACKWARD, BACKWARD], [BACKWARD, SLEEP]], {"b": (3,)}),
        ([[BACKWARD, BACKWARD], [SLEEP, SLEEP]], {}),
        ([[BACKWARD, BACKWARD], [BACKWARD, REDUCE]], {}),
        ([[REDUCE, REDUCE], [REDUCE, REDUCE]], {}),
        ([[], []], {}),
        ([[BACKWARD], []], {}),
    ],
)
def test_who_stands_apart_is_named_where_that_tells(
    hosts: list[list[str]], expected: dict[str, tuple[int, ...]]
) -> None:
    assert behind(stalls(*hosts)) == expected


def test_who_has_made_fewer_steps_is_behind_wherever_it_stands() -> None:
    found = stalls([SLEEP], [REDUCE])
    found["b"] = Stalled((1,), 4, 400.0, where=found["b"].where)
    assert behind(found) == {"b": (1,)}
