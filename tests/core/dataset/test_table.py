"""The table of data sets: every slip is named, and one that is laid over another wins."""

import pytest

from scalai.core.dataset.order import GlobalBatches
from scalai.core.dataset.table import DatasetTable
from scalai.core.degrees.batches import BatchRamp
from scalai.core.errors import UsageError
from scalai.runtime.codec import convert

TABLE = DatasetTable(
    {"a": "/a", "b": "s3://b"}, {"a": 4}, {"b": 7}, 12, (4, 4, 60)
)  # fmt: skip


@pytest.mark.parametrize(
    ("values", "why"),
    [
        *(({"sources": {name: "/a"}}, f"'{name}' cannot name a data set")
          for name in ("", "..", "a/b", ".hidden", "a" * 101)),
        ({"sources": {"a": ""}}, "sources.a = ''; expected an absolute path, or a URL"),
        ({"sources": {"a": "data/a"}}, "sources.a = 'data/a'; expected an absolute path"),
        ({"record_tokens": {"a": 0}}, "record_tokens.a = 0; expected 1 to"),
        ({"record_tokens": {"a": 1 << 70}}, "record_tokens.a = .*; expected 1 to"),
        ({"shuffle": {"a": -1}}, "shuffle.a = -1; expected a seed of 0 or more"),
        ({"global_batch_size": 0}, "global_batch_size = 0; expected 1 to"),
        ({"global_batch_size": 1 << 40}, "expected 1 to"),
        ({"rampup_batch_size": (4, 4, 60)}, "needs global_batch_size beside it"),
        ({"global_batch_size": 12, "rampup_batch_size": (4, 4)}, "expected START, INCREMENT and"),
        ({"global_batch_size": 12, "rampup_batch_size": (4, 5, 60)}, "a multiple of the increment"),
        ({"global_batch_size": 12, "rampup_batch_size": (24, 4, 60)}, "cannot grow from 24 to 12"),
        ({"global_batch_size": 12, "rampup_batch_size": (0, 4, 60)}, "cannot grow from 0 to 12"),
        ({"global_batch_size": 12, "rampup_batch_size": (4, 0, 60)}, "cannot grow from 4 to 12"),
        ({"global_batch_size": 12, "rampup_batch_size": (4, 4, -1)}, "expected 0 to .* SAMPLES"),
        ({"global_batch_size": 1 << 30, "rampup_batch_size": (1, 1, 9)}, "at most 4096 sizes"),
    ],
)  # fmt: skip
def test_every_slip_is_named(values: dict[str, object], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        DatasetTable(**values)  # type: ignore[arg-type]


def test_what_is_said_of_a_data_set_that_there_is_not_is_refused() -> None:
    with pytest.raises(UsageError, match=r"shuffle names 'c', and sources \['a'\]"):
        DatasetTable({"a": "/a"}, shuffle={"c": 1}).checked()
    assert TABLE.checked() is TABLE


def test_a_table_overrules_another_by_data_set_and_the_batch_as_a_whole() -> None:
    found = DatasetTable({"a": "/other"}, {"b": 8}, global_batch_size=64).over(TABLE)
    assert found == DatasetTable({"a": "/other", "b": "s3://b"}, {"a": 4, "b": 8}, {"b": 7}, 64)
    assert DatasetTable().over(TABLE) == TABLE == TABLE.over(DatasetTable())


def test_it_is_read_back() -> None:
    assert convert(TABLE.to_json(), DatasetTable) == TABLE
    assert DatasetTable().to_json() == {}


@pytest.mark.parametrize("batch", [None, 12, BatchRamp(4, 4, 60, 12)])
def test_its_batches_are_those_that_it_states(batch: int | BatchRamp | None) -> None:
    found = DatasetTable.of_batch(batch)
    assert found.batches == (None if batch is None else GlobalBatches.of(batch))
    assert convert(found.to_json(), DatasetTable) == found
