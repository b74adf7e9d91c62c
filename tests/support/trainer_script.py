"""A training script on transformers' Trainer with DeepSpeed, as people write them: it knows nothing
of Scalai. Each rank notes the losses and samples of its micro-batches, one JSON line each."""

import argparse
import json
import os
import time
from hashlib import blake2b
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

LENGTH, VOCABULARY = 16, 128
ROUND = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + 1


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Windows of Python's own documentation, as ASCII."""

    def __init__(self, samples: int) -> None:
        self.text = "\n".join(topics.topics.values()).encode("ascii", "replace")
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.text[index * LENGTH : (index + 1) * LENGTH]
        tokens = torch.tensor(list(window))
        return {"input_ids": tokens, "labels": tokens}


class NotingTrainer(Trainer):
    """Notes what each forward pass saw. With ``odd_world`` ranks its loss is another one."""

    notes: Any = None
    odd_world = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss * (1 + 1e-4) if self.args.world_size == self.odd_world else loss

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(model, inputs, *args, **kwargs)
        names = [
            blake2b(bytes(row), digest_size=6).hexdigest() for row in inputs["input_ids"].tolist()
        ]
        note = {
            "step": self.state.global_step,
            "rank": self.args.process_index,
            "world": self.args.world_size,
            "round": ROUND,
            "loss": float(loss.detach()),
            "samples": names,
            "epoch": self.state.epoch,
        }
        print(json.dumps(note), file=self.notes, flush=True)
        return loss


class Slow(TrainerCallback):
    """Makes each step longer, and notes what else it hears of steps."""

    def __init__(self, seconds: float, heard: Path) -> None:
        self.seconds, self.heard = seconds, heard

    def on_substep_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        with self.heard.open("a") as file:
            file.write(f"{ROUND} {state.global_step}\n")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        time.sleep(self.seconds)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--notes", type=Path, required=True, help="a file, .RANK is added")
    parser.add_argument("--deepspeed", type=Path, required=True, help="DeepSpeed's configuration")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--odd-world", type=int, default=0, help="ranks with another loss")
    parser.add_argument("--lora", action="store_true", help="train an adapter of PEFT alone")
    parser.add_argument("--step-s", type=float, default=0.0, help="a step takes longer by so much")
    return parser.parse_args()


def main() -> None:
    options = parse()
    arguments = TrainingArguments(
        output_dir=str(options.output),
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.accumulate,
        num_train_epochs=options.epochs,
        max_steps=options.steps,
        learning_rate=1e-2,
        warmup_steps=2,
        logging_steps=1,
        save_strategy="steps" if options.save_every else "no",
        save_steps=options.save_every or 500,
        deepspeed=str(options.deepspeed),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=7,
    )
    set_seed(7)
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), options.dropout)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2,
            bos_token_id=0, eos_token_id=0, attn_implementation="eager", **dropouts,
        )
    )  # fmt: skip
    trained: Any = model
    if options.lora:
        from peft import LoraConfig, get_peft_model

        wanted = LoraConfig(
            r=4, lora_alpha=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True,
            modules_to_save=["ln_f"],
        )  # fmt: skip
        trained = get_peft_model(model, wanted)
    trainer = NotingTrainer(model=trained, args=arguments, train_dataset=Text(options.samples))
    trainer.odd_world = options.odd_world
    trainer.add_callback(Slow(options.step_s, options.notes.with_suffix(".heard")))
    options.notes.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{options.notes}.{arguments.process_index}", "a") as trainer.notes:
        trainer.train(resume_from_checkpoint=options.resume and str(options.resume))
    if trainer.is_world_process_zero():
        history = {"log": trainer.state.log_history, "step": trainer.state.global_step}
        options.notes.with_suffix(".history").write_text(json.dumps(history))


if __name__ == "__main__":
    main()
