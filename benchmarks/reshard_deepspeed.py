"""The job whose checkpoint ``reshard.py`` makes universal: linear layers under ZeRO-1, in bf16."""

import argparse
import os
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True, help="of 12 hidden² parameters each")
    parser.add_argument("--save", type=Path, required=True)
    options = parser.parse_args()
    import deepspeed
    import torch

    deepspeed.ops.__compatible_ops__.clear()  # nothing is compiled
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(1)
    hidden = options.hidden
    blocks = [torch.nn.Linear(hidden, hidden) for _ in range(12 * options.layers)]
    model = torch.nn.Sequential(*blocks)
    world = int(os.environ["WORLD_SIZE"])
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        config={
            "train_batch_size": world,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        },
    )
    loss = engine(torch.randn(1, hidden, dtype=torch.bfloat16)).float().square().mean()
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint(str(options.save))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
