"""Layers over slabs with halos compute, forward and backward, what they compute over the whole."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.halo_ranks import GRIDS, RANKS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where four ranks have left what they found."""
    path = tmp_path_factory.mktemp("halo")
    subprocess.run([sys.executable, "-m", "support.halo_ranks", str(path)], check=True, timeout=120)
    return path


@pytest.mark.parametrize("number", range(len(GRIDS)))
def test_values_and_gradients_are_those_of_the_whole_sample(folder: Path, number: int) -> None:
    for rank in range(RANKS):
        found = json.loads((folder / f"rank-{rank}.json").read_text())
        assert found["differences"][number] < 1e-12


def test_wrong_calls_are_refused_on_every_rank(folder: Path) -> None:
    for rank in range(RANKS):
        texts = json.loads((folder / f"rank-{rank}.json").read_text())["refused"].splitlines()
        assert texts[0].startswith("LayoutError: a halo of 3 along axis 0 is wider")
        assert "2 slabs need as many ranks, and the group has 4" in texts[1]
        assert f"rank {rank} has [2, 2] of the sample [8, 2], and was given" in texts[2]


@pytest.mark.fault
def test_a_rank_that_dies_in_an_exchange_is_told_to_the_others(folder: Path) -> None:
    told = {rank: folder / f"death-{rank}" for rank in (0, 2, 3)}
    assert {path.read_text() for path in told.values()} <= {"RuntimeError", "DistBackendError"}


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_the_group_says(folder: Path) -> None:
    """Rank 0 and 2 are its neighbours; rank 3 is neighbour of a rank that has given up."""
    told = [json.loads((folder / f"rank-{rank}.json").read_text())["silence"] for rank in (0, 2)]
    assert "nothing" not in told
