"""Counts steps as FusedAdam of Transformer Engine and Apex does, once a group, with torch's
arithmetic: both need CUDA."""

from typing import Any

import megatron.core.optimizer as optimizers
import torch
from megatron.core.optimizer import distrib_optimizer


class FusedAdam(torch.optim.Optimizer):
    """AdamW. Its state is that of transformer_engine/pytorch/optimizers/fused_adam.py."""

    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, adam_w_mode: bool = True,
        weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        assert bias_correction and adam_w_mode
        defaults = {
            "lr": lr, "bias_correction": True, "betas": betas, "eps": eps,
            "weight_decay": weight_decay,
        }  # fmt: skip
        super().__init__(params, defaults)

    def initialize_state(self, parameter: torch.Tensor) -> None:
        """Make the state before the first step."""
        names = "exp_avg", "exp_avg_sq"
        self.state[parameter].update({name: torch.zeros_like(parameter) for name in names})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.initialize_state(parameter)
                state = self.state[parameter]
                torch.optim._functional.adamw(  # type: ignore[attr-defined]
                    [parameter], [parameter.grad], [state["exp_avg"]], [state["exp_avg_sq"]], [],
                    # It adds 1 itself.
                    [torch.tensor(float(group["step"] - 1))],
                    foreach=False, amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1],
                    lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
                    maximize=False,
                )  # fmt: skip


def use(is_used: bool) -> None:
    """Let Megatron-core build it as its Adam, as with Transformer Engine; or torch's."""
    adam = FusedAdam if is_used else torch.optim.AdamW
    optimizers.Adam = distrib_optimizer.Adam = adam
    optimizers.USING_PYTORCH_OPTIMIZER = not is_used
