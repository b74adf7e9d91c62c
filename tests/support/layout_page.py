"""The table of layouts in docs/offline.md, made from the converters' own answers:
``python tests/support/layout_page.py`` writes it between its marks."""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scalai.converters.checkpoint import PARAM
from scalai.converters.layouts import LAYOUTS, READ_ALONE
from scalai.converters.reshard_request import PreparedReshard, ReshardRequest, prepare
from scalai.core.errors import ScalaiError
from scalai.core.tensors.collection import Tensor, split_name
from support.checkpoints import GPT_ARGUMENTS, GPT_GROUPS, carry, state
from support.gpt_shapes import GROUPS, HEADS, llama
from support.local_files import localise

PAGE = Path(__file__).parents[2] / "docs" / "offline.md"
BEGIN = "<!-- Made by `python tests/support/layout_page.py`: -->\n"
END = "<!-- End. -->\n"

JOB = f"""
[megatron]
num_attention_heads = {HEADS}
lr = 0.01
global_batch_size = 4
train_iters = 20
[deepspeed.config]
gradient_clipping = 1.0
[[deepspeed.group]]
"""
ALIKE = ("deepspeed_zero2", "deepspeed_zero3")
"""As deepspeed_zero1: left out."""
MARKS = {(): "", ("mapping",): " M", ("args_from",): " A", ("mapping", "args_from"): " MA"}
"""Options of a conversion, in the order in which they are tried."""


def page() -> str:
    """The whole page, with the table as the converters answer now."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    with tempfile.TemporaryDirectory() as directory:
        table = "\n".join(_lines(Path(directory)))
    return f"{before}{BEGIN}\n{table}\n\n{END}{rest.partition(END)[2]}"


def _lines(directory: Path) -> Iterator[str]:
    known = [layout.name for layout in LAYOUTS if layout.name not in ALIKE]
    names = [name for name in known if name not in READ_ALONE]
    sources = _sources(directory, names)
    localise(sources["torch_dist"], directory / "megatron_local")
    sources["megatron_local"] = directory / "megatron_local"
    yield "| from \\ to | " + " | ".join(f"`{name}`" for name in names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    reasons: dict[str, int] = {}
    for name in known:
        cells = [_cell(sources[name], to, directory, reasons) for to in names]
        yield f"| `{name}` | " + " | ".join(cells) + " |"
    yield ""
    for reason, number in reasons.items():
        yield f"{number}. {reason}"


def _sources(directory: Path, names: Sequence[str]) -> dict[str, Path]:
    """Write a training of a Llama in every layout, in ``dcp`` and DeepSpeed's as their own jobs."""
    made = state(shapes=llama(layers=1))
    arguments = {
        **GPT_ARGUMENTS, "num_attention_heads": HEADS, "group_query_attention": True,
        "num_query_groups": GROUPS, "swiglu": True, **made.values.counters,
    }  # fmt: skip
    values = replace(made.values, param_groups=GPT_GROUPS, arguments=arguments)
    carry(replace(made, values=values), directory / "torch_dist")
    (directory / "job.toml").write_text(JOB)
    found = {"torch_dist": directory / "torch_dist"}
    for name in names:
        if name not in found:
            options = list(MARKS) if name != "dcp" else [("mapping",)]
            _, prepared = _first(found["torch_dist"], name, directory, options, directory / name)
            prepared.conversion.run()
            found[name] = directory / name
    return found


def _cell(source: Path, to: str, directory: Path, reasons: dict[str, int]) -> str:
    try:
        options, prepared = _first(source, to, directory, list(MARKS), directory / "new")
    except ScalaiError as error:
        text = str(error).replace(f"{directory}/", "")
        return f"no ({reasons.setdefault(text, len(reasons) + 1)})"
    kept = _kinds(prepared.conversion.target.placed.collection.tensors)
    return ("exact" if kept - {PARAM} else "weights") + MARKS[options]


def _kinds(tensors: Sequence[Tensor]) -> set[str]:
    return {split_name(tensor.name)[0] for tensor in tensors}


def _first(
    source: Path, to: str, directory: Path, tried: Sequence[tuple[str, ...]], new: Path
) -> tuple[tuple[str, ...], PreparedReshard]:
    """Return the fewest options with which a conversion may run, and the conversion."""
    known: dict[str, Any] = {"mapping": "llama", "args_from": directory / "job.toml"}
    refusal: ScalaiError | None = None
    for options in tried:
        given = {name: known[name] for name in options}
        try:
            prepared = prepare(ReshardRequest(source, new, layout=to, **given))
            assert prepared.conversion.work
        except ScalaiError as error:
            refusal = error
        else:
            return options, prepared
    assert refusal is not None
    raise refusal


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE} is written\n")
