"""The training configurations of Megatron-LM's own functional tests, as command lines, and what
that checkout's own ``parse_args`` and ``validate_args`` say of others.

As a program: reads a JSON list of ``[world size, arguments]`` and writes a JSON list of what is
wrong with each, or null.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANKS = 8
"""Ranks a host."""
DEADLINE_S = 1800.0
_SCRIPTS = {
    "bert": "examples/bert/pretrain_bert.py",
    "hybrid": "pretrain_hybrid.py",
    "mimo": "examples/mimo/train.py",
    "multimodal-llava": "pretrain_vlm.py",
    "nemotron": "pretrain_hybrid.py",
    "t5": "examples/t5/pretrain_t5.py",
}
"""Scripts by the folder of a configuration; the others are pretrain_gpt.py's."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One ``model_config.yaml``: its folder, the script that it is for, and that script's flags."""

    name: str
    script: str
    flags: tuple[str, ...]

    @property
    def world_size(self) -> int:
        """Ranks that it asks for at least, in whole hosts."""
        given = dict(zip(self.flags, self.flags[1:], strict=False))
        axes = ("tensor-model", "pipeline-model", "context")
        sizes = [int(given.get(f"--{axis}-parallel-size", "1")) for axis in axes]
        experts = int(given.get("--expert-model-parallel-size", "1"))
        expert_tp = int(given.get("--expert-tensor-parallel-size", str(sizes[0])))
        least = max(sizes[0] * sizes[2], expert_tp * experts) * sizes[1]
        return -(-least // RANKS) * RANKS


def training_configurations(checkout: Path) -> Iterator[Configuration]:
    """Yield those that train with one of the scripts (no inference, no reinforcement learning, not
    by NeMo's command)."""
    import yaml

    folder = checkout / "tests" / "functional_tests" / "test_cases"
    for path in sorted(folder.rglob("model_config.yaml")):
        content = yaml.safe_load(path.read_text())
        model = path.parts[-3]
        arguments = content.get("MODEL_ARGS") or {}
        if content.get("MODE", "pretraining") != "pretraining" or model == "gpt-nemo":
            continue
        if not {"--train-iters", "--train-samples"} & set(arguments):
            continue
        script = str(checkout / _SCRIPTS.get(model, "pretrain_gpt.py"))
        flags = tuple(word for key, value in arguments.items() for word in _words(key, value))
        yield Configuration(f"{model}/{path.parts[-2]}", script, flags)


def _words(key: str, value: Any) -> list[str]:
    """Return a flag as shell_test_utils/_run_training.sh puts it on the command line."""
    if value is True or value == "true":
        return [key]
    text = re.sub(r"\$\{?\w+\}?", "/data", _text(value).replace("${REPEAT}", "1")).strip()
    if text.startswith("[") and text.endswith("]"):
        return [key, *shlex.split(text[1:-1])]
    if re.fullmatch(r"\d+( \d+)+", text):
        return [key, *text.split()]  # the shell would pass one word, which no parser takes
    # What is left of two levels of escapes: the script reads a line, and evaluates it.
    word = re.sub(r"\\(.)", r"\1", " ".join(shlex.split(text)))
    return [key, word] if text else [key]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return f"[{' '.join(map(str, value))}]"
    return str(value)


def faults_of(checkout: Path, cases: Sequence[tuple[int, Sequence[str]]]) -> list[str | None]:
    """Return what the checkout's own checks find wrong with each command line, None: nothing."""
    answer = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps([[world, list(flags)] for world, flags in cases]),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        cwd=checkout,
    )
    assert answer.returncode == 0, answer.stderr[-4000:]
    return list(json.loads(answer.stdout.splitlines()[-1]))


def _check_all() -> None:
    cases = json.load(sys.stdin)
    reported = sys.stdout
    sys.stdout = sys.stderr  # Megatron-LM prints
    import wrapt

    from scalai.patches.megatron import cpu_emulation, shares

    cpu_emulation.install()
    cpu_emulation.install_training()
    shares.install()
    from megatron.training import arguments

    wrapt.wrap_function_wrapper(arguments, "validate_args", shares.check_args)

    # Nine tenths of the time went into making the same parser anew.
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    arguments.add_megatron_arguments = lambda fresh: parser
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    os.environ["NCCL_ALGO"] = "Ring"  # as the configurations themselves set it for determinism
    found: list[str | None] = []
    for world, flags in cases:
        os.environ["WORLD_SIZE"] = str(world)
        sys.argv = ["pretrain", *flags]
        try:
            parsed = arguments.parse_args(ignore_unknown_args=True)
            arguments.validate_args(parsed, {"tokenizer_type": "GPT2BPETokenizer"})
            found.append(None)
        except (Exception, SystemExit) as error:
            found.append(f"{type(error).__name__}: {error}")
    print(json.dumps(found), file=reported)


if __name__ == "__main__":
    _check_all()
