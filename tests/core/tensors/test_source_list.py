"""Who is asked for what."""

from dataclasses import replace

import pytest

from scalai.core.tensors.collection import Tensor
from scalai.core.tensors.holders import Listed, Reference, SourceList, source_list


def tensors(*names: str) -> tuple[Tensor, ...]:
    return tuple(Tensor(name, (0,) if "empty" in name else (4,), "F32") for name in names)


def listed(ranks: int = 0, **held: tuple[str, ...]) -> SourceList:
    return source_list(
        [
            Listed(
                host,
                ("h", place),
                Reference(place, f"{place:064x}"),
                tensors(*names),
                (f"tp{place}",),
            )
            for place, (host, names) in enumerate(sorted(held.items()))
        ],
        generation=3, step=7, about={}, scalars={}, ranks=ranks,
    )  # fmt: skip


def test_those_are_asked_that_hold_anything_of_a_parameter() -> None:
    many = {f"h{n:03d}": (f"param/p{n}", f"exp_avg/p{n + 1}") for n in range(300)}
    found = listed(0, **many)
    assert found.holders(["param/p7"]) == [6, 7] == found.holders(["main/p7", "exp_avg/p7"])
    assert found.holders(["param/none"]) == [] == found.holders([])
    assert found.reference(258) == Reference(258, f"{258:064x}")


def test_a_list_can_be_cut_to_those_that_share_parameters_with_some() -> None:
    found = listed(4, a=("param/v",), b=("main/w", "param/v"), c=("exp_avg/w",), d=("param/x",))
    assert found.sharers(["c"]) == [1, 2] and found.sharers(["a"]) == [0, 1]
    assert found.sharers([]) == [] == found.sharers(["nobody"])
    short = found.only([1, 2])
    assert short.hosts == ("b", "c") and short.addresses == (("h", 1), ("h", 2))
    assert [short.reference(n) for n in range(2)] == [found.reference(n) for n in (1, 2)]
    assert short.holders(["param/v"]) == [0] and short.holders(["param/w"]) == [0, 1]
    assert short.rank_states == {"tp1": 0, "tp2": 1}
    assert len(found.only([])) == 0


def test_tensors_without_elements_are_listed_and_nobody_is_asked_for_them() -> None:
    found = listed(a=("param/w", "param/empty"), b=("param/empty",))
    assert [tensor.name for tensor in found.empty] == ["param/empty"]
    assert found.parameters == ("w",) and found.holders(["param/empty"]) == []


def test_states_of_ranks_count_only_where_all_are_there() -> None:
    held = {"a": ("param/w",), "b": ("param/w",)}
    assert listed(2, **held).rank_states == {"tp0": 0, "tp1": 1}
    assert not listed(3, **held).rank_states and not listed(0, **held).rank_states


@pytest.mark.parametrize(
    ("field", "value"),
    [("digests", b"x"), ("holds", b""), ("rows", (1,)), ("rank_states", {"tp0": 2})],
)
def test_columns_that_do_not_fit_together_are_refused(field: str, value: object) -> None:
    whole = listed(2, a=("param/w",), b=("param/w",))
    with pytest.raises(ValueError):
        replace(whole, **{field: value})  # type: ignore[arg-type]
