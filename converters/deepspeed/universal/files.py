"""Names of a universal checkpoint's files.

    <save directory>/latest_universal
    <save directory>/<tag>_universal/
        mp_rank_00_model_states.pt  zero_pp_rank_0_mp_rank_00_model_states.pt
        zero/optimizer_state.pt  zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt

Source: as ``layout``.
"""

from pathlib import Path

LATEST = "latest_universal"
SUFFIX = "_universal"
MASTERS, STEPS = "fp32", "step"
GLOBAL_STATE = "zero/optimizer_state.pt"


def find_universal(path: Path, step: int | None) -> Path | None:
    """Return a tag's directory: ``path`` itself, or the one that ``latest_universal`` names."""
    if step is None and (path / GLOBAL_STATE).is_file():
        return path
    tags = [f"global_step{step}{SUFFIX}"]
    if step is None:
        try:
            tags = [(path / LATEST).read_text(encoding="utf-8").strip()]
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError):
            return None
    found = [path / tag for tag in tags if tag and "/" not in tag]
    return next((tag for tag in found if (tag / GLOBAL_STATE).is_file()), None)
