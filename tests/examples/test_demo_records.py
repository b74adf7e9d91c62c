"""What ranks have read against the order of the data set: any difference is found."""

from dataclasses import replace

import pytest
from demo_records import Note, check_records, corpus, permuted, read_notes

SOURCE = corpus("\n\n".join(f"paragraph {number}" for number in range(7)))
EXPECTED = permuted(SOURCE, 7, 12)
"""A pass and more, in the order of a seed."""
NOTES = [
    Note(1, 0, tuple(EXPECTED[0:2])),
    Note(1, 2, tuple(EXPECTED[2:4])),
    Note(2, 4, tuple(EXPECTED[4:8])),
    Note(3, 8, tuple(EXPECTED[8:12])),
]


def swapped(note: Note) -> Note:
    first, second, *rest = note.hashes
    return replace(note, hashes=(second, first, *rest))


@pytest.mark.parametrize(
    ("notes", "found"),
    [
        pytest.param([], "12 of 12 differ, first place 0", id="nobody has read"),
        pytest.param([swapped(NOTES[0]), *NOTES[1:]], "2 of 12 differ, first place 0",
                     id="two records swapped"),
        pytest.param([*NOTES[:3], replace(NOTES[3], hashes=("0", *NOTES[3].hashes[1:]))],
                     "1 of 12 differ, first place 8", id="another record"),
        pytest.param([NOTES[0], *NOTES[2:]], "2 of 12 differ, first place 2",
                     id="a rank's records are not there"),
        pytest.param([*NOTES, Note(4, 12, ("0",))], "1 of 13 differ, first place 12",
                     id="a record that no step has consumed"),
        pytest.param([*NOTES, swapped(NOTES[2])], "place 4 was read twice, and differently",
                     id="a step done again with others"),
    ],
)  # fmt: skip
def test_records_that_are_not_the_permutations_are_found(notes: list[Note], found: str) -> None:
    check = check_records(notes, EXPECTED)
    assert (check.is_kept, check.found) == (False, found)


def test_where_nothing_was_consumed_nothing_is_shown() -> None:
    assert not check_records([], []).is_kept


def test_records_of_all_ranks_are_the_permutation_and_a_step_may_be_done_again() -> None:
    check = check_records([*reversed(NOTES), NOTES[2]], EXPECTED)
    assert check.is_kept
    assert check.found.startswith("12 records, ")
    assert sorted(EXPECTED[:7]) == sorted({*EXPECTED}), "each sample once a pass"


def test_notes_are_read_as_they_were_written() -> None:
    text = '{"step": 1, "first": 2, "hashes": ["a", "b"]}\n'
    assert read_notes([text, ""]) == [Note(1, 2, ("a", "b"))]
