"""What the tests train: a value that says it all, so that only the workers import megatron."""

from collections.abc import Sequence
from dataclasses import dataclass

from scalai.core.degrees.passes import Recompute

SEED, OTHER_SEED = 1234, 4321
"""A fresh job starts from other weights: one that is not written cannot be right by luck."""
BEFORE, AFTER = range(0, 3), range(3, 6)


@dataclass(frozen=True, slots=True)
class Job:
    """A model, how it is trained, and its layout. ``dp`` follows from the number of ranks."""

    world: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    sequence_parallel: bool = False
    optimizer: str = "adam"
    distributed: bool = False
    overlap: bool = False
    """Overlap communication, which makes several buckets."""
    is_fsdp: bool = False
    """Under Megatron-FSDP."""
    instances: int = 1
    """Copies of the distributed optimizer's state, each over a part of the replicas."""
    offloaded: float = 0.0
    """Share of masters and moments on the host, kept by the optimizer itself."""
    is_fused: bool = False
    """Its Adam counts steps once a group, as FusedAdam."""
    precision: str = "fp32"
    layers: int = 4
    hidden: int = 32
    heads: int = 4
    query_groups: int | None = None
    is_gated: bool = False
    experts: int | None = None
    router: str = "aux_loss"
    """How the load of experts is balanced."""
    is_lawless: bool = False
    """Nothing says which of its degrees have to stay."""
    top_k: int = 2
    balance: float = 0.0
    """Coefficient of the balancing loss."""
    capacity: float | None = None
    """Of an expert, in its share of the tokens."""
    expert_layers: tuple[int, ...] | None = None
    """1 for each layer that has experts; None: all have."""
    has_expert_bias: bool = False
    predicted: int = 0
    """Layers that predict further tokens (MTP)."""
    padded_vocabulary: int = 64
    vocabulary: int = 61
    is_tied: bool = True
    is_rotary: bool = False
    """As Llama: rotary positions, RMSNorm."""
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    is_latent: bool = False
    """With latent attention (MLA)."""
    frozen: str | None = None
    """A pattern of parameters' names: they are not trained."""
    lora: int = 0
    """Rank of adapters beside the linear layers."""
    is_translator: bool = False
    """A T5: an encoder beside the decoder."""
    sequence: int = 16
    dropout: float = 0.0
    jitter: float | None = None
    """Of what a router sees."""
    proves: bool = False
    """Before the first step behind the resize a further one is made without random numbers."""
    clip: float = 1.0
    global_batch_size: int = 4
    micro_batch_size: int = 1
    recompute: Recompute = "none"
    loss_scale: float = 2.0**12


def mean_losses(by_rank: Sequence[Sequence[dict[int, float]]]) -> list[float]:
    """Return each step's mean loss over the global batch, added up in the order of the samples."""
    means = []
    for step in zip(*by_rank, strict=True):
        samples = {number: loss for part in step for number, loss in part.items()}
        means.append(sum(samples[number] for number in sorted(samples)) / len(samples))
    return means
