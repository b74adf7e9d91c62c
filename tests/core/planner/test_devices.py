"""Devices are found by the names that people and drivers give them; others are asked for."""

from pathlib import Path

import pytest

from scalai.core.errors import RefusedError
from scalai.core.planner.devices import DEVICES, FIGURES, GB, HOST_COPY, custom_device, device_named
from scalai.core.planner.placement import EXACT_HOSTS
from scalai.core.planner.reconfiguration import DATA_PLANE, PHASES, RELAUNCH_S
from scalai.core.planner.step_time import NAMES, PRIORS

PAGE = (Path(__file__).parents[3] / "docs" / "degrees.md").read_text()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("h100", "h100-80gb"),
        ("H100-80GB", "h100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-80gb-pcie"),
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("A100", "a100-80gb"),
        ("A10", "a10-24gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24gb"),
        ("AMD Instinct MI300X", "mi300x-192gb"),
        ("NVIDIA GB200 NVL72", "gb200-186gb"),
    ],
)
def test_a_device_is_known_by_its_usual_names(name: str, found: str) -> None:
    assert device_named(name).name == found


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA A100-PCIE-40GB", "Tesla V100-SXM2-16GB",
        "NVIDIA GeForce RTX 4090 D", "NVIDIA A10G", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA",
    ],
)  # fmt: skip
def test_a_device_is_not_taken_for_a_faster_one_of_its_family(name: str) -> None:
    with pytest.raises(RefusedError, match=f"'{name}' is not in the table of devices") as refused:
        device_named(name)
    assert all(f"--{flag}" in str(refused.value) for flag in FIGURES), "they would make it known"


def test_figures_make_a_device_and_missing_ones_are_named() -> None:
    figures = {flag: 100.0 for flag in FIGURES}
    made = custom_device("b9000", figures)
    assert (made.peak("bf16"), made.memory, made.per_host) == (100e12, 100 * GB, 100)
    del figures["link-gb-s"]
    with pytest.raises(RefusedError, match=r"still needed: --link-gb-s"):
        custom_device("b9000", figures)


def test_a_figure_replaces_that_of_the_table_and_says_so() -> None:
    slow = custom_device("h100", {"network-gbit-s": 100.0})
    assert slow.network == 12.5 * GB and slow.link == device_named("h100").link
    assert slow.source.endswith("as given: network-gbit-s")
    with pytest.raises(RefusedError, match="--tflops -1 is not a size"):
        custom_device("h100", {"tflops": -1.0})


def test_a_precision_that_a_device_has_not_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(RefusedError, match=r"v100-32gb has no peak for bf16. Use one of: fp16"):
        device_named("v100").peak("bf16")


def test_every_device_has_its_row_in_the_page_and_sources_in_the_code() -> None:
    rows = {
        f"| `{d.name}` | {d.peak('fp16') / 1e12:g} | {d.memory / 2**20:.0f} | "
        f"{d.memory_bandwidth / 1e9:g} | {d.link / 1e9:g} | {d.network * 8 / 1e9:g} | "
        f"{d.per_host} |"
        for d in DEVICES.values()
    }
    assert rows <= set(PAGE.splitlines())
    for device in DEVICES.values():
        assert "datasheet" in device.source or "whitepaper" in device.source
        assert device.matrix_source and 0.5 < device.matrix_efficiency <= 1
        assert device.link >= device.network
        assert device.peak("fp16") > device.peak("fp32") > 1e12


def test_every_prior_has_its_row_in_the_page_and_a_source_in_the_code() -> None:
    rows = {f"| `{name}` | {p.median:g} | {p.factor:g} | {p.about} |" for name, p in PRIORS.items()}
    assert rows <= set(PAGE.splitlines()) and tuple(PRIORS) == NAMES
    assert all(prior.source and prior.factor > 1 for prior in PRIORS.values())


def test_the_phases_of_a_change_have_their_rows_and_constants_in_the_page() -> None:
    starts = tuple(f"| {phase} |" for phase in PHASES)
    rows = [line for line in PAGE.splitlines() if line.startswith(starts)]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == list(PHASES)
    _, snapshot, relaunch, move, restore = rows
    assert f"at {HOST_COPY / 1e9:g} GB/s" in snapshot and f"at {HOST_COPY / 1e9:g} GB/s" in restore
    assert f"{RELAUNCH_S:g} until" in relaunch and f"at {DATA_PLANE / 1e9:g} GB/s" in move
    assert f"exact up to {EXACT_HOSTS} hosts" in PAGE
