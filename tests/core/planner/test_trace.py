"""A table of changes is read as it is meant, or refused with the way out."""

import pytest

from scalai.core.errors import RefusedError
from scalai.core.planner.trace import Event, Trace, read_trace


def read(text: str, until_s: float | None = None) -> Trace:
    return read_trace(text.splitlines(), "t.csv", until_s)


@pytest.mark.parametrize(
    ("text", "way_out"),
    [
        ("", "t.csv is empty. It needs a header such as time_min,gpus,kind"),
        ("# nothing\n\n", "t.csv is empty"),
        ("time_s,gpus\n", "no line below it"),
        ("time,gpus\n0,8\n9,4\n", "have one of time_s, time_min and time_h"),
        ("time_s,time_min,gpus\n0,0,8\n", "several columns of times"),
        ("time_s,hosts\n0,8\n9,4\n", "have one called gpus"),
        ("0,8\n9,4\n", "no column of times in a unit among 0, 8"),
        ("time_s,gpus\n0,8\n9,4\n9,8\n", "line 4: 9 is not after the time of the line before"),
        ("time_s,gpus\n0,8\n9,4\n5,8\n", "line 4: 5 is not after the time of the line before"),
        ("time_s,gpus\n0,8\n-1,4\n", "'-1' is no time of 0 or more"),
        ("time_s,gpus\n0,8\nnan,4\n", "'nan' is no time of 0 or more"),
        ("time_s,gpus\n0,8\ninf,4\n", "'inf' is no time of 0 or more"),
        ("time_s,gpus\n0,8\nsoon,4\n", "'soon' is no time of 0 or more"),
        ("time_s,gpus\n0,8\n9,-4\n", "'-4' is no number of devices; use 0 (the job waits)"),
        ("time_s,gpus\n0,8\n9,4.5\n", "'4.5' is no number of devices"),
        ("time_s,gpus\n0,8\n9,\n", "'' is no number of devices"),
        ("time_s,gpus\n0,8\n9,99999999999\n", "use 0 (the job waits) to 1000000000"),
        ("time_s,gpus\n0,8\n9\n", "line 3: 1 cells below a header of 2"),
        ("time_s,gpus,kind\n0,8,\n9,4,flood\n", "kind 'flood' is none of planned, failure, end"),
        ("time_s,gpus,kind\n0,8,\n9,4,end\n10,4,\n", "only the last line may have the kind 'end'"),
        ("time_s,gpus\n0,0\n9,0\n", "at no time is there a device"),
        ("time_s,gpus\n0,8\n", "add a line of kind 'end', or say --until"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_way_out(text: str, way_out: str) -> None:
    with pytest.raises(RefusedError) as error:
        read(text)
    assert way_out in str(error.value)


def test_an_end_that_contradicts_the_table_is_refused() -> None:
    with pytest.raises(RefusedError, match="end the trace after it"):
        read("time_s,gpus\n0,8\n9,4\n", until_s=9)
    with pytest.raises(RefusedError, match="leave out --until"):
        read("time_s,gpus,kind\n0,8,\n9,4,end\n", until_s=20)


def test_units_kinds_comments_and_blanks_are_read() -> None:
    text = (
        "# source\n GPUs , time_min , kind\n\n16,0,\n8,35,Failure\n0,70,planned\n8,80,\n0,90,end\n"
    )
    assert read(text) == Trace(
        (Event(0, 16), Event(2100, 8, is_failure=True), Event(4200, 0), Event(4800, 8)), 5400
    )
    assert read("seconds,devices\n0,2\n10,1\n", until_s=15).events[1] == Event(10, 1)


def test_a_last_line_without_devices_ends_the_trace() -> None:
    assert read("time_s,gpus\n0,8\n9,0\n") == Trace((Event(0, 8),), 9)
    waits = read("time_s,gpus\n0,8\n9,0\n", until_s=12)
    assert waits == Trace((Event(0, 8), Event(9, 0)), 12) and waits.sizes == (8,)


def test_without_an_end_the_last_event_lasts_as_the_others_did_and_it_is_said() -> None:
    assert read("time_s,gpus\n0,8\n10,4\n30,8\n60,4\n") == Trace(
        (Event(0, 8), Event(10, 4), Event(30, 8), Event(60, 4)), 80, is_end_assumed=True
    )
