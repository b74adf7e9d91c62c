"""The reports that earlier releases wrote of their changes are still read."""

import json
from pathlib import Path

import pytest
from demo_story import PHASES, read_resize

SAVED = sorted((Path(__file__).parents[1] / "data").glob("*/reports"))


@pytest.mark.parametrize("reports", SAVED, ids=[folder.parent.name for folder in SAVED])
def test_the_reports_of_a_job_are_read(reports: Path) -> None:
    found = [json.loads(path.read_text()) for path in sorted(reports.glob("resize-*.json"))]
    start, left, joined = map(read_resize, found)
    assert [change.number for change in (start, left, joined)] == [1, 2, 3]
    assert [change.degrees for change in (left, joined)] == ["TP1·PP1·DP1", "TP2·PP1·DP1"]
    assert (left.workers, joined.workers) == ({"a": 1}, {"a": 1, "b": 1})
    assert left.proven == left.tensors == 3 and left.bytes_moved > 0 and left.steps_lost == 0
    assert set(joined.seconds) == set(PHASES) and 0 < joined.total_s
