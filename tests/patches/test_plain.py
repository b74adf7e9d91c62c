"""Values of a framework's small state go through JSON and come back as they were."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from scalai.core.errors import RefusedError
from scalai.patches.plain import live, plain

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
