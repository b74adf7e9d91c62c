"""Measured rows are read as they are meant; whatever cannot be predicted counts as an error."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.planner.score import (
    REFUSED_ERROR,
    Scored,
    figures,
    group_figures,
    predict_rows,
    rank_correlation,
    read_rows,
    regret,
)

LINE = {
    "source": "narayanan_sc21_table1", "layers": "48", "hidden": "8192", "heads": "64",
    "seq": "2048", "vocab": "51200", "gpus": "512", "gpu_type": "A100-80GB", "tp": "8", "pp": "2",
    "vpp": "1", "dp": "32", "micro_batch": "4", "global_batch": "1536", "recompute": "full",
    "iteration_time_s": "14.453", "zero_stage": "0", "precision": "fp16", "ffn": "32768",
    "kv_heads": "64", "gated_mlp": "0", "cp": "1", "seq_parallel": "0", "notes": "",
}  # fmt: skip
"""arXiv 2104.04473, table 1, 39.1e9 parameters."""


def lines(**changes: str) -> dict[str, str]:
    return {**LINE, **changes}


def test_a_row_is_taken_as_it_stands() -> None:
    (row,) = read_rows([LINE])
    assert not row.refused
    assert str(row.layout) == "TP8·PP2·DP32·MBS4, recompute full, no sharding"
    assert row.cluster == ("narayanan_sc21_table1", "a100-80gb")
    (scored,) = predict_rows([row])
    assert scored.error < 0.1 and scored.is_inside and not scored.is_known


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"gpu_type": "B9000"}, "not in the table"),
        ({"layers": ""}, "layers is missing"),
        ({"layers": "many"}, "many"),
        ({"tp": "4"}, "TP4·PP2·DP32 takes 256 devices, but gpus=512"),
        ({"global_batch": "1537"}, "dp=32 does not divide"),
        ({"tp": "32", "dp": "8", "heads": "24"}, "hidden|does not divide"),
        ({"micro_batch": "5"}, "micro_batch=5 does not divide"),
        ({"layers": "50", "vpp": "4"}, "pp.vpp=2.4 does not divide"),
        ({"precision": "fp8"}, "no peak for fp8"),
        ({"zero_stage": "7"}, "none of 0 to 3"),
        ({"iteration_time_s": "0"}, "is no time"),
        ({"iteration_time_s": "nan"}, "is no time"),
        ({"hidden": "inf"}, "infinity"),
        ({"global_batch": "-512"}, "is no batch"),
        ({"recompute": "sometimes"}, "none of none, selective, full"),
        ({"micro_batch": "48", "recompute": "none"}, "held not to fit"),
        ({"kv_heads": "7"}, "does not divide heads"),
    ],
)
def test_a_row_that_cannot_be_taken_counts_as_an_error(changes: dict[str, str], why: str) -> None:
    rows = read_rows([LINE, lines(**changes)])
    assert not rows[0].refused
    assert re.search(why, rows[1].refused)
    scored = predict_rows(rows)
    assert scored[1].error == REFUSED_ERROR and not scored[1].is_inside
    whole = figures(scored)
    assert (whole["rows"], whole["rows_refused"]) == (2, 1)
    assert whole["transfer_error_mean"] == pytest.approx((scored[0].error + 1) / 2)
    assert whole["interval_coverage"] == 0.5


def test_what_a_row_leaves_open_is_what_fits_and_is_fastest() -> None:
    (row,) = read_rows([lines(micro_batch="", vpp="", recompute="")])
    assert not row.refused and row.layout is not None
    assert row.layout.recompute != "full"
    assert 24 % row.layout.degrees.vpp == 0


@pytest.mark.turns
@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted(LINE)),
        st.one_of(
            st.sampled_from(["", "0", "-1", "1", "2", "3", "7", "1e9", "nan", "inf", "1e400", "x"]),
            st.text(max_size=4),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_no_row_is_dropped_whatever_stands_in_it(changes: dict[str, str]) -> None:
    scored = predict_rows(read_rows([LINE, lines(**changes)]), read_rows([LINE]))
    assert len(scored) == 2 and not scored[0].row.refused
    assert all(0 <= one.error < float("inf") for one in scored)
    whole = figures(scored)
    assert whole["rows"] == 2 and 0 <= (whole["interval_coverage"] or 0) <= 1


@pytest.mark.parametrize(
    "changes",
    [
        # DeepSpeed cuts 78 layers into 12 stages; 126 and 2 for embedding and loss make 64 parts.
        dict(layers="78", pp="12", tp="4", dp="8", gpus="384", global_batch="2048"),
        dict(layers="126", pp="8", vpp="8", dp="8", gpus="512", global_batch="2048"),
        # 12 micro-batches are no multiple of 8 stages, which newer releases do not ask for.
        dict(pp="8", vpp="2", dp="8", gpus="512", global_batch="96", micro_batch="1"),
    ],
)
def test_what_ran_is_taken_although_a_plan_would_not_offer_it(changes: dict[str, str]) -> None:
    (row,) = read_rows([lines(**{"micro_batch": "2", **changes})])
    assert not row.refused


def test_rows_of_a_known_cluster_are_predicted_by_its_calibration() -> None:
    slow = [
        lines(tp=str(tp), pp=str(16 // tp), iteration_time_s=str(seconds))
        for tp, seconds in ((8, 19.0), (4, 20.0))
    ]
    known, other = read_rows([*slow, lines(source="another")])[:2], read_rows([lines(source="x")])
    scored = predict_rows([*known, *other], known)
    assert [one.is_known for one in scored] == [True, True, False]
    alone = predict_rows(known)
    assert scored[0].error < alone[0].error
    assert figures(scored)["rows_known"] == 2


def choice(*pairs: tuple[float, float]) -> list[Scored]:
    """Return a group of (predicted, measured); predicted 0: refused."""
    rows = read_rows([lines(iteration_time_s=str(seconds)) for _, seconds in pairs])
    refused = read_rows([lines(gpu_type="B9000", iteration_time_s="9")])[0].refused
    found = []
    for row, (said, _) in zip(rows, pairs, strict=True):
        if said:
            found.append(Scored(row, True, said, said / 2, said * 2))
        else:
            found.append(Scored(replace(row, refused=refused), True))
    return found


@pytest.mark.parametrize(
    ("group", "lost", "correlation"),
    [
        (((3, 10), (1, 12), (2, 11), (4, 15), (5, 20)), 0.2, 0.6),
        # A refused row is never the predicted best, and ranks last.
        (((0, 10), (1, 12), (2, 13), (3, 14), (4, 15)), 0.2, 0.0),
        (((0, 10), (0, 20)), 1.0, 0.0),
        # Ties have the average rank.
        (((1, 1), (1, 1), (2, 2)), 0.0, 1.0),
        (((1, 1), (1, 2)), 0.0, 0.0),
    ],
)
def test_regret_is_what_the_predicted_best_costs(
    group: Sequence[tuple[float, float]], lost: float, correlation: float
) -> None:
    scored = choice(*group)
    assert regret(scored) == pytest.approx(lost)
    assert rank_correlation(scored) == pytest.approx(correlation)
    assert figures(scored)["regret_max"] == (pytest.approx(lost) if len(group) >= 5 else None)


def test_each_group_has_all_the_figures_and_says_what_was_refused() -> None:
    rows = read_rows([LINE, lines(tp="4", pp="4"), lines(source="b", gpu_type="B9000")])
    groups = group_figures(predict_rows(rows))
    assert [group["rows"] for group in groups] == [2, 1]
    whole = set(figures(predict_rows(rows)))
    assert all(whole <= set(group) for group in groups)
    assert groups[1]["error_mean"] is None and groups[1]["transfer_error_mean"] == 1.0
    assert "B9000" in str(groups[1]["refused"])
