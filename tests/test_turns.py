"""Crosses take turns: no case is ever left out, and each turn sees every layout."""

import subprocess
import sys
from datetime import date, timedelta
from itertools import permutations
from pathlib import Path

import pytest

from support.spread import ALONE, TOGETHER, unit_of
from support.turns import TURNS, deal, whose_turn

CONFTEST = """
import pytest
from support.spread import Spreading
from support.turns import TakingTurns

def pytest_configure(config):
    config.addinivalue_line("markers", "turns")
    config.pluginmanager.register(TakingTurns(config))
    config.pluginmanager.register(Spreading())
"""
TESTS = """
import pytest

@pytest.mark.turns
@pytest.mark.parametrize("case", range(8))
def test_cross(case): pass

def test_refusal(): pass
"""


@pytest.mark.parametrize("layouts", [7, 8, 9, 10, 11])
def test_each_turn_sees_nearly_every_layout_on_either_side(layouts: int) -> None:
    pairs = [(f"layout{a}", f"layout{b}") for a, b in permutations(range(layouts), 2)]
    turns = deal(["-".join(pair) for pair in pairs])
    for turn in range(TURNS):
        mine = [pair for pair, dealt in zip(pairs, turns, strict=True) if dealt == turn]
        assert len({before for before, _ in mine}) == layouts
        assert len({after for _, after in mine}) >= layouts - (layouts < 9)


@pytest.mark.parametrize("cases", range(9))
def test_every_case_has_a_turn_and_no_turn_is_much_longer(cases: int) -> None:
    turns = deal([f"same-{number}" for number in range(cases)])
    counts = [turns.count(turn) for turn in range(TURNS)]
    assert sum(counts) == cases and max(counts) - min(counts) <= 1


TODAY = date(2026, 2, 27)


def test_the_date_says_whose_turn_it_is() -> None:
    days = [TODAY + timedelta(number) for number in range(TURNS)]
    turns = [whose_turn(None, day, is_whole_run=True) for day in days]
    assert {turn.number for turn in turns} == set(range(TURNS))
    assert turns[0].reason == "2026-02-27"
    assert whose_turn(None, TODAY, is_whole_run=False).number is None


def test_the_environment_overrides() -> None:
    assert whose_turn("2", TODAY, is_whole_run=False).number == 2
    assert whose_turn("all", TODAY, is_whole_run=True).number is None
    for wrong in ("4", "-1", "each"):
        with pytest.raises(pytest.UsageError, match=r"is no turn\. Use 0 to 3, or all"):
            whose_turn(wrong, TODAY, is_whole_run=True)


def run_pytest(directory: Path, turn: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", *arguments],
        cwd=directory, capture_output=True, text=True, timeout=120,
        env={"PYTHONPATH": str(Path(__file__).parent), "TURN": turn},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_takes_its_turn_and_says_what_waits(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    outputs = [run_pytest(tmp_path, str(turn)) for turn in range(TURNS)]
    for turn, output in enumerate(outputs):
        assert f"crosses: turn {turn} of 0 to 3 (TURN={turn})" in output
        assert "crosses: 6 cases wait for other turns" in output
        assert "3 passed, 6 deselected" in output and "test_refusal PASSED" in output
    passed = {line.split()[0] for text in outputs for line in text.splitlines() if "PASSED" in line}
    assert len(passed) == 9
    assert "9 passed" in run_pytest(tmp_path, "all")
    assert "9 passed" in run_pytest(tmp_path, "", "test_it.py")


def test_processes_that_share_a_run_take_the_same_turn(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    output = run_pytest(tmp_path, "1", "-n", "2", "test_it.py")
    assert "crosses: turn 1 of 0 to 3 (TURN=1)" in output
    assert "crosses: 6 cases wait for other turns" in output and "3 passed" in output
    assert "9 passed" in run_pytest(tmp_path, "", "-n", "2", "test_it.py")


def test_what_a_process_makes_once_stays_in_one_process() -> None:
    job = "tests/end_to_end/test_a.py::test_b[c]"
    assert unit_of(job) == job
    assert unit_of("tests/launch/test_a.py::Class::test_b") == "tests/launch/test_a.py"
    assert unit_of("tests/patches/test_a.py::test_b") == "tests/patches"
    for folder in (*ALONE, *TOGETHER):
        assert (Path(__file__).parents[1] / folder).exists()
