"""What a script keeps itself is seen in its variables: what changes with each step, and no more."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from scalai.patches.user_script import LOOKS, KeptVariable, OwnState, names_of, script_place


class Shadow:
    def __init__(self, model: torch.nn.Module) -> None:
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}


class Meter:
    def __init__(self) -> None:
        self.total = 0


class Loop:
    """A trainer as people write them: counts in attributes."""

    def __init__(self) -> None:
        self.steps = 0
        self.rate = 3

    def train(self, own: OwnState, engine: Any) -> list[KeptVariable]:
        kept: list[KeptVariable] = []
        for _ in range(LOOKS):
            self.steps += 1
            kept = own.look(sys._getframe(), engine)
        return kept


def model() -> Any:
    return torch.nn.Linear(2, 2)


def test_what_changes_with_every_step_is_found_and_nothing_else() -> None:
    ours = model()
    engine, own = SimpleNamespace(module=ours), OwnState()
    shadow, meter, reference = Shadow(ours), Meter(), model()
    averaged = torch.optim.swa_utils.AveragedModel(ours)
    done, seen, epoch, is_last, total, lines = 100, 0, 4, False, 0.0, [0]
    kept: list[KeptVariable] = []
    for place, _ in enumerate(range(LOOKS)):
        rate = 1.0 / (place + 1)
        batch = {"rows": torch.rand(3)}
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter.add_(1.0)
            next(iter(shadow.values.values())).add_(1.0)
        averaged.update_parameters(ours)
        meter.total += 2
        total += rate
        seen += 12
        done += 1
        lines.append(place)
        kept = own.look(sys._getframe(), engine)
    assert own.is_done and (epoch, is_last, reference, batch) is not None
    mine = {one.name: one for one in kept if one.place.startswith("test_user_script.py")}
    assert set(mine) == {"shadow", "meter", "averaged", "done", "seen", "total"}
    assert {name for name, one in mine.items() if one.is_count} == {"done", "seen"}
    assert [mine[name].is_fresh for name in ("done", "seen")] == [False, True]
    lines_of = Path(__file__).read_text().splitlines()
    assert "shadow, meter" in lines_of[int(mine["meter"].place.rpartition(":")[2]) - 1]


def test_attributes_of_a_trainer_are_looked_at() -> None:
    loop = Loop()
    kept = loop.train(OwnState(), SimpleNamespace(module=model()))
    (steps,) = [one for one in kept if one.name == "self.steps"]
    assert steps.is_fresh and "self.rate" not in {one.name for one in kept}
    assert (
        "self.steps = 0"
        in Path(__file__).read_text().splitlines()[int(steps.place.rpartition(":")[2]) - 1]
    )


class Opaque:
    """What no look from outside can read, as proxies of servers are."""

    def __init__(self) -> None:
        self.total = torch.ones(2)

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            raise ConnectionError("the server has gone")
        return super().__getattribute__(name)


def test_what_cannot_be_read_is_passed_over_and_does_not_end_the_training() -> None:
    """Spectra, sparse graphs, weights that are not there yet, values of foreign classes."""
    engine, own, opaque, done = SimpleNamespace(module=model()), OwnState(), Opaque(), 0
    total = torch.zeros((), dtype=torch.complex64)
    kept: list[KeptVariable] = []
    for _ in range(LOOKS):
        total += 1j
        done += 1
        spectra = {"rows": torch.full((2, 3), done * 1j)}
        graph = {"adjacency": torch.eye(3).to_sparse()}
        frozen = {"weight": torch.empty(2, device="meta")}
        kept = own.look(sys._getframe(), engine)
    assert own.is_done and (opaque, spectra, graph, frozen) is not None
    mine = {one.name for one in kept if one.place.startswith("test_user_script.py")}
    assert mine == {"done"}


def test_the_line_of_the_script_is_told_and_not_that_of_a_library() -> None:
    place = sorted([1], key=lambda _: script_place())  # through what is not the script
    assert place == [1]
    here = sys._getframe().f_lineno + 1
    assert script_place() == f"test_user_script.py:{here}"


def test_a_file_that_cannot_be_read_binds_no_names(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def (")
    assert not names_of(str(tmp_path / "broken.py")).lines
    assert not names_of(str(tmp_path / "none.py")).lines


class Counting:
    """A callback as people write them."""

    def __init__(self) -> None:
        self.n = 0
        self.every = 5


def test_attributes_of_what_a_trainer_calls_are_looked_at() -> None:
    engine, own, callback, kept = SimpleNamespace(module=model()), OwnState(), Counting(), None
    for _ in range(LOOKS):
        callback.n += 1
        kept = own.look(sys._getframe(), engine, [callback, torch.nn.Linear(1, 1)])
    assert kept is not None
    (one,) = kept
    assert one.name == "self.n" and one.place.startswith("test_user_script.py:") and one.is_fresh


def test_a_count_of_enumerate_is_found_where_it_decides() -> None:
    ours = model()
    engine, own, kept = SimpleNamespace(module=ours), OwnState(), list[KeptVariable]()
    named = dict(ours.named_parameters())
    for number, _ in enumerate(range(LOOKS)):
        with torch.no_grad():
            for parameter in named.values():
                parameter.add_(1.0)
        if number == 100:
            break
        kept = own.look(sys._getframe(), engine)
    mine = [one for one in kept if one.place.startswith("test_user_script.py")]
    assert [(one.name, one.is_enumerated) for one in mine] == [("number", True)]
