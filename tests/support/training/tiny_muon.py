"""Muon on megatron-core without the package that has its arithmetic (emerging-optimizers, which
needs Python 3.12).

Which parameters are whose, how the optimizers are chained and what is saved of them is Megatron's
(megatron/core/optimizer/muon.py, 0.16.1); what is here is an update by an orthogonalized momentum.
"""

import sys
from types import ModuleType
from typing import Any

import torch

_ROOT = "emerging_optimizers.orthogonalized_optimizers"


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    """The base class that Megatron's Muon asks for."""

    def __init__(
        self, params: Any, lr: float, momentum_beta: float, *,
        use_nesterov: bool, weight_decay: float, scaled_orthogonalize_fn: Any, **other: Any,
    ) -> None:  # fmt: skip
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn
        defaults = {
            "lr": lr, "momentum_beta": momentum_beta, "use_nesterov": use_nesterov,
            "weight_decay": weight_decay, **other,
        }  # fmt: skip
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter by its orthogonalized momentum."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                state["momentum_buffer"].lerp_(gradient, 1 - group["momentum_beta"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                update = self.orthogonalize(parameter, state["momentum_buffer"])  # type: ignore[attr-defined]
                parameter.add_(update, alpha=-group["lr"])


def newton_schulz_tp(matrix: torch.Tensor, steps: int, **other: Any) -> torch.Tensor:
    """Return a matrix of about orthogonal rows, by the cubic iteration."""
    found = matrix / (matrix.norm() + 1e-7)
    for _ in range(steps):
        found = 1.5 * found - 0.5 * found @ found.mT @ found
    return found


def get_muon_scale_factor(rows: int, columns: int, mode: str) -> float:
    """Return how far an update goes."""
    return float(max(1, rows / columns) ** 0.5)


def muon_optimizer(config: Any, chunks: list[Any]) -> Any:
    """Return Megatron's chain of Muon and Adam."""
    for name in ("emerging_optimizers", _ROOT, f"{_ROOT}.muon_utils"):
        module = sys.modules.setdefault(name, ModuleType(name))
        module.__dict__.update(
            OrthogonalizedOptimizer=OrthogonalizedOptimizer,
            newton_schulz_tp=newton_schulz_tp,
            get_muon_scale_factor=get_muon_scale_factor,
        )
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    return get_megatron_muon_optimizer(config, chunks)
