"""A step's time and memory agree with what is published, with parts in known proportions."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalai.core.degrees.degrees import Degrees, stage_sizes
from scalai.core.degrees.passes import Recompute
from scalai.core.errors import UsageError
from scalai.core.planner.columns import (
    Cases,
    Layout,
    Workload,
    columns_of,
    first,
    layers_of,
    parameters_of,
)
from scalai.core.planner.devices import Device, device_named
from scalai.core.planner.shape import ModelShape
from scalai.core.planner.step_memory import fits, is_too_large, stage_memory, step_memory
from scalai.core.planner.step_time import (
    DEFAULT,
    NAMES,
    from_logs,
    layer_time,
    prior_logs,
    step_time,
)
from support.model_shapes import gpt

A100 = device_named("a100")
GPT3 = Workload(gpt(96, 12_288, 96, 51_200, 2_048), 1_536, "fp16", False)
SMALL = gpt(24, 2_048, 16, 51_200, 2_048)
EXPERTS = ModelShape(
    layers=8, hidden=1_024, heads=8, ffn=4_096, vocab=32_000, seq=2_048, kv_groups=8,
    head_dim=128, experts=8, moe_layers=8, top_k=2, expert_ffn=4_096,
)  # fmt: skip
GIB = 2.0**30


def llama(layers: int, hidden: int, heads: int, kv_groups: int, ffn: int, vocab: int) -> ModelShape:
    return gpt(layers, hidden, heads, vocab, 8192, ffn=ffn, kv_groups=kv_groups, is_gated=True)


def closed_formula(layers: int, hidden: int, vocab: int, seq: int) -> int:
    """12Lh²(1 + 13/12h) + (V + s)h, and the final norm (arXiv 2104.04473, equation 2)."""
    return 12 * layers * hidden**2 + 13 * layers * hidden + (vocab + seq) * hidden + 2 * hidden


MIXTRAL = replace(
    llama(32, 4_096, 32, 8, 14_336, 32_000), experts=8, moe_layers=32, top_k=2, expert_ffn=14_336
)


@pytest.mark.parametrize(
    ("shape", "published"),
    [
        (GPT3.shape, closed_formula(96, 12_288, 51_200, 2_048)),
        # Numbers of parameters as the checkpoints on the Hugging Face hub state them.
        (llama(32, 4_096, 32, 8, 14_336, 128_256), 8_030_261_248),
        (llama(80, 8_192, 64, 8, 28_672, 128_256), 70_553_706_496),
        (llama(32, 4_096, 32, 32, 11_008, 32_000), 6_738_415_616),
        (MIXTRAL, 46_702_792_704),
    ],
    ids=["gpt-3", "llama-3-8b", "llama-3-70b", "llama-2-7b", "mixtral-8x7b"],
)
def test_published_models_have_their_published_numbers(shape: ModelShape, published: int) -> None:
    assert shape.total_parameters == published


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"kv_groups": 3}, "kv_groups=3"),
        ({"layers": 0}, "layers=0"),
        ({"layers": 10**12}, "no model has more"),
        ({"experts": 8}, "top_k=0"),
        ({"moe_layers": 1}, "state both"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused_by_name(
    wrong: dict[str, int], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        replace(SMALL, **wrong)  # type: ignore[arg-type]


def columns(layout: Layout, work: Workload = GPT3, device: Device = A100) -> Cases:
    return columns_of([(work, device, layout)])


def part(x: Cases, name: str) -> float:
    return float(getattr(step_time(x), name)[0])


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "tp", "pp", "dp", "micro", "batch", "seconds"),
    [
        (24, 2_304, 24, 1, 1, 32, 16, 512, 3.528),
        (40, 6_144, 48, 8, 1, 32, 8, 1_024, 9.399),
        (48, 8_192, 64, 8, 2, 32, 4, 1_536, 14.453),
    ],
)
def test_published_steps_are_met_from_the_table_of_devices_alone(
    layers: int, hidden: int, heads: int, tp: int, pp: int, dp: int, micro: int, batch: int,
    seconds: float,
) -> None:  # fmt: skip
    """arXiv 2104.04473, table 1 (seconds follow from its TFLOP/s by its equation 3); layouts from
    Megatron-LM, examples/academic_paper_scripts/sc21/run_table_1.sh."""
    work = Workload(gpt(layers, hidden, heads, 51_200, 2_048), batch, "fp16", False)
    x = columns(Layout(Degrees(tp, pp, dp), micro, "full", 0), work)
    assert float(step_time(x).total[0]) == pytest.approx(seconds, rel=0.1)


@pytest.mark.parametrize("vpp", [1, 3])
def test_the_bubble_is_the_known_share_of_what_stages_do(vpp: int) -> None:
    """(pp - 1) / (vpp * micro-batches); arXiv 2104.04473, section 2.2."""
    x = columns(Layout(Degrees(8, 8, 8, vpp), 1, "full", 0))
    work = sum(part(x, name) for name in ("compute", "recompute", "tensor", "pipeline"))
    assert part(x, "bubble") / work == pytest.approx(7 / (vpp * 192))


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


def test_what_waits_for_nobody_is_free_and_what_crosses_more_is_slower() -> None:
    alone = columns(Layout(Degrees(1, 1, 1), 2), Workload(gpt(4, 512, 8, 1_024, 512), 8))
    for name in ("tensor", "context", "expert", "bubble", "pipeline", "data"):
        assert part(alone, name) == 0
    beyond_a_host, inside = (
        part(columns(Layout(Degrees(tp, 1, 64 // tp), 1)), "tensor") for tp in (16, 8)
    )
    assert beyond_a_host > 3 * inside
    sharded = replace(GPT3, is_attention_fused=True)
    for_each_micro_batch, few = (
        part(columns(Layout(Degrees(1, 1, 384), micro, "full", 3), sharded), "data")
        for micro in (1, 4)
    )
    assert for_each_micro_batch > 3 * few > 0


LAYOUTS = st.builds(
    lambda tp, pp, dp, vpp, micro, kind, sharding: Layout(
        Degrees(tp, pp, dp, vpp if pp > 1 else 1), micro, kind, sharding if pp == 1 else 1, tp > 1
    ),
    st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 4, 16]),
    st.sampled_from([1, 3]), st.sampled_from([1, 2, 4]),
    st.sampled_from(["none", "selective", "full"]), st.sampled_from([0, 1, 2, 3]),
)  # fmt: skip


@given(LAYOUTS, st.sampled_from(NAMES))
def test_every_part_is_a_time_and_better_hardware_is_never_slower(
    layout: Layout, name: str
) -> None:
    x = columns(layout)
    said = step_time(x)
    parts = [float(np.ravel(getattr(said, part))[0]) for part in said.__slots__]
    assert min(parts) >= 0 and sum(parts) == pytest.approx(float(said.total[0]))
    for figure in ("peak", "memory_bandwidth", "link", "network"):
        faster = replace(x, device=replace(x.device, **{figure: 1.5 * getattr(x.device, figure)}))
        assert float(step_time(faster).total[0]) <= float(said.total[0]) * (1 + 1e-12)
    logs, _ = prior_logs()
    moved = logs.copy()
    moved[NAMES.index(name)] += 0.1
    sign = 1 if name.endswith("_s") else -1
    change = float((step_time(x, from_logs(moved)).total - said.total)[0])
    assert sign * change >= -1e-9


def memory_of(
    shape: ModelShape,
    degrees: Degrees,
    micro: int,
    recompute: Recompute = "none",
    *,
    batch: int = 2048,
    sharding: int = 0,
    sequence_parallel: bool = False,
    precision: str = "bf16",
) -> dict[str, float]:
    work = Workload(shape, batch, precision, is_attention_fused=False)
    memory = step_memory(
        columns(Layout(degrees, micro, recompute, sharding, sequence_parallel), work)
    )
    return {name: float(getattr(memory, name)[0]) for name in (*memory.__slots__, "total")}


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "micro", "pp", "vpp", "whole", "selective"),
    [
        (48, 6_144, 64, 4, 1, 1, 59.25, 9.5625),
        (96, 12_288, 96, 1, 8, 3, 66.84375, 12.3515625),
        (105, 20_480, 128, 1, 35, 3, 114.0234375, 23.076171875),
        (128, 25_600, 160, 1, 64, 1, 131.25, 26.5625),
    ],
    ids=["22b", "175b", "530b", "1t"],
)
def test_activations_are_those_of_the_published_figure(
    layers: int, hidden: int, heads: int, micro: int, pp: int, vpp: int, whole: float,
    selective: float,
) -> None:  # fmt: skip
    """GiB of arXiv 2205.05198, figure 1, as calculon/llm/validation.py lists them."""
    shape, degrees = gpt(layers, hidden, heads, 51_200, 2_048), Degrees(8, pp, 1, vpp)
    none = memory_of(shape, degrees, micro)
    some = memory_of(shape, degrees, micro, "selective", sequence_parallel=True)
    # Ours also have the mask of the embedding's dropout, of each pass in flight.
    mask = pp * micro * 2_048 * hidden / GIB
    assert none["activations"] / GIB == pytest.approx(whole + mask)
    assert some["activations"] / GIB == pytest.approx(selective + mask / 8)


@pytest.mark.parametrize(("micro", "measured"), [(1, 33), (2, 39), (4, 53), (8, 73)])
def test_measured_jobs_are_met_within_the_stated_uncertainty(micro: int, measured: int) -> None:
    """80 layers of 13,824 on 320 A100, TP8 PP10, ZeRO 1: bigscience-workshop/bigscience,
    train/tr11-176B-ml/chronicles-prequel.md, "tile and wave quantization"."""
    shape = gpt(80, 13_824, 64, 250_880, 2_048)
    said = memory_of(shape, Degrees(8, 10, 4), micro, "full", sharding=1)
    assert said["total"] / 1e9 == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("sharding", "expected"), [(0, 18), (1, 6 + 12 / 64), (2, 2 + 16 / 64), (3, 18 / 64)]
)
def test_state_takes_18_bytes_a_parameter_and_less_where_it_is_sharded(
    sharding: int, expected: float
) -> None:
    said = memory_of(SMALL, Degrees(1, 1, 64), 1, sharding=sharding)
    state = said["weights"] + said["gradients"] + said["optimizer"]
    assert state == pytest.approx(expected * SMALL.total_parameters)


def test_experts_are_sharded_over_their_own_fewer_replicas() -> None:
    experts = 8 * 8 * EXPERTS.parameters.expert
    dense = EXPERTS.total_parameters - experts
    said = memory_of(EXPERTS, Degrees(1, 1, 8, ep=4), 1, sharding=1)
    assert said["weights"] == 2 * (dense + experts / 4)
    assert said["optimizer"] == 12 * (dense / 8 + experts / 4 / 2)


@pytest.mark.parametrize(("ep", "expert_tp", "ranks"), [(4, 1, 4), (4, 2, 8), (2, 2, 4), (8, 1, 8)])
def test_experts_are_cut_by_their_own_parallelism(ep: int, expert_tp: int, ranks: int) -> None:
    shape = replace(EXPERTS, has_bias=False)
    layout = Layout(Degrees(4, 1, 8, ep=ep), 1, is_sequence_parallel=True)
    x = columns(layout, Workload(shape, 64, expert_tp=expert_tp))
    own, routed = parameters_of(x, first(x))
    assert routed[0] == 8 * 8 * shape.parameters.expert / ranks
    assert step_memory(x).optimizer[0] == 12 * (own[0] / 8 + routed[0] / (32 / ranks))


def test_the_stage_counts_that_has_most() -> None:
    last = memory_of(gpt(4, 512, 8, 2_000_000, 1_024), Degrees(1, 4, 1), 4, "full", batch=4)
    assert last["logits"] == 8 * 4 * 1_024 * 2_000_000
    assert memory_of(gpt(96, 12_288, 96, 1_024, 2_048), Degrees(1, 4, 1), 4)["logits"] == 0
    # Layers without experts come first.
    sparse = replace(EXPERTS, ffn=1_024, vocab=1_024, seq=128, experts=64, moe_layers=7)
    second = memory_of(sparse, Degrees(1, 4, 8, ep=8), 1)
    assert second["weights"] > 2 * 2 * 8 * sparse.parameters.expert


def test_uneven_stages_have_the_memory_of_their_own_layers_and_the_fullest_counts() -> None:
    cuts = [(layers, pp, vpp) for layers in range(1, 30) for pp in range(1, 10) for vpp in (1, 2)]
    shape = replace(EXPERTS, moe_layers=0, experts=0, top_k=0)
    for layers, pp, vpp in cuts:
        if layers < pp * vpp or vpp > pp:
            continue
        work = Workload(replace(shape, layers=layers), 64)
        x = columns_of([(work, A100, Layout(Degrees(1, pp, 1, vpp), 1))])
        stages = [np.array([float(rank)]) for rank in range(pp)]
        sizes = stage_sizes(layers, pp, vpp)
        assert [float(layers_of(x, stage)[0][0]) for stage in stages] == [
            sum(sizes[rank::pp]) for rank in range(pp)
        ]
        assert step_memory(x).total[0] == max(stage_memory(x, each).total[0] for each in stages)


def test_nothing_is_held_impossible_that_hardly_misses() -> None:
    layouts = [Layout(Degrees(1, 1, 8), micro) for micro in (1, 2, 4, 8, 16, 32, 64)]
    x = columns_of([(Workload(SMALL, 512), A100, layout) for layout in layouts])
    can, cannot = fits(x), is_too_large(x)
    assert can.any() and cannot.any() and not (can & cannot).any() and not (can | cannot).all()
    assert np.all(np.diff(step_memory(x).total) > 0)
