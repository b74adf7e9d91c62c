"""The ledger of a worker: what it takes up, what it refuses, and the way out."""

import json
from typing import Any

import pytest

from scalai.core.dataset.drawn import Draw, Number
from scalai.core.dataset.ledger import Ledger, Lost, judge
from scalai.core.errors import RefusedError
from scalai.runtime.consumption import LEDGER, Consumption


def trained(steps: int = 4) -> Consumption:
    found = Consumption("run-1", {"dp": 2})
    found.begin(0, 0)
    for step in range(1, steps + 1):
        found.note([Draw("train", Number(0), 3 * step - 3, 3 * step)])
        found.step_ended(step, 3 * step)
    return found


def saved(steps: int = 4) -> Any:
    return json.loads(json.dumps(trained(steps).scalars()[LEDGER]))


def test_the_next_round_goes_on_with_it_and_knows_what_was_lost() -> None:
    found = Consumption("run-3", {"dp": 1})
    found.restore(saved(), 4, 12, [Lost("run-2", 4, 6)])
    assert found.ledger is not None and found.ledger.lost == (Lost("run-2", 4, 6),)
    assert [each.round for each in found.ledger.stretches] == ["run-1", "run-3"]


@pytest.mark.fault
def test_a_state_without_one_begins_one_at_its_step() -> None:
    found = Consumption("run-2", {})
    found.restore(None, 7, 21)
    assert found.ledger is not None and found.ledger.since == (7, 21)


@pytest.mark.fault
@pytest.mark.parametrize(("step", "samples"), [(5, 15), (3, 9), (4, 13), (4, None)])
def test_a_state_at_another_place_than_its_ledger_is_refused_with_the_way_out(
    step: int, samples: int | None
) -> None:
    found = Consumption("run-2", {})
    with pytest.raises(RefusedError, match=r"ledger of samples at step 4 .*resume.*scalai reshard"):
        found.restore(saved(), step, samples)


def test_a_data_set_that_changed_is_refused_and_the_same_one_goes_on() -> None:
    first = trained()
    first.know({"train": {"seed": 1}})
    first.note([Draw("train", Number(0), 12, 15)])
    first.step_ended(5, 15)
    kept = first.scalars()[LEDGER]
    with pytest.raises(RefusedError, match="another one"):
        plain = Consumption("run-2", {})
        plain.restore(kept, 5, 15)
        plain.know({"train": {"seed": 2}})
    same = Consumption("run-2", {})
    same.restore(kept, 5, 15)
    same.know({"train": {"seed": 1}})
    assert same.ledger is not None and same.ledger.since == (0, 0)


@pytest.mark.fault
def test_a_torn_ledger_is_refused() -> None:
    torn = saved()
    torn["passes"][0]["taken"] = [0, 9]
    with pytest.raises(RefusedError, match="damaged: its digest"):
        Consumption("run-2", {}).restore(torn, 4, 12)


@pytest.mark.fault
@pytest.mark.parametrize("start", [9, 15])
def test_a_step_that_would_break_the_order_is_refused(start: int) -> None:
    draw = Draw("train", Number(0), start, start + 3)
    found = trained()
    found.note([draw])
    with pytest.raises(RefusedError, match=r"step 5 would break .*scalai reshard"):
        found.step_ended(5, 15)


def test_a_rank_that_draws_nothing_leaves_it_to_others() -> None:
    found = trained()
    found.note(())
    found.step_ended(5, 15)
    assert found.scalars() == {}


def test_counts_that_are_no_whole_numbers_are_not_counted() -> None:
    found = Consumption("run-1", {})
    found.begin(0, 0.5)
    found.step_ended(1, 1.5)
    assert found.ledger == Ledger.begun(0, None).with_round("run-1", {}).stepped(1, None)


def test_a_checkpoint_that_does_not_say_how_far_it_is_is_no_break() -> None:
    found = Consumption("run-1", {})
    found.begin(100, 0)
    value = json.loads(json.dumps(found.scalars()[LEDGER]))
    found.restore(value, 100, 0)
    found.note([Draw("train", Number(0), 400, 404, 800, 800)])
    found.step_ended(101, 404)
    assert found.ledger is not None and found.ledger.passes[0].unproven == 400
    assert judge(found.ledger, 101, 404).is_kept
