"""The page has the numbers that the code has."""

from pathlib import Path

from scalai.core.planner.coefficients import PRIORS
from scalai.core.planner.devices import DEVICES
from scalai.core.planner.placement import EXACT_HOSTS
from scalai.core.planner.reconfiguration import DATA_PLANE, HOST_COPY, PHASES, RELAUNCH_S

PAGE = (Path(__file__).parents[3] / "docs" / "degrees.md").read_text()


def test_every_prior_has_its_row_and_a_source_in_the_code() -> None:
    rows = {f"| `{name}` | {p.median:g} | {p.factor:g} | {p.about} |" for name, p in PRIORS.items()}
    assert rows <= set(PAGE.splitlines())
    assert all(p.source for p in PRIORS.values())


def test_every_device_has_its_row_and_sources_in_the_code() -> None:
    rows = {
        f"| `{d.name}` | {d.peak('fp16') / 1e12:g} | {d.memory / 2**20:.0f} | "
        f"{d.memory_bandwidth / 1e9:g} | {d.link / 1e9:g} | {d.network * 8 / 1e9:g} | "
        f"{d.per_host} |"
        for d in DEVICES.values()
    }
    assert rows <= set(PAGE.splitlines())
    assert all(d.source and d.matrix_source for d in DEVICES.values())


def test_the_phases_of_a_change_have_their_rows_and_constants() -> None:
    starts = tuple(f"| {phase} |" for phase in PHASES)
    rows = [line for line in PAGE.splitlines() if line.startswith(starts)]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == list(PHASES)
    _, snapshot, relaunch, move, restore = rows
    assert f"at {HOST_COPY / 1e9:g} GB/s" in snapshot and f"at {HOST_COPY / 1e9:g} GB/s" in restore
    assert f"{RELAUNCH_S:g} until" in relaunch and f"at {DATA_PLANE / 1e9:g} GB/s" in move
    assert f"exact up to {EXACT_HOSTS} hosts" in PAGE
