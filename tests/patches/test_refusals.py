"""What cannot change its layout is refused at the start, all of it at once, with the reason."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core
import pytest
import torch

from scalai.converters.megatron.sums import SUMS
from scalai.core.errors import RefusedError
from scalai.patches.continuation import refuse_changed_axes
from scalai.patches.megatron.megatron_state import fixed_axes, refuse_unsupported


class LayerWiseDistributedOptimizer(SimpleNamespace):
    """By its name alone."""


def leaf(**values: Any) -> SimpleNamespace:
    """Return an optimizer as megatron has it, with nothing in the way."""
    inner = values.pop("optimizer", SimpleNamespace())
    config = SimpleNamespace(**values.pop("config", {}))
    return SimpleNamespace(is_stub_optimizer=False, optimizer=inner, config=config, **values)


def test_plain_jobs_are_not_refused() -> None:
    refuse_unsupported([torch.nn.Linear(2, 2)], leaf())


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        (LayerWiseDistributedOptimizer(optimizer=None), "LayerWiseDistributedOptimizer"),
        (
            SimpleNamespace(
                chained_optimizers=[
                    leaf(
                        config={"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.uint8}
                    )
                ]
            ),
            "--exp-avg-dtype uint8",
        ),
        (
            leaf(ddp_config=SimpleNamespace(use_megatron_fsdp=True)),
            "--use-megatron-fsdp: its shards .*use --use-dist",
        ),
    ],
)
def test_optimizers_are_refused_by_name(optimizer: Any, named: str) -> None:
    with pytest.raises(RefusedError, match=named):
        refuse_unsupported([torch.nn.Linear(2, 2)], optimizer)


@pytest.mark.parametrize("name", ["mode", "tp_mode"])
def test_blockwise_muon_keeps_its_tensor_parallelism(name: str) -> None:
    muon = leaf(optimizer=SimpleNamespace(**{name: "blockwise"}))
    assert list(fixed_axes([], SimpleNamespace(chained_optimizers=[leaf(), muon]))) == ["cp", "tp"]
    whole = leaf(optimizer=SimpleNamespace(**{name: "duplicated"}))
    assert list(fixed_axes([], whole)) == ["cp"]


def test_a_model_keeps_the_axes_whose_ranks_tokens_it_sums() -> None:
    model = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace(  # type: ignore[assignment]
        num_moe_experts=4, moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=0.1
    )
    assert list(fixed_axes([model], leaf())) == ["cp", "dp"]


def test_sums_are_where_the_page_says() -> None:
    """As far as the release that is installed has them; a later one has moved none of these."""
    root = Path(megatron.core.__file__).parents[1]
    for each in SUMS:
        file, _, function = each.source.partition(":")
        text = (root / file).read_text()
        for name in function.split("."):
            assert re.search(rf"(def|class) {name}\b", text), each.source


def test_what_no_test_has_had_is_refused_until_a_person_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = leaf(config={"use_precision_aware_optimizer": True})
    with pytest.raises(RefusedError, match="SCALAI_ALLOW_UNTESTED=1"):
        refuse_unsupported([torch.nn.Linear(2, 2)], optimizer)
    monkeypatch.setenv("SCALAI_ALLOW_UNTESTED", "1")
    refuse_unsupported([torch.nn.Linear(2, 2)], optimizer)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"fp8_param": True}, "--fp8-param: parameters are kept in FP8 with scales; leave it out"),
        ({"fp4": "e2m1"}, "--fp4-format: .*train in bf16"),
        ({"fp8": "hybrid"}, "--fp8-format: .*SCALAI_ALLOW_UNTESTED=1"),
    ],
)
def test_models_are_refused_for_what_their_scripts_flags_would_be(
    config: dict[str, Any], named: str
) -> None:
    model: Any = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace(**config)
    with pytest.raises(RefusedError, match=named):
        refuse_unsupported([model], leaf())


def test_another_context_parallel_degree_is_refused() -> None:
    refuse_changed_axes({"cp": 2}, {"cp": 2, "tp": 4})
    with pytest.raises(RefusedError, match="cp=2 when the state was taken and cp=1 now"):
        refuse_changed_axes({"cp": 2}, {"cp": 1, "tp": 4})
