"""Every value of every parameter group is carried by the group's parameters, and is put last."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from scalai.core.errors import RefusedError
from scalai.patches.optimizers import Group, check_schedule, differences, put_groups, take_groups
from scalai.patches.plain import live, plain

pytestmark = pytest.mark.fault


def group(names: str, **values: Any) -> Group:
    return {"params": [object() for _ in names.split()], **values}, names.split()


def through_json(saved: Any) -> Any:
    return json.loads(json.dumps(saved))


def test_all_values_come_back_with_their_types() -> None:
    kept = {
        "lr": 0.1 + 0.2, "betas": (0.9, 0.95), "step": 7, "decay": None, "rate": torch.tensor(0.3),
        "numpy": np.float32(0.1), "nesterov": True, "kind": "adam",
    }  # fmt: skip
    saved = through_json(take_groups([group("a b", **kept)])())
    fresh = {**dict.fromkeys(kept, 0), "betas": (0.0, 0.0), "rate": torch.zeros(())}
    into = group("b a", **fresh)
    put_groups(saved, [into])
    assert {key: into[0][key] for key in kept} == {**kept, "numpy": float(np.float32(0.1))}
    assert into[0]["rate"] is fresh["rate"]  # captured in a graph: it keeps its place


def test_the_way_of_the_same_update_stays_the_constructors() -> None:
    saved = take_groups([group("a", lr=0.1, foreach=None, fused=None)])()
    here = group("a", lr=0.5, fused=True, offload_fraction=0.5)
    put_groups(saved, [here])
    assert {key: here[0][key] for key in ("lr", "fused", "offload_fraction")} == {
        "lr": 0.1, "fused": True, "offload_fraction": 0.5,
    }  # fmt: skip
    assert "foreach" not in here[0]


def test_groups_that_say_the_same_are_told_apart_by_their_parameters() -> None:
    saved = take_groups([group("a", lr=0.1, wd=0.0), group("b", lr=0.2, wd=0.0)])()
    here = [group("b", lr=0.5, wd=0.0), group("a", lr=0.5, wd=0.0)]
    put_groups(saved, here)
    assert [values["lr"] for values, _ in here] == [0.2, 0.1]


def test_groups_may_be_cut_and_joined_where_their_values_are_equal() -> None:
    saved = take_groups([group("a b", lr=0.1, is_expert_parallel=True), group("c", lr=0.1)])()
    here = [group("a", lr=0.5), group("b c", lr=0.5)]
    put_groups(saved, here)
    assert [values["lr"] for values, _ in here] == [0.1, 0.1]


@pytest.mark.parametrize(
    ("names", "named"), [("a b", "a in .*0.1.*; b in .*0.2"), ("a new", ".*new in none")]
)
def test_groups_that_joined_unequal_ones_are_refused_by_name(names: str, named: str) -> None:
    saved = take_groups([group("a", lr=0.1), group("b", lr=0.2)])()
    with pytest.raises(RefusedError, match=f"in several before, or in none: {named}"):
        put_groups(saved, [group(names, lr=0.5)])


def test_a_group_without_parameters_says_nothing_and_takes_that_in_which_its_kind_agrees() -> None:
    alike = {"default_config": True, "max_lr": 1.0}
    saved = take_groups([
        group("a", wd=0.0, lr=0.1, **alike), group("b", wd=0.1, lr=0.1, **alike),
        group("c", wd=0.1, lr=0.7, default_config=False), group("", wd=9.0, lr=9.0, **alike),
    ])()  # fmt: skip
    empty = group("", wd=5.0, lr=5.0, default_config=True, max_lr=5.0)
    put_groups(saved, [empty])
    assert (empty[0]["lr"], empty[0]["max_lr"], empty[0]["wd"]) == (0.1, 1.0, 5.0)


def test_what_differs_is_named_by_group_key_now_and_then() -> None:
    saved = take_groups([group("a b", lr=0.1, wd=0.5)])()
    (text,) = differences(saved, [group("a b", lr=0.2, wd=0.5)])
    assert text == "lr of the group of a is 0.2, and was 0.1"


class Stubborn(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, 0.5)


def test_a_group_that_does_not_keep_its_values_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"lr of the group of a is 0.5, and was 0.1"):
        put_groups(take_groups([group("a", lr=0.1)])(), [(Stubborn(lr=0.3), ["a"])])


class Forgetful:
    def state_dict(self) -> dict[str, int]:
        return {"length": 9, "done": 0}


def test_a_schedule_that_does_not_keep_its_state_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"Forgetful does not keep .*: done is 0, and was 4"):
        check_schedule({"length": 9, "done": 4}, Forgetful())


ITEMS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3))
DTYPES = st.one_of(
    st.just(np.dtype(bool)),
    npst.integer_dtypes(endianness="?"),
    npst.unsigned_integer_dtypes(endianness="?"),
    npst.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    npst.unicode_string_dtypes(endianness="?", min_len=1, max_len=3),
)
SHAPES = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
ARRAYS = st.one_of(
    DTYPES.flatmap(lambda dtype: npst.arrays(dtype, SHAPES)),
    npst.arrays(object, SHAPES, elements=st.one_of(ITEMS, st.lists(ITEMS, max_size=2))),
)


@given(ARRAYS)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_an_array_of_numpy_comes_back_as_it_was(array: np.ndarray) -> None:
    back = live(json.loads(json.dumps(plain({"table": array}, "a schedule"))))["table"]
    assert back.dtype == array.dtype and back.shape == array.shape
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize(
    "value", [np.longdouble(1), np.array([{1, 2}]), np.array(1j), np.datetime64("2026-01-01"), {1}],
    ids=repr,
)  # fmt: skip
def test_a_value_that_json_cannot_hold_is_refused_with_the_way_out(value: Any) -> None:
    with pytest.raises(RefusedError, match=r"a schedule's t is .*Give its class a state_dict"):
        plain([value], "a schedule's t")


def test_kept_values_are_those_of_their_step() -> None:
    """They are written down later, if ever."""
    values, names = group("a", lr=0.1, betas=[0.9, 0.99], scale=torch.ones(()))
    kept = take_groups([(values, names)])
    values["lr"], values["betas"][0] = 0.2, 0.5
    values["scale"].zero_()
    assert [*kept()["values"].values()] == [
        {"lr": 0.1, "betas": [0.9, 0.99], "scale": {"tensor": 1.0, "dtype": "float32"}}
    ]
