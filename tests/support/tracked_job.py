"""The tiny job, whose rank 0 writes each step to W&B (offline) and to MLflow (in files).

The folder for both is the variable ``TRACKED``.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from support import tiny_job

Advance = Callable[[torch.Tensor, torch.Tensor, int], None]


def tracked(advance: Advance, folder: Path) -> Advance:
    """``advance`` with a row of the script's own for each step."""
    import mlflow
    import wandb

    run: Any = wandb.init(mode="offline", dir=folder, project="tiny", id="tiny", resume="allow")
    mlflow.set_tracking_uri(folder / "mlruns")
    name = folder / "mlflow-run"
    known = name.read_text() if name.exists() else None
    name.write_text(mlflow.start_run(run_id=known).info.run_id)

    def step_of(matrix: torch.Tensor, vector: torch.Tensor, step: int) -> None:
        run.log({"own": step}, step=step)
        mlflow.log_metric("own", step, step=step)
        advance(matrix, vector, step)

    return step_of


if __name__ == "__main__":
    if os.environ["RANK"] == "0":
        setattr(tiny_job, "advance", tracked(tiny_job.advance, Path(os.environ["TRACKED"])))  # noqa: B010
    tiny_job.main()
