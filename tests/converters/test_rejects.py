"""What is refused, of every layout: the file that provokes it, the exit code, the words.

``TABLE`` (rejects.py) has for each layout a case for each item, or says why it has none.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from scalai.converters.layouts import open_checkpoint
from scalai.core.errors import RefusedError
from support.checkpoints import deepspeed_state, experts_state, lay_out, state, write
from support.command import Capsys, logged
from support.rejects import EXPERTS, ITEMS, MAKERS, NORM, TABLE, Reject, edit_values

CASES = {**{layout: cases for layout, (cases, _) in TABLE.items()}, "experts-zero2": EXPERTS}


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
        for layout, cases in CASES.items()
        for number, case in enumerate(cases)
    ],
)
def test_a_bad_checkpoint_is_refused_by_name(
    whole: Callable[[str], Path], tmp_path: Path, capsys: Capsys,
    layout: str, case: Reject,
) -> None:  # fmt: skip
    source = tmp_path / "here" / "source"
    shutil.copytree(whole(layout), source, symlinks=True)
    case.damage(source)
    before = sorted(tmp_path.rglob("*"))
    for command in (["verify", source], ["reshard", source, tmp_path / "new"]):
        code, text = logged(capsys, *command, "--workers", 1)
        assert (code, case.words in text) == (case.code, True), text
    if case.code:
        left = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*")}
        assert left - {".new.partial"} == {path.relative_to(tmp_path).parts[0] for path in before}
    assert not Path("/tmp/this-must-not-be").exists()


@pytest.mark.parametrize("layout", TABLE)
def test_a_whole_one_is_not(whole: Callable[[str], Path], capsys: Capsys, layout: str) -> None:
    code, text = logged(capsys, "verify", whole(layout), "--workers", 1)
    assert code == 0, text
    unproven = "nothing proves which of the optimizer's states belong"
    count = int(layout == "deepspeed_zero0")
    assert (text.count("warning"), text.count(unproven)) == (count, count)
    assert "left over" not in text


def test_the_state_is_not_suspect_but_its_moments_may_be_tiny(
    tmp_path: Path, capsys: Capsys
) -> None:
    write(tmp_path / "tiny", source=state())
    (tmp_path / "tiny" / "scalai.json").unlink()
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        edit_values(
            tmp_path / "tiny", f"{kind}/{NORM}", lambda values: values.fill(np.float32(1e-42))
        )
    code, text = logged(capsys, "verify", tmp_path / "tiny")
    assert code == 0, text
    assert f"param/{NORM} F32[4] holds nothing but denormal numbers" in text
    assert text.count("warning") == 1


@pytest.mark.parametrize(
    ("layout", "degrees", "words"),
    [
        ("deepspeed_zero1", {"tp": 2}, "along which dimension tensor-parallel ranks cut"),
        ("deepspeed_zero1", {"pp": 2}, "whose engine is no pipeline. Give --pp 1"),
        ("deepspeed_zero1", {"cp": 2}, "which has dp, tp, pp alone. Give --cp 1"),
        ("deepspeed_zero1", {"ep": 2}, "ep=2 is asked"),
    ],
)
def test_axes_that_a_deepspeed_job_does_not_have_are_refused(
    layout: str, degrees: dict[str, int], words: str
) -> None:
    with pytest.raises(RefusedError, match=words):
        lay_out(deepspeed_state(), layout, **{"dp": 2, **degrees})


@pytest.mark.parametrize(
    ("layout", "degrees", "words"),
    [
        ("deepspeed_zero3", {}, "stage 3 at tp=1 pp=1 .* Convert to deepspeed_zero2"),
        ("deepspeed_universal", {}, "has no universal checkpoints"),
        ("deepspeed_zero1", {"ep": 8, "dp": 8}, "ep=8 does not divide the 4 experts of moe"),
        ("deepspeed_zero1", {"ep": 4}, "ep=4 does not divide dp=2"),
        ("deepspeed_zero2", {"cp": 2}, "which has dp, tp, pp, ep alone"),
    ],
)
def test_targets_that_experts_do_not_have_are_refused(
    layout: str, degrees: dict[str, int], words: str
) -> None:
    with pytest.raises(RefusedError, match=words):
        lay_out(experts_state(), layout, **{"dp": 2, **degrees})


def test_a_directory_that_holds_an_expert_beside_stages_is_refused(
    whole: Callable[[str], Path], tmp_path: Path
) -> None:
    tag = tmp_path / "global_step3"
    shutil.copytree(whole("experts-zero2") / tag.name, tag)
    shutil.copy(tag / "mp_rank_00_model_states.pt", tag / "layer_02-model_00-model_states.pt")
    with pytest.raises(RefusedError, match="holds experts beside stages or tensor-parallel ranks"):
        open_checkpoint(tag)
