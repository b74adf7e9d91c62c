"""Times have the parts that they should, in the proportions that are known."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalai.core.degrees.degrees import Degrees
from scalai.core.planner.coefficients import DEFAULT, NAMES, PRIORS, from_logs, prior_logs
from scalai.core.planner.columns import Columns, Layout, Workload, columns_of
from scalai.core.planner.devices import Device, device_named
from scalai.core.planner.step_time import layer_time, step_time
from support.model_shapes import gpt

A100 = device_named("a100")
GPT3 = Workload(gpt(96, 12_288, 96, 51_200, 2_048), 1_536, "fp16", False)


def columns(layout: Layout, work: Workload = GPT3, device: Device = A100) -> Columns:
    return columns_of([(work, device, layout)])


def part(x: Columns, name: str) -> float:
    return float(getattr(step_time(x), name)[0])


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "tp", "pp", "vpp", "dp", "micro", "batch", "seconds"),
    [
        (24, 2_304, 24, 1, 1, 1, 32, 16, 512, 3.528),
        (40, 6_144, 48, 8, 1, 1, 32, 8, 1_024, 9.399),
        (48, 8_192, 64, 8, 2, 1, 32, 4, 1_536, 14.453),
    ],
)
def test_published_steps_are_met_from_the_table_of_devices_alone(
    layers: int, hidden: int, heads: int, tp: int, pp: int, vpp: int, dp: int, micro: int,
    batch: int, seconds: float,
) -> None:  # fmt: skip
    """arXiv 2104.04473, table 1 (seconds follow from its TFLOP/s by its equation 3); layouts from
    Megatron-LM, examples/academic_paper_scripts/sc21/run_table_1.sh."""
    work = Workload(gpt(layers, hidden, heads, 51_200, 2_048), batch, "fp16", False)
    x = columns(Layout(Degrees(tp, pp, dp, vpp), micro, "full", 0), work)
    assert float(step_time(x).total[0]) == pytest.approx(seconds, rel=0.1)


def test_the_bubble_is_the_known_share_of_what_stages_do() -> None:
    """(pp - 1) / (vpp * micro-batches); arXiv 2104.04473, section 2.2."""
    for vpp in (1, 3):
        x = columns(Layout(Degrees(8, 8, 8, vpp), 1, "full", 0))
        said = step_time(x)
        names = ("compute", "recompute", "tensor", "pipeline")
        work = sum(float(getattr(said, name)[0]) for name in names)
        assert float(said.bubble[0]) / work == pytest.approx(7 / (vpp * 192))


def test_full_recomputation_is_one_more_forward_pass_with_its_messages() -> None:
    full, none = (columns(Layout(Degrees(8, 8, 8), 1, kind)) for kind in ("full", "none"))
    layer = layer_time(full, DEFAULT)
    assert part(full, "recompute") == pytest.approx(192 * 12 * float(layer.forward[0]))
    assert part(none, "recompute") == 0
    assert part(full, "tensor") == pytest.approx(part(none, "tensor") * 3 / 2)


def test_in_8_bit_layers_are_faster_and_attention_and_head_are_not() -> None:
    h100 = device_named("h100")
    half, eighth = (
        columns(Layout(Degrees(8, 8, 8), 1), replace(GPT3, precision=kind), h100)
        for kind in ("bf16", "fp8")
    )
    assert part(eighth, "head") == pytest.approx(part(half, "head"))
    one, two = (layer_time(x, DEFAULT) for x in (half, eighth))
    assert two.attention[0] == pytest.approx(one.attention[0])
    assert 0.5 < two.matrix[0] / one.matrix[0] < 0.7


def test_one_device_waits_for_nobody() -> None:
    small = Workload(gpt(4, 512, 8, 1_024, 512), 8)
    x = columns(Layout(Degrees(1, 1, 1), 2), small)
    for name in ("tensor", "context", "expert", "bubble", "pipeline", "data"):
        assert part(x, name) == 0


def test_sharded_weights_cross_for_every_micro_batch() -> None:
    work = replace(GPT3, is_attention_fused=True)
    few, many = (
        part(columns(Layout(Degrees(1, 1, 384), micro, "full", 3), work), "data")
        for micro in (4, 1)
    )
    assert many > 3 * few > 0


def test_tensor_parallelism_beyond_a_host_is_slow() -> None:
    inside, beyond = (
        part(columns(Layout(Degrees(tp, 1, 64 // tp), 1)), "tensor") for tp in (8, 16)
    )
    assert beyond > 3 * inside


layouts = st.builds(
    lambda tp, pp, dp, vpp, micro, kind, sharding: Layout(
        Degrees(tp, pp, dp, vpp if pp > 1 else 1), micro, kind, sharding if pp == 1 else 1, tp > 1
    ),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([1, 3]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["none", "selective", "full"]),
    st.sampled_from([0, 1, 2, 3]),
)


@given(layouts, st.sampled_from(NAMES))
def test_every_part_is_a_time_and_better_hardware_is_never_slower(
    layout: Layout, name: str
) -> None:
    x = columns(layout)
    said = step_time(x)
    parts = [float(np.ravel(getattr(said, part))[0]) for part in said.__slots__]
    assert min(parts) >= 0 and sum(parts) == pytest.approx(float(said.total[0]))
    for figure in ("peak", "memory_bandwidth", "link", "network"):
        faster = replace(x, **{figure: getattr(x, figure) * 1.5})
        assert float(step_time(faster).total[0]) <= float(said.total[0]) * (1 + 1e-12)
    logs, _ = prior_logs()
    moved = logs.copy()
    moved[NAMES.index(name)] += 0.1
    sign = 1 if name.endswith("_s") else -1
    change = float((step_time(x, from_logs(moved)).total - said.total)[0])
    assert sign * change >= -1e-9


def test_every_coefficient_has_a_prior_with_its_source() -> None:
    assert tuple(PRIORS) == NAMES
    assert all(prior.source and prior.about and prior.factor > 1 for prior in PRIORS.values())
