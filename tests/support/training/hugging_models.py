"""GPT-2 and Llama under Hugging Face's names, trained by DeepSpeed as Megatron trains its own.

Only what a checkpoint holds is theirs: the names, what is fused and transposed, what is tied. The
arithmetic is Megatron's: GELU by erf, its schedule of learning rate and weight decay, its samples.
"""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from support.training.jobs import Job

Tokens = torch.Tensor


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {
        "fp16": {
            "enabled": True, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 1,
        }
    },
}  # fmt: skip
"""As ``tiny_gpt`` trains, but the loss scale begins elsewhere and does not grow: at a step at which
it does, DeepSpeed divides the gradients by the new scale (0.19.8, zero/stage_1_and_2.py)."""


class Conv1D(nn.Module):
    """A linear layer whose weight is [inputs, outputs]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, heads: int, groups: int
) -> torch.Tensor:
    """Return causal attention of [batch, length, heads or groups * width]."""
    batch, length, hidden = queries.shape
    split = queries.view(batch, length, heads, -1).transpose(1, 2)
    both = (x.view(batch, length, groups, -1).transpose(1, 2) for x in (keys, values))
    key, value = (x.repeat_interleave(heads // groups, dim=1) for x in both)
    scores = split @ key.transpose(2, 3) / math.sqrt(hidden // heads)
    later = torch.ones(length, length).triu(1).bool()
    weights = scores.float().masked_fill(later, -10000.0).softmax(-1).to(value.dtype)
    return (weights @ value).transpose(1, 2).reshape(batch, length, hidden)


class Attention(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.heads = job.heads
        self.c_attn = Conv1D(job.hidden, 3 * job.hidden)
        self.c_proj = Conv1D(job.hidden, job.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.c_attn(x).chunk(3, dim=-1)
        return self.c_proj(attend(queries, keys, values, self.heads, self.heads))


class Mlp(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.c_fc = Conv1D(job.hidden, 4 * job.hidden)
        self.c_proj = Conv1D(4 * job.hidden, job.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(functional.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(job.hidden)
        self.attn = Attention(job)
        self.ln_2 = nn.LayerNorm(job.hidden)
        self.mlp = Mlp(job)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt2(nn.Module):
    """``GPT2LMHeadModel``."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        embedding = nn.Embedding(job.padded_vocabulary, job.hidden)
        self.transformer: Any = nn.ModuleDict(
            {
                "wte": embedding,
                "wpe": nn.Embedding(job.sequence, job.hidden),
                "h": nn.ModuleList(Block(job) for _ in range(job.layers)),
                "ln_f": nn.LayerNorm(job.hidden),
            }
        )
        self.lm_head = nn.Linear(job.hidden, job.padded_vocabulary, bias=False)
        if job.is_tied:
            self.lm_head.weight = embedding.weight

    def forward(self, tokens: Tokens, labels: Tokens) -> torch.Tensor:
        x = self.transformer["wte"](tokens) + self.transformer["wpe"].weight[: tokens.shape[1]]
        for block in self.transformer["h"]:
            x = block(x)
        return entropy(self.lm_head(self.transformer["ln_f"](x)), labels)


def entropy(logits: torch.Tensor, labels: Tokens) -> torch.Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class LlamaAttention(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.heads, self.groups = job.heads, job.query_groups or job.heads
        width = job.hidden // job.heads
        self.q_proj = nn.Linear(job.hidden, job.hidden, bias=job.has_qkv_bias)
        self.k_proj = nn.Linear(job.hidden, self.groups * width, bias=job.has_qkv_bias)
        self.v_proj = nn.Linear(job.hidden, self.groups * width, bias=job.has_qkv_bias)
        self.o_proj = nn.Linear(job.hidden, job.hidden, bias=False)
        self.rotary_emb = nn.Module()  # with a buffer in the state, as Llama long had it
        speeds = 10000 ** -(torch.arange(0, width, 2) / width)
        self.rotary_emb.register_buffer("inv_freq", speeds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries = self._rotated(self.q_proj(x), self.heads)
        keys = self._rotated(self.k_proj(x), self.groups)
        return self.o_proj(attend(queries, keys, self.v_proj(x), self.heads, self.groups))

    def _rotated(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """Turn pairs of a half each by the position's angles."""
        split = x.unflatten(-1, (heads, -1))
        one, two = split.chunk(2, dim=-1)
        angles = torch.outer(torch.arange(x.shape[1]), self.rotary_emb.get_buffer("inv_freq"))
        angles = torch.cat([angles, angles], dim=-1)[:, None]
        turned = split * angles.cos().to(x.dtype)
        return (turned + torch.cat([-two, one], dim=-1) * angles.sin().to(x.dtype)).flatten(2)


class LlamaMlp(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(job.hidden, 4 * job.hidden, bias=False)
        self.up_proj = nn.Linear(job.hidden, 4 * job.hidden, bias=False)
        self.down_proj = nn.Linear(4 * job.hidden, job.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(job)
        self.mlp = LlamaMlp(job)
        self.input_layernorm = nn.RMSNorm(job.hidden, eps=1e-5)
        self.post_attention_layernorm = nn.RMSNorm(job.hidden, eps=1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """``LlamaForCausalLM``, or with biases of queries, keys and values ``Qwen2ForCausalLM``."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        embedding = nn.Embedding(job.padded_vocabulary, job.hidden)
        self.model: Any = nn.ModuleDict(
            {
                "embed_tokens": embedding,
                "layers": nn.ModuleList(LlamaBlock(job) for _ in range(job.layers)),
                "norm": nn.RMSNorm(job.hidden, eps=1e-5),
            }
        )
        self.lm_head = nn.Linear(job.hidden, job.padded_vocabulary, bias=False)
        if job.is_tied:
            self.lm_head.weight = embedding.weight

    def forward(self, tokens: Tokens, labels: Tokens) -> torch.Tensor:
        x = self.model["embed_tokens"](tokens)
        for block in self.model["layers"]:
            x = block(x)
        return entropy(self.lm_head(self.model["norm"](x)), labels)


def model_of(job: Job) -> nn.Module:
    return Llama(job) if job.is_rotary else Gpt2(job)


def samples(job: Job, step: int) -> tuple[Tokens, Tokens]:
    """Return the inputs and labels of a global batch, as ``tiny_gpt`` draws them."""
    rows = []
    for number in range(job.global_batch_size):
        generator = torch.Generator().manual_seed(1_000_003 * step + number)
        start, stride = torch.randint(1, job.vocabulary, (2,), generator=generator)
        rows.append((start + stride * torch.arange(job.sequence + 1)) % job.vocabulary)
    tokens = torch.stack(rows)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Schedule:
    """Megatron's learning rate and weight decay by step, as ``tiny_gpt`` sets them."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.last_epoch = optimizer, 0
        self._set()

    def step(self) -> None:
        self.last_epoch += 1
        self._set()

    def _set(self) -> None:
        step, warmup, end = self.last_epoch, 2, 20
        rate = 1e-2 * step / warmup
        if step > warmup:
            cosine = math.cos(math.pi * (step - warmup) / (end - warmup))
            rate = 1e-3 + 0.5 * (cosine + 1.0) * (1e-2 - 1e-3)
        for group, decays in zip(self.optimizer.param_groups, (1.0, 0.0), strict=True):
            group["lr"] = rate
            group["weight_decay"] = (0.01 + step / end * (0.1 - 0.01)) * decays

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_epoch = state["last_epoch"]


def engine_of(job: Job, stage: int, world: int) -> Any:
    import deepspeed

    model = model_of(job)
    members: list[list[nn.Parameter]] = [[], []]
    for parameter in model.parameters():
        members[parameter.ndim < 2].append(parameter)
    optimizer = torch.optim.AdamW([{"params": of} for of in members], lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": job.global_batch_size // world,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": job.clip,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        **PRECISIONS[job.precision],
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=Schedule(optimizer), config=config
    )
    return engine
