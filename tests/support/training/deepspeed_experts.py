"""A model with DeepSpeed's own layers of experts, for ``deepspeed_jobs``.

Its loss depends on the samples alone, not on how ranks share them: no token is dropped, no noise is
added, and the loss that balances experts, which is taken by rank, is left out.
"""

from typing import Any
from zlib import crc32

import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

VOCABULARY, HIDDEN = 31, 17


class Expert(nn.Module):
    """A block with a buffer of its own; one of its biases may be frozen."""

    calls: torch.Tensor

    def __init__(self, *, is_frozen: bool) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, HIDDEN + 2)
        self.down = nn.Linear(HIDDEN + 2, HIDDEN)
        self.down.bias.requires_grad_(not is_frozen)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.down(nn.functional.gelu(self.up(x)))


class Routed(nn.Module):
    """Layers of experts; the last one has a path beside them for all tokens."""

    def __init__(self, job: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        last = len(job.experts) - 1
        self.blocks = nn.ModuleList(
            MoE(
                HIDDEN,
                Expert(is_frozen=job.frozen),
                count,
                ep_size=job.ep,
                drop_tokens=False,
                use_rts=False,
                use_residual=number == last,
            )
            for number, count in enumerate(job.experts)
        )
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        # As pieces of one model: what other ranks' experts would draw must be drawn here too.
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        draw(self, job)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)[0]
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def draw(model: nn.Module, job: Any) -> None:
    """Draw each parameter by its name in the whole model, so that all ranks have the same model."""
    rank = torch.distributed.get_rank() % job.ep
    for name, parameter in model.named_parameters():
        before, mark, behind = name.partition(".deepspeed_experts.")
        if mark:
            number, _, rest = behind.partition(".")
            each = job.experts[int(before.split(".")[1])] // job.ep
            name = f"{before}{mark}{int(number) + rank * each}.{rest}"
        generator = torch.Generator().manual_seed(torch.initial_seed() + crc32(name.encode()))
        nn.init.normal_(parameter, std=0.4, generator=generator)


def split(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return parameter groups in which experts are apart, as DeepSpeed asks."""
    named = [{**group, "name": f"group-{number}"} for number, group in enumerate(groups)]
    return split_params_into_different_moe_groups_for_optimizer(named)
