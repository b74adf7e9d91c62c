"""The shape of a transformer, and the numbers of parameters of its parts."""

from dataclasses import dataclass, fields

from scalai.core.errors import UsageError

MOST_LAYERS, LARGEST = 100_000, 10**9


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of parameters by part. Those of layers are of one layer."""

    attention: int
    norms: int
    mlp: int
    router: int
    expert: int
    """One expert; the layer has ``experts`` of them."""
    shared_expert: int
    embedding: int
    positions: int
    final_norm: int
    head: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Numbers of parameters of a part of the model.

    Attributes:
        cut: Parameters cut by tensor parallelism.
        whole: Parameters whole on each TP rank: norms, routers, biases behind a cut sum.
    """

    cut: int
    whole: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer.

    Attributes:
        ffn: Width of the feed-forward part of a dense layer.
        kv_groups: Heads of keys and values.
        vocab: Rows of the embedding, with padding.
        positions: Rows of a learned position embedding; 0: none.
        is_gated: Whether the feed-forward part has a gate beside its first matrix (SwiGLU).
        is_tied: Whether the head is the embedding.
        has_bias: Whether linear layers have biases.
        has_qkv_bias: Whether that of queries, keys and values has one although others have not.
        has_norm_bias: Layer norm has one, RMS norm has none.
        experts: Routed experts of a layer; 0: the layers are dense.
        moe_layers: How many layers have experts.
        top_k: Experts that a token goes to.
        shared_ffn: Width of what all tokens go through beside the routed experts.

    Raises:
        UsageError: Sizes that contradict each other.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    kv_groups: int
    head_dim: int
    positions: int = 0
    is_gated: bool = False
    is_tied: bool = True
    has_bias: bool = True
    has_qkv_bias: bool = False
    has_norm_bias: bool = True
    experts: int = 0
    moe_layers: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "ffn", "vocab", "seq", "kv_groups", "head_dim"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)} of the model is not 1 or more.")
        largest = max(fields(self), key=lambda field: int(getattr(self, field.name))).name
        if getattr(self, largest) > LARGEST or self.layers > MOST_LAYERS:
            raise UsageError(
                f"layers={self.layers}, {largest}={getattr(self, largest)}: no model has more than "
                f"{MOST_LAYERS} layers, or a size above {LARGEST}."
            )
        if min(getattr(self, field.name) for field in fields(self)) < 0:
            raise UsageError("a size of the model is negative; use 0 or more.")
        if self.heads % self.kv_groups:
            raise UsageError(
                f"kv_groups={self.kv_groups} does not divide heads={self.heads}; use a divisor."
            )
        if self.experts and not (0 < self.top_k <= self.experts and self.expert_ffn):
            raise UsageError(
                f"{self.experts} experts need top_k of 1 to {self.experts} and expert_ffn; found "
                f"top_k={self.top_k}, expert_ffn={self.expert_ffn}."
            )
        if self.moe_layers > self.layers or bool(self.moe_layers) != bool(self.experts):
            raise UsageError(
                f"{self.moe_layers} of {self.layers} layers have {self.experts} experts; state "
                "both, or neither."
            )

    @property
    def parameters(self) -> Parameters:
        """Exact numbers by part, with biases and norms."""
        hidden, bias = self.hidden, int(self.has_bias)
        norm = hidden * (1 + self.has_norm_bias)
        queries, keys = self.heads * self.head_dim, self.kv_groups * self.head_dim
        qkv = (queries + 2 * keys) * (hidden + (self.has_bias or self.has_qkv_bias))
        return Parameters(
            attention=qkv + hidden * (queries + bias),
            norms=2 * norm,
            mlp=self._feed_forward(self.ffn),
            router=(hidden + bias) * self.experts,
            expert=self._feed_forward(self.expert_ffn) if self.experts else 0,
            shared_expert=self._feed_forward(self.shared_ffn) if self.shared_ffn else 0,
            embedding=self.vocab * hidden,
            positions=self.positions * hidden,
            final_norm=norm,
            head=0 if self.is_tied else self.vocab * hidden,
        )

    @property
    def dense_layer(self) -> Cut:
        """A layer without experts."""
        part, bias = self.parameters, self.hidden * self.has_bias
        return Cut(part.attention + part.mlp - 2 * bias, part.norms + 2 * bias)

    @property
    def expert_layer(self) -> Cut:
        """A layer with experts, but for the routed ones."""
        part, bias = self.parameters, self.hidden * self.has_bias
        biases = bias * (1 + bool(self.shared_ffn))
        cut = part.attention + part.shared_expert - biases
        return Cut(cut, part.norms + part.router + biases)

    @property
    def expert(self) -> Cut:
        """One routed expert, which the experts' tensor parallelism cuts."""
        bias = self.hidden * self.has_bias * bool(self.experts)
        return Cut(self.parameters.expert - bias, bias)

    def _feed_forward(self, width: int) -> int:
        first, bias = width * (1 + self.is_gated), int(self.has_bias)
        return first * (self.hidden + bias) + self.hidden * (width + bias)

    @property
    def total_parameters(self) -> int:
        """Parameters of the whole model, each counted once."""
        part, dense = self.parameters, self.layers - self.moe_layers
        moe = part.router + self.experts * part.expert + part.shared_expert
        layers = self.layers * (part.attention + part.norms)
        layers += dense * part.mlp + self.moe_layers * moe
        return layers + part.embedding + part.positions + part.final_norm + part.head
