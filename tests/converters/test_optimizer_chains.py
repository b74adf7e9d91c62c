"""A chain of Muon's and Adam's optimizers stays one, and nobody gets another's hyperparameters."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scalai.converters.checkpoint import Checkpoint, Values, WriteOptions
from scalai.converters.engine import Conversion
from scalai.converters.layouts import layout_named, open_checkpoint
from scalai.converters.megatron.common_state import read_common
from scalai.converters.megatron.torch_dist_writer import LINKS
from scalai.core.errors import RefusedError
from support.checkpoints import GROUP, LIMITS, state, write

RATES = {**GROUP, "lr": 0.01, "weight_decay": 0.1}
MUON: dict[str, Any] = {**RATES, "momentum_beta": 0.95, "use_nesterov": True}
ADAM: dict[str, Any] = {**RATES, "betas": (0.9, 0.95), "eps": 1e-8}


def chained(*groups: dict[str, Any], links: tuple[int, ...] = ()) -> Checkpoint:
    source = state()
    extra = {LINKS: links} if links else {}
    values = replace(source.values, param_groups=groups, is_split=False, extra=extra)
    return replace(source, values=values)


def lay_out(source: Checkpoint, reference: Values | None = None, **options: Any) -> Any:
    target = WriteOptions(options.pop("degrees", {}), reference=reference, **options)
    return layout_named("torch_dist").lay_out(source, target)


def test_each_optimizer_of_a_chain_keeps_its_groups(tmp_path: Path) -> None:
    written = write(tmp_path / "out", source=chained(MUON, ADAM, ADAM, links=(1, 2)), tp=2)
    assert written.values.extra[LINKS] == (1, 2)
    assert written.values.param_groups == (MUON, ADAM, ADAM)
    muon, adam = read_common(written.directory, {}).content["optimizer"].values()
    assert muon["state"] == {}, "Muon counts no steps"
    assert list(adam["state"]) == ["common_step"]
    assert write(tmp_path / "again", source=written).values.extra[LINKS] == (1, 2)


def test_groups_that_say_nothing_get_those_at_their_place(tmp_path: Path) -> None:
    reference = write(tmp_path / "reference", source=chained(MUON, ADAM, links=(1, 1))).values
    target = lay_out(chained(RATES, RATES), reference)
    Conversion(chained(RATES, RATES), target, tmp_path / "out", LIMITS).run()
    assert open_checkpoint(tmp_path / "out").values.param_groups == (MUON, ADAM)
    with pytest.raises(RefusedError, match="nor a momentum"):
        lay_out(chained(RATES), reference)


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (chained(MUON, ADAM), {}),
        (chained(MUON, ADAM, links=(1, 1)), {"is_split": True}),
        (chained(MUON, {**ADAM, "is_expert_parallel": True}, links=(1, 1)), {"degrees": {"ep": 2}}),
    ],
    ids=["no links", "split over ranks", "other experts"],
)
def test_chains_that_would_be_others_are_refused(
    source: Checkpoint, options: dict[str, Any]
) -> None:
    with pytest.raises(RefusedError, match="several kinds of optimizers"):
        lay_out(source, **options)
