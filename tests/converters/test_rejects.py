"""What is refused, of every layout: the file that provokes it, the exit code, the words.

``ITEMS`` (rejects.py) is the list; each layout has a case for each item, or says why it has none.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from scalai.launch import cli
from support.checkpoints import deepspeed_state, state, write
from support.legacy_checkpoints import SHARED, convert, gpt
from support.reject_deepspeed import (
    UNIVERSAL,
    UNIVERSAL_NOT,
    ZERO,
    ZERO_0,
    ZERO_0_NOT,
    ZERO_3,
    ZERO_NOT,
)
from support.reject_megatron import TORCH, TORCH_DIST, TORCH_DIST_NOT, TORCH_NOT
from support.reject_others import (
    GENERATION,
    GENERATION_NOT,
    SAFETENSORS,
    SAFETENSORS_NOT,
    write_shards,
)
from support.rejects import ITEMS, Case

TABLE: dict[str, tuple[list[Case], dict[str, str]]] = {
    "torch_dist": (TORCH_DIST, TORCH_DIST_NOT),
    "torch": (TORCH, TORCH_NOT),
    "deepspeed_zero0": (ZERO_0, ZERO_0_NOT),
    "deepspeed_zero1": (ZERO, ZERO_NOT),
    "deepspeed_zero3": (ZERO_3, ZERO_NOT),
    "deepspeed_universal": (UNIVERSAL, UNIVERSAL_NOT),
    "scalai": (GENERATION, GENERATION_NOT),
    "safetensors": (SAFETENSORS, SAFETENSORS_NOT),
}

MAKERS: dict[str, Callable[[Path], object]] = {
    "torch_dist": lambda path: write(path, tp=2),
    "torch": lambda path: convert(gpt(), path, **SHARED),
    "deepspeed_zero0": lambda path: write(path, "deepspeed_zero0", deepspeed_state(), dp=2),
    "deepspeed_zero1": lambda path: write(path, "deepspeed_zero1", deepspeed_state(), dp=2),
    "deepspeed_zero3": lambda path: write(path, "deepspeed_zero3", deepspeed_state(), dp=2),
    "deepspeed_universal": lambda path: write(path, "deepspeed_universal", deepspeed_state(), dp=1),
    "scalai": lambda path: write(path, "scalai"),
    "safetensors": write_shards,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a whole checkpoint of a layout; made once."""
    made: dict[str, Path] = {}

    def get(layout: str) -> Path:
        if layout not in made:
            made[layout] = tmp_path_factory.mktemp(layout) / "whole"
            MAKERS[layout](made[layout])
        return made[layout]

    return get


@pytest.mark.parametrize("layout", TABLE)
def test_every_item_has_a_case_or_a_reason(layout: str) -> None:
    cases, reasons = TABLE[layout]
    assert {case.item for case in cases} | set(reasons) == set(ITEMS)
    assert not {case.item for case in cases} & set(reasons)


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        pytest.param(layout, case, id=f"{layout}-{case.item}-{number}".replace(" ", "-"))
        for layout, (cases, _) in TABLE.items()
        for number, case in enumerate(cases)
    ],
)
def test_a_bad_checkpoint_is_refused_by_name(
    whole: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    layout: str,
    case: Case,
) -> None:
    source = tmp_path / "here" / "source"
    shutil.copytree(whole(layout), source, symlinks=True)
    case.damage(source)
    before = sorted(tmp_path.rglob("*"))
    code, text = run(capsys, "verify", source, "--workers", 1)
    assert (code, case.words in text) == (case.code, True), text
    code, text = run(capsys, "reshard", source, tmp_path / "new", "--workers", 1)
    assert (code, case.words in text) == (case.code, True), text
    if case.code:
        left = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*")}
        assert left - {".new.partial"} == {path.relative_to(tmp_path).parts[0] for path in before}
    assert not Path("/tmp/this-must-not-be").exists()


@pytest.mark.parametrize("layout", TABLE)
def test_a_whole_one_is_not(
    whole: Callable[[str], Path], capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    code, text = run(capsys, "verify", whole(layout), "--workers", 1)
    assert code == 0, text
    unproven = "nothing proves which of the optimizer's states belong"
    assert (text.count("warning"), text.count(unproven)) == (
        *[int(layout == "deepspeed_zero0")] * 2,
    )
    assert "left over" not in text


def test_the_state_is_not_suspect_but_its_moments_may_be_tiny(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import numpy as np

    from support.rejects import edit_values

    write(tmp_path / "tiny", source=state())
    (tmp_path / "tiny" / "scalai.json").unlink()
    for kind in ("param", "exp_avg_sq"):
        name = f"{kind}/decoder.final_layernorm.weight"
        edit_values(tmp_path / "tiny", name, lambda values: values.fill(np.float32(1e-42)))
    code, text = run(capsys, "verify", tmp_path / "tiny")
    assert code == 0, text
    expected = "param/decoder.final_layernorm.weight F32[4] holds nothing but denormal numbers"
    assert expected in text
    assert text.count("warning") == 1


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Run ``scalai``; return its exit code and what it said."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*map(str, arguments)])
    logged = capsys.readouterr()
    return int(ended.value.code or 0), logged.out + logged.err
