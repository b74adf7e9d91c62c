"""A DeepSpeed job that trains a model of ``hugging_models`` on Megatron's samples."""

from typing import Any

from support.training import deepspeed_jobs, jobs
from support.training.hugging_models import engine_of, samples


def run(job: "deepspeed_jobs.Job", meeting: str) -> dict[str, Any]:
    """Train all steps and save in between and at the end; or load and train those that are left."""
    import torch
    import torch.distributed as dist

    assert job.gpt is not None
    gpt = jobs.Job(**job.gpt)
    deepspeed_jobs.join(job, meeting)
    torch.manual_seed(jobs.SEED if job.load is None else jobs.OTHER_SEED)
    engine = engine_of(gpt, job.stage, job.world)
    seen: dict[str, Any] = {"losses": []}
    if job.load is not None:
        path, _ = engine.load_checkpoint(job.load)
        assert path is not None, f"nothing was loaded from {job.load}"
        assert engine.global_steps == jobs.AFTER.start
        seen["groups"] = [
            [group[name] for name in ("lr", "betas", "eps", "weight_decay")]
            for group in engine.optimizer.param_groups
        ]
        seen["samples"] = engine.global_samples
        seen["scale"] = deepspeed_jobs.describe_scale(engine.optimizer)["scale"]
    for step in range(engine.global_steps, jobs.AFTER.stop):
        tokens, labels = (part.chunk(job.world)[dist.get_rank()] for part in samples(gpt, step))
        loss = engine(tokens, labels)
        engine.backward(loss)
        engine.step()
        total = loss.detach().float().clone()
        dist.all_reduce(total)
        seen["losses"].append(total.item() / job.world)
        if job.save is not None and step + 1 in (jobs.AFTER.start, jobs.AFTER.stop):
            engine.save_checkpoint(job.save, save_latest=step + 1 == jobs.AFTER.start)
    dist.barrier()
    dist.destroy_process_group()
    return seen
