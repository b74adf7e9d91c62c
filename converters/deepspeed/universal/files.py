"""Names of a universal checkpoint's files.

    <save directory>/latest_universal
    <save directory>/<tag>_universal/
        mp_rank_00_model_states.pt  zero_pp_rank_0_mp_rank_00_model_states.pt
        zero/optimizer_state.pt  zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt

Source: as ``layout``.
"""

from pathlib import Path

from scalai.converters.bounded import read_pointer

LATEST = "latest_universal"
SUFFIX = "_universal"
MASTERS, STEPS = "fp32", "step"
GLOBAL_STATE = "zero/optimizer_state.pt"


def find_universal(path: Path, step: int | None) -> Path | None:
    """Return a tag's directory: ``path`` itself, the tag in ``latest_universal``, or the step's."""
    if step is None and (path / GLOBAL_STATE).is_file():
        return path
    tag = read_pointer(path / LATEST) if step is None else f"global_step{step}{SUFFIX}"
    if not tag or "/" in tag or not (path / tag / GLOBAL_STATE).is_file():
        return None
    return path / tag
