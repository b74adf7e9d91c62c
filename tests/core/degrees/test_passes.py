"""What of a job's passes may be another than its script's flags say, and how that is said."""

import pytest

from scalai.core.degrees.passes import (
    AS_GIVEN,
    NO_FREEDOM,
    RECOMPUTES,
    Freedom,
    Passes,
    difference,
    recompute_of_json,
)

MORE = Freedom(own="none", more=("selective", "full"), for_memory=("recompute",))


def test_what_is_free_for_memory_is_not_free_for_speed() -> None:
    assert MORE.recomputes(for_memory=False) == (None,)
    assert MORE.recomputes(for_memory=True) == (None, "selective", "full")
    assert not MORE.is_free("micro-batch", for_memory=True)


def test_what_is_free_for_speed_is_free_for_memory_too() -> None:
    fast = Freedom(more=("full",), for_speed=("recompute",))
    assert fast.recomputes(for_memory=False) == fast.recomputes(for_memory=True) == (None, "full")


def test_what_is_fixed_stays_whatever_a_person_allows() -> None:
    fixed = Freedom(
        more=("full",), fixed=(("recompute", "of graphs"),),
        for_speed=("recompute",), for_memory=("recompute",),
    )  # fmt: skip
    assert fixed.recomputes(for_memory=True) == (None,)


def test_a_request_is_refused_for_what_cannot_be_had_and_says_why() -> None:
    assert all(MORE.refusal(kind) is None for kind in (None, *RECOMPUTES))
    full = Freedom(own="full")
    assert full.refusal("none") == "recompute=none cannot be had: the script has full"
    fixed = Freedom(more=("full",), fixed=(("recompute", "of graphs"),))
    assert fixed.refusal("full") == "recompute=full cannot be had: of graphs"
    assert NO_FREEDOM.refusal("full") is not None


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (AS_GIVEN, AS_GIVEN, ""),
        (Passes(2), Passes(2, "selective"), ""),
        (Passes(4), Passes(2, "full"), "micro-batch 4 -> 2, recompute selective -> full"),
        (Passes(None, "full"), Passes(2), "recompute full -> selective"),
    ],
)
def test_a_change_is_said_in_words(before: Passes, after: Passes, words: str) -> None:
    assert difference(before, after, "selective") == words


def test_layouts_are_told_apart_behind_their_degrees() -> None:
    assert Passes(2).beside(Passes(2)) == ""
    assert Passes(1, "full").beside(Passes(2)) == "·MBS1·recompute=full"


@pytest.mark.parametrize("wrong", ["some", 1, [], {}])
def test_what_nobody_can_recompute_is_none(wrong: object) -> None:
    assert [recompute_of_json(kind) for kind in RECOMPUTES] == list(RECOMPUTES)
    assert recompute_of_json(None) is None
    with pytest.raises(ValueError, match="is none of none, selective, full"):
        recompute_of_json(wrong)
