"""Memory agrees with what is published, and its parts add up on the fullest stage."""

import numpy as np
import pytest

from scalai.core.degrees.degrees import Degrees
from scalai.core.degrees.passes import Recompute
from scalai.core.planner.columns import Layout, Workload, columns_of
from scalai.core.planner.devices import device_named
from scalai.core.planner.model import ModelShape
from scalai.core.planner.stage import first, parameters_of
from scalai.core.planner.step_memory import fits, is_too_large, step_memory
from support.model_shapes import gpt

A100 = device_named("a100")
GIB = 2.0**30


def memory_of(
    shape: ModelShape,
    degrees: Degrees,
    micro: int,
    recompute: Recompute = "none",
    *,
    batch: int = 2048,
    sharding: int = 0,
    sequence_parallel: bool = False,
    fused: bool = False,
    precision: str = "fp16",
) -> dict[str, float]:
    work = Workload(shape, batch, precision, fused)
    layout = Layout(degrees, micro, recompute, sharding, sequence_parallel)
    memory = step_memory(columns_of([(work, A100, layout)]))
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
    shape = gpt(layers, hidden, heads, 51_200, 2_048)
    degrees = Degrees(8, pp, 1, vpp)
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
    degrees = Degrees(8, 10, 4)
    said = memory_of(shape, degrees, micro, "full", sharding=1, precision="bf16")
    assert said["total"] / 1e9 == pytest.approx(measured, rel=0.15)


def test_state_takes_18_bytes_a_parameter_and_less_where_it_is_sharded() -> None:
    shape = gpt(24, 2_048, 16, 51_200, 2_048)
    whole = memory_of(shape, Degrees(1, 1, 64), 1, precision="bf16")
    state = whole["weights"] + whole["gradients"] + whole["optimizer"]
    assert state == 18 * shape.total_parameters
    for sharding, expected in [(1, 6 + 12 / 64), (2, 2 + 16 / 64), (3, 18 / 64)]:
        split = memory_of(shape, Degrees(1, 1, 64), 1, precision="bf16", sharding=sharding)
        state = split["weights"] + split["gradients"] + split["optimizer"]
        assert state == pytest.approx(expected * shape.total_parameters)


def test_experts_are_sharded_over_their_own_fewer_replicas() -> None:
    shape = ModelShape(
        layers=8, hidden=1_024, heads=8, ffn=4_096, vocab=32_000, seq=2_048, kv_groups=8,
        head_dim=128, experts=8, moe_layers=8, top_k=2, expert_ffn=4_096,
    )  # fmt: skip
    experts = 8 * 8 * shape.parameters.expert
    dense = shape.total_parameters - experts
    said = memory_of(shape, Degrees(1, 1, 8, ep=4), 1, sharding=1, precision="bf16")
    assert said["weights"] == 2 * (dense + experts / 4)
    assert said["optimizer"] == 12 * (dense / 8 + experts / 4 / 2)


def test_the_last_stage_counts_where_the_vocabulary_is_large() -> None:
    shape = gpt(4, 512, 8, 2_000_000, 1_024)
    few = memory_of(shape, Degrees(1, 4, 1), 4, "full", batch=4)
    assert few["logits"] == 8 * 4 * 1_024 * 2_000_000
    many = memory_of(gpt(96, 12_288, 96, 1_024, 2_048), Degrees(1, 4, 1), 4)
    assert many["logits"] == 0


def test_nothing_is_held_impossible_that_hardly_misses() -> None:
    shape = gpt(24, 2_048, 16, 51_200, 2_048)
    work = Workload(shape, 512)
    cases = [(work, A100, Layout(Degrees(1, 1, 8), micro)) for micro in (1, 2, 4, 8, 16, 32, 64)]
    x = columns_of(cases)
    can, cannot = fits(x), is_too_large(x)
    assert can.any() and cannot.any() and not (can & cannot).any() and not (can | cannot).all()
    assert np.all(np.diff(step_memory(x).total) > 0)


def test_the_second_stage_counts_where_layers_without_experts_come_first() -> None:
    shape = ModelShape(
        layers=8, hidden=1_024, heads=8, ffn=1_024, vocab=1_024, seq=128, kv_groups=8,
        head_dim=128, experts=64, moe_layers=7, top_k=2, expert_ffn=4_096,
    )  # fmt: skip
    said = memory_of(shape, Degrees(1, 4, 8, ep=8), 1, precision="bf16")
    assert said["weights"] > 2 * 2 * 8 * shape.parameters.expert


@pytest.mark.parametrize(("ep", "expert_tp", "ranks"), [(4, 1, 4), (4, 2, 8), (2, 2, 4), (8, 1, 8)])
def test_experts_are_cut_by_their_own_parallelism(ep: int, expert_tp: int, ranks: int) -> None:
    shape = ModelShape(
        layers=8, hidden=1_024, heads=8, ffn=4_096, vocab=32_000, seq=2_048, kv_groups=8,
        head_dim=128, experts=8, moe_layers=8, top_k=2, expert_ffn=4_096, has_bias=False,
    )  # fmt: skip
    layout = Layout(Degrees(4, 1, 8, ep=ep), 1, is_sequence_parallel=True)
    work = Workload(shape, 64, expert_tp=expert_tp)
    x = columns_of([(work, A100, layout)])
    own, routed = parameters_of(x, first(x))
    assert routed[0] == 8 * 8 * shape.parameters.expert / ranks
    memory = step_memory(x)
    assert memory.optimizer[0] == 12 * (own[0] / 8 + routed[0] / (32 / ranks))
