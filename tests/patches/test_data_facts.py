"""Which changes of flags and of data sets mean another order of the training data."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scalai.core.dataset.ledger import difference
from scalai.patches.megatron.data_facts import facts_of

BLEND = ["1", "/en/text", "3", "/de/text"]


class Part(SimpleNamespace):
    """As a ``GPTDataset``: it has its files inside."""

    samples = 90

    def __len__(self) -> int:
        return self.samples


def told(dataset: Any = range(90), size: int = 90, **flags: Any) -> Any:
    return facts_of({"seed": 1, "split": "9,1,0", "data_path": BLEND, **flags}, dataset, size)


def test_the_same_data_may_be_stated_otherwise(tmp_path: Path) -> None:
    (tmp_path / "blend").write_text("0.25 /en/text\n0.75 /de/text\n")
    train = {"train": BLEND, "valid": BLEND, "test": BLEND}
    (tmp_path / "splits").write_text(json.dumps(train))
    for same in (
        {"data_path": ["0.5", "/x/en/text", "1.5", "/x/de/text"]},
        {"data_path": None, "data_args_path": str(tmp_path / "blend")},
        {"data_path": None, "per_split_data_args_path": str(tmp_path / "splits")},
        {"split": "90, 10"},
    ):
        assert not difference(told(), told(**same)), same


@pytest.mark.parametrize("tree", ["scalai://gpt", "/mnt/gpt"])
def test_data_that_are_mounted_are_what_they_were(tree: str) -> None:
    for names in (("en/source", "de/source"), ("all/source/en", "all/source/de")):
        prefixes = [f"{tree}/dataset/{name}/text" for name in names]
        assert not difference(told(), told(data_path=["1", prefixes[0], "3", prefixes[1]]))
        assert difference(told(), told(data_path=["1", prefixes[1], "3", prefixes[0]]))


def test_other_data_are_others_wherever_they_are_stated(tmp_path: Path) -> None:
    (tmp_path / "blend").write_text(" ".join(BLEND).replace("de", "fr"))
    for other in (
        {"data_path": ["1", "/de/text", "3", "/en/text"]},
        {"data_path": ["/en/text", "/de/text"]},
        {"data_path": None, "data_args_path": str(tmp_path / "blend")},
        {"split": "8,2,0"}, {"seed": 2},
    ):  # fmt: skip
        assert difference(told(), told(**other)), other


def test_data_that_are_shuffled_for_more_epochs_are_others_and_a_longer_blend_is_not() -> None:
    longer = {"train_iters": 900}
    assert difference(told(range(90)), told(range(180), 180, **longer))
    blend = SimpleNamespace(datasets=[range(90), range(40)])
    assert not difference(told(blend, 80), told(blend, 120, **longer))
    alone = [Part(dataset=range(30)) for _ in range(2)]
    alone[1].samples *= 2
    assert difference(told(alone[0]), told(alone[1])), "its samples count, not its documents"
    wrapped = SimpleNamespace(dataset=blend)
    assert not difference(told(blend, 80), told(wrapped, 80))
    assert not difference(told(range(90), mock_data=True), told(range(180), mock_data=True))
    assert not difference(told(None, 90, train_iters=9), told(None, 180, train_iters=18))
    assert difference(told(None, 90, train_iters=9), told(None, 180, train_iters=9))


@pytest.mark.parametrize("path", ["none", "torn"])
def test_a_list_that_cannot_be_read_is_left_to_the_framework(tmp_path: Path, path: str) -> None:
    (tmp_path / "torn").write_text("{")
    stated: dict[str, Any] = {"data_path": None, "per_split_data_args_path": str(tmp_path / path)}
    assert "blend" not in told(**stated)
