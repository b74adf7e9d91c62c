"""Megatron-LM's own pretrain_gpt.py, the first argument, whose passes take a while: three times as
long on the host named by a file, the second one. Each is noted with its host and step."""

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import wrapt

PASS_S = 0.02


def note_pass(slow: Path, step: int) -> None:
    """Note a pass, and take its time."""
    host = Path(os.environ["SCALAI_AGENT"]).parent.name
    with slow.with_name("passes").open("a") as file:
        file.write(f"{host} {step}\n")
    time.sleep(PASS_S * (3 if slow.read_text() == host else 1))


def passes_of(slow: Path, step: int) -> dict[str, int]:
    """Return the passes of each host in a step."""
    lines = [line.split() for line in slow.with_name("passes").read_text().splitlines()]
    hosts = [host for host, of in lines if int(of) == step]
    return {host: hosts.count(host) for host in sorted(set(hosts))}


def hook(module: Any, slow: Path) -> None:
    def forward(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        from megatron.training import get_args

        if instance.training:
            note_pass(slow, get_args().curr_iteration + 1)
        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(module, "GPTModel.forward", forward)


if __name__ == "__main__":
    script, slow_file = sys.argv.pop(1), Path(sys.argv.pop(1))
    name = "megatron.core.models.gpt.gpt_model"
    wrapt.register_post_import_hook(lambda module: hook(module, slow_file), name)
    runpy.run_path(script, run_name="__main__")
