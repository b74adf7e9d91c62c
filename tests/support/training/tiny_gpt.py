"""A GPT of a few thousand parameters on megatron-core, in any layout that four ranks allow."""

# CPU emulation has to start before megatron is imported.
# ruff: noqa: E402

import gc
import importlib
import logging
import re
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from scalai.patches.megatron import cpu_emulation

warnings.filterwarnings("ignore")  # megatron's own, about what a CPU machine lacks
logging.getLogger("megatron").setLevel(logging.ERROR)
cpu_emulation.install()

import torch
import torch._dynamo  # the first optimizer would import it: here once for all workers
import torch.distributed as dist
from megatron.core import num_microbatches_calculator as microbatches
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from scalai.core.job.function_proof import Numbers
from scalai.patches.megatron.bare_step import SKIPPED, BareStep, NormInDouble
from scalai.patches.megatron.megatron_state import MegatronState
from scalai.patches.megatron.shapes import unwrap
from support.training import fused_adam, latent_core
from support.training.jobs import AFTER, SEED, Job
from support.training.tiny_muon import muon_optimizer
from support.training.tiny_t5 import translate, translator

latent_core.install()
torch.set_num_threads(1)

ONE_BUCKET, SEVERAL_BUCKETS = 10**9, 2000
LATENT: dict[str, Any] = {
    "q_lora_rank": 12, "kv_lora_rank": 8, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8, "rope_type": "rope",
}  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Training:
    """One rank of a job: builds it, trains it, takes it down."""

    def __init__(self, job: Job, rank: int, store: dist.Store, seed: int) -> None:
        self.job = job
        self.skipped: list[int] = []
        self.norms: list[float | None] = []
        self.bare: Numbers | None = None
        dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world)
        parallel_state.initialize_model_parallel(
            job.tp,
            job.pp,
            virtual_pipeline_model_parallel_size=job.vpp,
            expert_model_parallel_size=job.ep,
            num_distributed_optimizer_instances=job.instances,
        )
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)
        self.dp = parallel_state.get_data_parallel_world_size()
        microbatches.destroy_num_microbatches_calculator()
        microbatches.init_num_microbatches_calculator(
            rank, None, job.global_batch_size, job.micro_batch_size, self.dp
        )
        config = _transformer(job)
        self.chunks = [_chunk(job, config, stage) for stage in range(job.vpp or 1)]
        config.finalize_model_grads_func = finalize_model_grads
        if job.overlap:
            functions = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = functions if job.vpp else functions[0]
        fused_adam.use(job.is_fused)
        make = muon_optimizer if job.optimizer == "muon" else get_megatron_optimizer
        self.optimizer = make(_optimizer(job), self.chunks)
        if job.precision != "fp32":
            config.grad_scale_func = self.optimizer.scale_loss
        self.scheduler = _scheduler(job, self.optimizer)

    def train(self, steps: range) -> list[dict[int, float]]:
        """Train; return each step's loss by sample, on the last stage's first tensor rank."""
        return [self._train_step(step) for step in steps]

    def state(self) -> MegatronState:
        state = MegatronState(self.chunks, self.optimizer, self.scheduler, seed=SEED)
        if self.job.is_lawless:
            state._fixed = frozenset()
        return state

    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def close(self) -> None:
        """Take the job down, so that another layout can be built in this process."""
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        del self.chunks, self.optimizer, self.scheduler
        gc.collect()

    def draw_own(self) -> float:
        """Draw from this tensor-parallel rank's own stream."""
        with get_cuda_rng_tracker().fork():
            return float(torch.rand(1).item())

    def get_args(self) -> Any:
        """As of the module ``megatron.training.training``."""
        return SimpleNamespace(bf16=self.job.precision == "bf16", fp16=self.job.precision == "fp16")

    def _train_step(self, step: int) -> dict[int, float]:
        iterators = [self._samples(step) for _ in self.chunks]
        given = {
            "forward_step_func": _forward,
            "data_iterator": iterators if self.job.vpp else iterators[0],
            "model": self.chunks,
            "optimizer": self.optimizer,
            "opt_param_scheduler": self.scheduler,
            "config": None,
            "forward_backward_func": get_forward_backward_func(),
        }
        bare = None
        if self.job.proves and step == AFTER.start:
            bare = BareStep(self, self._step, given)
            logged = _logged()
            self.bare = bare.make(is_first=True)
            assert _logged() == logged, "the losses of experts are logged once"
        with NormInDouble(self.optimizer) as exact:
            result = bare.real() if bare is not None else self._step(**given)
        self.norms.append(exact.norm)
        if result[SKIPPED]:
            self.skipped.append(step)
        if parallel_state.get_tensor_model_parallel_rank():
            return {}
        return {
            sample: float(loss)
            for number, entry in enumerate(self._losses)
            for sample, loss in zip(self._numbers(number), entry["losses"], strict=True)
        }

    def _step(
        self, forward_step_func: Any, data_iterator: Any, model: Any, optimizer: Any,
        opt_param_scheduler: Any, config: Any, forward_backward_func: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        """As ``train_step`` of Megatron-LM."""
        machine = get_rerun_state_machine()
        while machine.should_run_forward_backward(data_iterator):
            for chunk in model:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            self._losses = forward_backward_func(
                forward_step_func=forward_step_func,
                data_iterator=data_iterator,
                model=model,
                num_microbatches=microbatches.get_num_microbatches(),
                seq_length=self.job.sequence,
                micro_batch_size=self.job.micro_batch_size,
                decoder_seq_length=self.job.sequence,
                forward_only=False,
            )
        is_updated, norm, _ = optimizer.step()
        if is_updated:
            opt_param_scheduler.step(increment=self.job.global_batch_size)
        means = [entry["losses"].mean() for entry in self._losses]
        told = {"lm loss": torch.stack(means).mean()} if means else {}
        return told, int(not is_updated), False, False, 0, norm, None, 0

    def _numbers(self, number: int) -> range:
        """Return which samples of the global batch this replica's micro-batch has, in megatron's
        order (``MegatronPretrainingSampler``)."""
        size, dp_rank = self.job.micro_batch_size, parallel_state.get_data_parallel_rank()
        first = (number * self.dp + dp_rank) * size
        return range(first, first + size)

    def _samples(self, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield this replica's micro-batches in megatron's order; a sample depends on the step."""
        for number in range(microbatches.get_num_microbatches()):
            samples = [self._sample(step, sample) for sample in self._numbers(number)]
            tokens = torch.stack(samples)
            yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _sample(self, step: int, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1_000_003 * step + number)
        start, stride = torch.randint(1, self.job.vocabulary, (2,), generator=generator)
        return (start + stride * torch.arange(self.job.sequence + 1)) % self.job.vocabulary


def _logged() -> dict[str, Any]:
    tracker = get_moe_layer_wise_logging_tracker()
    return {name: entry["values"].tolist() for name, entry in tracker.items()}


def _forward(samples: Iterator[tuple[torch.Tensor, torch.Tensor]], model: Any) -> Any:
    tokens, labels = next(samples)
    length = tokens.shape[1]
    mask = torch.triu(torch.ones(length, length), 1).bool()[None, None]
    is_translator = hasattr(unwrap(model), "encoder")

    def loss(output: torch.Tensor) -> Any:
        by_sample = output.float().mean(dim=1)
        return by_sample.mean(), {"losses": by_sample.detach().clone()}

    if is_translator:
        return translate(model, tokens, labels, mask), loss
    positions = torch.arange(length).expand_as(tokens)
    return model(tokens, positions, mask, labels=labels), loss


def _transformer(job: Job) -> TransformerConfig:
    dtype = DTYPES[job.precision]
    kind = MLATransformerConfig if job.is_latent else TransformerConfig
    return kind(
        **(LATENT if job.is_latent else {}),
        num_layers=job.layers,
        hidden_size=job.hidden,
        num_attention_heads=job.heads,
        num_query_groups=job.query_groups,
        hidden_dropout=job.dropout,
        attention_dropout=job.dropout,
        moe_input_jitter_eps=job.jitter,
        gated_linear_unit=job.is_gated,
        activation_func=torch.nn.functional.silu if job.is_gated else torch.nn.functional.gelu,
        add_bias_linear=not job.is_gated and not job.experts,
        add_qkv_bias=job.has_qkv_bias,
        normalization="RMSNorm" if job.is_rotary else "LayerNorm",
        num_moe_experts=job.experts,
        moe_layer_freq=list(job.expert_layers) if job.expert_layers else 1,
        moe_router_enable_expert_bias=job.has_expert_bias,
        moe_router_score_function="sigmoid" if job.has_expert_bias else "softmax",
        qk_layernorm=job.has_qk_norm,
        mtp_num_layers=job.predicted or None,
        moe_router_topk=job.top_k,
        moe_router_load_balancing_type=job.router,
        moe_aux_loss_coeff=job.balance,
        moe_expert_capacity_factor=job.capacity,
        moe_token_dispatcher_type="alltoall" if job.experts else "allgather",
        tensor_model_parallel_size=job.tp,
        pipeline_model_parallel_size=job.pp,
        virtual_pipeline_model_parallel_size=job.vpp,
        expert_model_parallel_size=job.ep,
        sequence_parallel=job.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=job.precision == "bf16",
        fp16=job.precision == "fp16",
        attention_softmax_in_fp32=True,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        deallocate_pipeline_outputs=True,
        recompute_granularity=None if job.recompute == "none" else job.recompute,
        recompute_method="uniform" if job.recompute == "full" else None,
        recompute_num_layers=1 if job.recompute == "full" else None,
        batch_p2p_comm=not job.vpp,
        overlap_p2p_comm=bool(job.vpp),
    )


def _gpt(job: Job, config: TransformerConfig, stage: int) -> GPTModel:
    where = {"ignore_virtual": False, "vp_stage": stage} if job.vpp else {}
    at = stage if job.vpp else None
    layer: Any = get_gpt_layer_local_spec(
        job.experts,
        qk_layernorm=job.has_qk_norm,
        multi_latent_attention=job.is_latent,
        normalization=config.normalization,
    )
    if job.expert_layers:
        layer = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=config.normalization, vp_stage=at
        )
    predicted = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False, vp_stage=at)
    return GPTModel(
        config,
        layer,
        job.padded_vocabulary,
        job.sequence,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        share_embeddings_and_output_weights=job.is_tied,
        position_embedding_type="rope" if job.is_rotary else "learned_absolute",
        vp_stage=at,
        mtp_block_spec=predicted,
    )


def _chunk(job: Job, config: TransformerConfig, stage: int) -> Any:
    model: Any = translator(job, config) if job.is_translator else _gpt(job, config, stage)
    if job.lora:
        importlib.import_module("support.training.adapted").add_adapters(model, config, job.lora)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = job.frozen is None or not re.search(job.frozen, name)
    if job.is_fsdp:
        return importlib.import_module("support.training.megatron_fsdp").wrapped(job, config, model)
    if job.precision != "fp32":
        model = Float16Module(config, model)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=job.distributed,
        num_distributed_optimizer_instances=job.instances,
        overlap_grad_reduce=job.overlap,
        overlap_param_gather=job.overlap and job.distributed,
        bucket_size=SEVERAL_BUCKETS if job.overlap else ONE_BUCKET,
        check_for_nan_in_grad=job.precision != "fp16",
    )
    return DistributedDataParallel(config, ddp, model)


def _optimizer(job: Job) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="sgd" if job.optimizer == "sgd" else "adam",
        lr=1e-2,
        min_lr=1e-3,
        weight_decay=0.01,
        clip_grad=job.clip,
        bf16=job.precision == "bf16",
        fp16=job.precision == "fp16",
        params_dtype=DTYPES[job.precision],
        use_distributed_optimizer=job.distributed,
        use_precision_aware_optimizer=job.offloaded > 0,
        optimizer_cpu_offload=job.offloaded > 0,
        optimizer_offload_fraction=job.offloaded,
        initial_loss_scale=job.loss_scale if job.precision == "fp16" else None,
        loss_scale_window=2,
        hysteresis=1,
    )


def _scheduler(job: Job, optimizer: Any) -> OptimizerParamScheduler:
    samples = 20 * job.global_batch_size
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-3,
        lr_warmup_steps=2 * job.global_batch_size,
        lr_decay_steps=samples,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.1,
        wd_incr_steps=samples,
        wd_incr_style="linear",
    )
