"""A T5 of a few thousand parameters on megatron-core."""

from typing import Any

import torch
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.T5.t5_spec import (
    get_t5_decoder_with_local_block_spec,
    get_t5_encoder_with_local_block_spec,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from support.training.jobs import Job


def translator(job: Job, config: TransformerConfig) -> T5Model:
    """Build a T5 with as many layers in the encoder as in the decoder."""
    return T5Model(
        config,
        config,
        get_t5_encoder_with_local_block_spec(job.layers),
        get_t5_decoder_with_local_block_spec(job.layers),
        job.padded_vocabulary,
        job.sequence,
        share_embeddings_and_output_weights=job.is_tied,
    )


def translate(model: Any, tokens: torch.Tensor, labels: torch.Tensor, causal: torch.Tensor) -> Any:
    """Return the losses of a sequence that is translated into its continuation."""
    everything = torch.zeros_like(causal)
    return model(tokens, tokens, everything, causal, everything, lm_labels=labels)
