"""Megatron's own attention for latent attention (MLA), on a machine without Transformer Engine.

Up to megatron-core 0.19 it does not take the widths of keys and values. It asks for neither where
``kv_channels`` is that of the values.
"""

from typing import Any

from megatron.core.models import backends
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention


class LatentCore(DotProductAttention):
    def __init__(
        self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **more: Any
    ) -> None:
        super().__init__(*args, **more)
        assert v_channels in (None, self.config.kv_channels)


def install() -> None:
    """Have the layers of Megatron's own modules made with it."""
    backends.DotProductAttention = LatentCore
    # It is true there without Transformer Engine too, whose classes are then no classes.
    multi_latent_attention.HAVE_TE = isinstance(multi_latent_attention.TELinear, type)
