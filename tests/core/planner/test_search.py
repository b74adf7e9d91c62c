"""What is offered is valid, fits and keeps the batch; what is not is explained."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalai.core.degrees.degrees import Degrees, ModelLimits, divisors, refusal
from scalai.core.errors import RefusedError, UsageError
from scalai.core.planner.columns import Layout, Workload, columns_of
from scalai.core.planner.devices import device_named
from scalai.core.planner.fit import calibrate
from scalai.core.planner.score import limits_of
from scalai.core.planner.search import Choices, LayoutPlan, search
from scalai.core.planner.step_memory import USABLE, step_memory
from scalai.core.planner.step_time import step_time
from support.model_shapes import gpt

H100, A100 = device_named("h100"), device_named("a100")
LLAMA = gpt(32, 4_096, 32, 128_256, 8_192, ffn=14_336, kv_groups=8, is_gated=True)
GPT3 = Workload(gpt(96, 12_288, 96, 51_200, 2_048), 1_536)


def plan(work: Workload, devices: int, choices: Choices | None = None) -> LayoutPlan:
    return search(work, H100, devices, limits_of(work), choices)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([2, 6, 12, 24]),
    st.sampled_from([4, 6, 8, 12]),
    st.sampled_from([1, 3, 8, 12, 64]),
    st.integers(1, 40),
    st.sampled_from([(1,), (0, 1), (1, 3)]),
)
def test_what_is_offered_is_valid_fits_and_keeps_the_batch(
    layers: int, heads: int, batch: int, devices: int, sharding: tuple[int, ...]
) -> None:
    work = Workload(gpt(layers, 64 * heads, heads, 1_024, 256), batch)
    limits = limits_of(work)
    found = search(work, A100, devices, limits, Choices(sharding=sharding))
    for one in (found.best, *found.runners_up):
        degrees, micro = one.layout.degrees, one.layout.micro_batch
        assert refusal(degrees, limits, micro) is None
        assert batch % (degrees.dp * micro) == 0
        assert degrees.world_size + one.idle == devices and one.idle >= 0
        assert one.layout.sharding in sharding and (one.layout.sharding < 2 or degrees.pp == 1)
        x = columns_of([(work, A100, one.layout)])
        assert one.seconds == pytest.approx(float(step_time(x).total[0]))
        assert one.bytes == pytest.approx(float(step_memory(x).total[0]))
        assert one.low < one.seconds < one.high
    assert found.best.bytes <= USABLE * A100.memory and not found.best.reason
    fitting = [one for one in found.runners_up if one.bytes <= USABLE * A100.memory]
    assert all(one.seconds >= found.best.seconds for one in fitting)


def brute_force(work: Workload, devices: int) -> float:
    """Return the seconds of the best of every layout there is, by plain loops."""
    limits, times = limits_of(work), []
    for tp in range(1, 9):
        for pp in range(1, work.shape.layers + 1):
            for dp in range(1, devices // (tp * pp) + 1):
                for vpp in range(1, work.shape.layers + 1):
                    for micro in (1, 2, 4, 8):
                        degrees = Degrees(tp, pp, dp, vpp)
                        if work.global_batch % (dp * micro) or refusal(degrees, limits, micro):
                            continue
                        for kind in ("none", "full"):
                            layout = Layout(degrees, micro, kind, 1, tp > 1)
                            x = columns_of([(work, A100, layout)])
                            if step_memory(x).total[0] <= USABLE * A100.memory:
                                times.append(float(step_time(x).total[0]))
    return min(times)


@pytest.mark.parametrize("devices", [3, 8])
def test_nothing_that_is_left_out_of_the_search_is_better(devices: int) -> None:
    work = Workload(gpt(4, 256, 4, 1_024, 256), 8)
    found = search(work, A100, devices, limits_of(work))
    assert found.best.seconds == pytest.approx(brute_force(work, devices))


def test_those_that_lose_say_why() -> None:
    found = plan(GPT3, 512)
    reasons = [one.reason for one in found.runners_up]
    assert any(
        reason.startswith("does not fit: ") and "activations" in reason for reason in reasons
    )
    assert any("% slower: " in reason and " s" in reason for reason in reasons)
    assert 5 < found.fitting < found.valid
    assert len({str(one.layout.degrees) for one in found.runners_up}) == len(found.runners_up)


def test_memory_decides_what_is_recomputed_and_sharded() -> None:
    """A model that fits eight devices only where layers are computed again."""
    whole = Workload(LLAMA, 64)
    assert search(whole, H100, 64, limits_of(whole)).best.layout.recompute == "none"
    small = device_named("a100-40gb")
    narrow = Choices(max_tensor_parallel=2)
    assert search(whole, small, 8, limits_of(whole), narrow).best.layout.recompute == "full"
    weights = Choices(sharding=(0, 1, 3), max_tensor_parallel=1)
    assert search(whole, small, 8, limits_of(whole), weights).best.layout.sharding == 3


def test_where_nothing_fits_the_fewest_devices_on_which_something_does_are_named() -> None:
    with pytest.raises(
        RefusedError, match=r"needs the least, .*optimizer.*Use (\d+) devices"
    ) as no:
        plan(GPT3, 8)
    enough = int(str(no.value).rpartition("Use ")[2].split()[0])
    assert plan(GPT3, enough).fitting > 0
    with pytest.raises(RefusedError, match="fits"):
        plan(GPT3, enough - 1)


def test_where_nothing_fits_state_goes_to_host_memory_and_it_is_said_why() -> None:
    spills = Choices(offload=("none", "optimizer-half", "optimizer"))
    assert not plan(GPT3, 48, spills).spilled
    few = plan(GPT3, 47, spills)
    assert few.best.layout.offload == "optimizer-half" and few.best.time["host"] > 0
    assert few.spilled.startswith("nothing fits in 85.5 GB without it: the optimizer's ")
    small = replace(H100, host_memory=64e9)
    with pytest.raises(RefusedError, match=r"in host memory it would fit, but needs .*host-memory"):
        search(GPT3, small, 47, limits_of(GPT3), spills)


def test_a_batch_that_no_micro_batch_divides_is_refused_with_the_nearest() -> None:
    with pytest.raises(RefusedError, match=r"Use a global batch of 4 or 8, or a micro-batch"):
        plan(Workload(LLAMA, 6), 8, Choices(micro_batches=(4,)))


def test_sizes_that_no_job_has_are_refused_at_once() -> None:
    with pytest.raises(UsageError, match="is no batch"):
        Workload(LLAMA, 10**30)
    with pytest.raises(RefusedError, match="needs at least one"):
        plan(Workload(LLAMA, 8), 0)
    assert plan(Workload(LLAMA, 8), 10**12).best.idle > 0
    assert plan(Workload(LLAMA, 1_024), 7).best.idle == 3, "what cuts nothing is idle"


def test_limits_of_the_framework_and_the_job_hold() -> None:
    limits = ModelLimits(num_attention_heads=96, num_layers=96, global_batch_size=1_536,
                         fixed=(("pp", 8, "the script says so"),), min_tp=2)  # fmt: skip
    found = search(GPT3, H100, 512, limits)
    for one in (found.best, *found.runners_up):
        assert one.layout.degrees.pp == 8 and one.layout.degrees.tp >= 2
    with pytest.raises(
        RefusedError, match=r"no layout of 96 layers .* must stay 8.*Use 48 devices"
    ):
        search(GPT3, H100, 4, limits)


def test_experts_are_spread_where_that_is_offered() -> None:
    shape = replace(LLAMA, experts=8, moe_layers=32, top_k=2, expert_ffn=14_336)
    found = plan(Workload(shape, 1_024), 64, Choices(expert_parallel=(1, 2, 4, 8)))
    assert found.best.layout.degrees.ep > 1
    assert found.best.time["expert"] > 0


def test_parts_of_a_step_add_up_also_with_what_neighbours_say() -> None:
    layouts = [Layout(Degrees(8, 8, 8), micro, "full", 1) for micro in (1, 2, 4)]
    x = columns_of([(GPT3, H100, layout) for layout in layouts])
    seconds = step_time(x).total * np.array([1.5, 1.0, 1.0])
    calibration = calibrate(x, seconds, has_neighbours=True)
    found = search(GPT3, H100, 512, limits_of(GPT3), calibration=calibration)
    fitting = [one for one in found.runners_up if not one.reason.startswith("does not fit")]
    assert all(found.best.seconds <= one.seconds for one in fitting)
    for one in (found.best, *found.runners_up):
        assert sum(one.time.values()) == pytest.approx(one.seconds)
        assert one.time["neighbours"]


@given(st.integers(1, 5_000))
def test_divisors_are_all_of_them(number: int) -> None:
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]
