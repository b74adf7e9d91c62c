"""What is refused of DeepSpeed's layouts, and with which words."""

import os
import shutil
from pathlib import Path
from typing import Any

from scalai.converters.torch_archive import NewTensor
from support.checkpoints import deepspeed_state, write
from support.damage import (
    View,
    age,
    change_tree,
    compress,
    link_outside,
    make_complex,
    merge,
    plant,
    write_view,
)
from support.rejects import Case, rename, report_version, spoil, with_nan

TAG = "global_step3"
WHOLE = "mp_rank_00_model_states.pt"
FIRST = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
SECOND = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
PART = "zero_pp_rank_1_mp_rank_00_model_states.pt"


def on(change: Any, name: str, tag: str = TAG) -> Any:
    """Return a damage of one file of a tag."""
    return rename(lambda at: change(at / tag / name), f"{change.__name__}_{Path(name).name}")


def lose(name: str, tag: str = TAG) -> Any:
    return rename(lambda at: (at / tag / name).unlink(), f"lose_{Path(name).name}")


def copy(name: str, to: str) -> Any:
    def copy_there(at: Path) -> None:
        shutil.copy(at / TAG / name, at / TAG / to)

    return rename(copy_there, f"copy_to_{to}")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def lose_a_weight(path: Path) -> None:
    name = "decoder.final_layernorm.weight"
    change_tree(path, lambda tree: {
        **tree, "module": {k: v for k, v in tree["module"].items() if k != name}
    })  # fmt: skip


def shorten_the_masters(path: Path) -> None:
    def shorten(tree: Any) -> Any:
        state = tree["optimizer_state_dict"]
        key = "fp32_flat_groups" if "fp32_flat_groups" in state else (
            "single_partition_of_fp32_groups"
        )  # fmt: skip
        masters = [NewTensor("F32", (t.shape[0] - 1,), t.content[:-4]) for t in state[key]]
        return {**tree, "optimizer_state_dict": {**state, key: masters}}

    change_tree(path, shorten)


def claim_another_world(path: Path) -> None:
    def claim(tree: Any) -> Any:
        state = tree["optimizer_state_dict"]
        counts = state["partition_count"]
        count = [3] * len(counts) if isinstance(counts, list) else 3
        return {**tree, "optimizer_state_dict": {**state, "partition_count": count}}

    change_tree(path, claim)


def repeat_elements(path: Path) -> None:
    write_view(path, {"optimizer_state_dict": View((1 << 50, 4), (0, 1))})


def make_a_size_negative(path: Path) -> None:
    write_view(path, {"optimizer_state_dict": View((-4,), (1,))})


def with_config(key: str, value: Any, section: str | None = None) -> Any:
    """Return what puts a value under a key of the stored configuration."""

    def change(path: Path) -> None:
        def put(tree: Any) -> Any:
            config = dict(tree["ds_config"] or {})
            if section is None:
                config[key] = value
            else:
                config[section] = {**config.get(section, {}), key: value}
            return {**tree, "ds_config": config}

        change_tree(path, put)

    return rename(change, f"with_{key}")


def settings(model: str, tag: str = TAG) -> list[Case]:
    """Cases of the stored configuration."""
    logged = f"{model}: ds_config has "
    sub_group = "zero_optimization.sub_group_size = 'abc', and a number that is not negative is"
    return [
        Case("setting", on(with_config(*given), model, tag), logged + words)
        for given, words in (
            (("sub_group_size", "abc", "zero_optimization"), sub_group),
            (("zero_optimization", [1]), "zero_optimization = [1], and a table is expected"),
            (("gradient_clipping", float("nan")), "gradient_clipping = nan, and a number"),
            (("bf16", "yes"), "bf16 = 'yes', and a table is expected"),
        )
    ]


def of_another_step(layout: str, name: str) -> Any:
    def damage(directory: Path) -> None:
        other = directory.parent / "other"
        write(other, layout, deepspeed_state(step=6), dp=2)
        shutil.copy(other / "global_step6" / name, directory / TAG / name)

    return rename(damage, f"of_another_step_{name}")


def common(model: str) -> list[Case]:
    """Cases of all stages with ranks of their own."""
    return [
        *settings(model),
        Case("path", on(link_outside, SECOND), "is a link to outside"),
        Case("dtype", on(make_complex, SECOND), "of an unknown kind"),
        Case("shape", on(make_a_size_negative, SECOND), "a tensor [-4] reaches beyond its"),
        Case("hole", on(lose_a_weight, model), "trains decoder.final_layernorm.weight and has no"),
        Case("hole", on(shorten_the_masters, SECOND), "are expected of these parameters"),
        Case(
            "duplicate", copy(FIRST, "zero_pp_rank_00_mp_rank_00_optim_states.pt"),
            "files of two checkpoints are mixed",
        ),
        Case("missing file", lose(FIRST), "has no file of data-parallel rank 0 (of 2"),
        Case("truncated", on(cut, SECOND), f"{SECOND} is damaged or truncated"),
        Case("bomb", on(compress, SECOND), "is compressed; torch stores plainly"),
        Case("bomb", on(repeat_elements, SECOND), "reaches beyond its storage of 16 bytes"),
        Case(
            "count", copy(FIRST, "zero_pp_rank_99999999999_mp_rank_00_optim_states.pt"),
            "has no file of data-parallel rank 2",
        ),
        Case("digest", spoil("exp_avg/decoder.final_layernorm.weight"), "says was written", 4),
        Case("world", on(claim_another_world, SECOND), "is one of"),
        Case("suspect", with_nan, "nothing but NaN", 0),
        Case("version", on(age, SECOND), "is of version 99 of torch's format"),
        Case("version", report_version, "scalai.json is of version 99"),
        Case("code", on(plant, SECOND), "os.system, which no checkpoint"),
    ]  # fmt: skip


ZERO = [
    *common(WHOLE),
    Case("missing file", lose(SECOND), "was saved by 2 data-parallel ranks, and has optim_states"),
    Case("missing file", lose(WHOLE), "a rank's file is missing"),
    Case("duplicate", copy(WHOLE, "mp_rank_000_model_states.pt"), "has 2 mp_rank_*"),
    Case(
        "extra file", copy(FIRST, "zero_pp_rank_2_mp_rank_00_optim_states.pt"),
        "was saved by 2 data-parallel ranks, and has optim_states.pt of 3",
    ),
    Case("iterations", of_another_step("deepspeed_zero1", SECOND), "has made 6.0 optimizer steps"),
    Case("iterations", of_another_step("deepspeed_zero1", WHOLE), "is of step 6"),
]  # fmt: skip
ZERO_3 = [
    *common(PART),
    Case("missing file", lose(SECOND), "a rank's file is missing"),
    Case("missing file", lose(PART), "a rank's file is missing"),
    Case(
        "extra file", copy(FIRST, "zero_pp_rank_2_mp_rank_00_optim_states.pt"),
        "a rank's file is missing",
    ),
    Case("iterations", of_another_step("deepspeed_zero3", SECOND), "has made 6.0 optimizer steps"),
    Case("iterations", of_another_step("deepspeed_zero3", PART), "is of step 6"),
]  # fmt: skip
ZERO_NOT = {
    "overlap": "files say no places: they follow from shapes, and sizes must fit exactly",
    "run": "nothing in it says of which job it is",
}


def lose_a_moment(path: Path) -> None:
    def lose_one(tree: Any) -> Any:
        inner = tree["optimizer"]
        state = {key: value for key, value in inner["state"].items() if key != 1}
        return {**tree, "optimizer": {**inner, "state": state}}

    change_tree(path, lose_one)


ZERO_0 = [
    *settings(WHOLE),
    Case("path", on(link_outside, WHOLE), "is a link to outside"),
    Case("dtype", on(make_complex, WHOLE), "of an unknown kind"),
    Case("shape", on(make_a_size_negative, WHOLE), "a tensor [-4] reaches beyond its"),
    Case("hole", on(lose_a_moment, WHOLE), "parameter 1 of the optimizer has no state"),
    Case("hole", on(lose_a_weight, WHOLE), "no assignment to those of the module is possible"),
    Case("extra file", copy(WHOLE, "mp_rank_000_model_states.pt"), "has 2 mp_rank_*"),
    Case("truncated", on(cut, WHOLE), f"{WHOLE} is damaged or truncated"),
    Case("bomb", on(compress, WHOLE), "is compressed; torch stores plainly"),
    Case("bomb", on(repeat_elements, WHOLE), "reaches beyond its storage of 16 bytes"),
    Case("digest", spoil("exp_avg/decoder.final_layernorm.weight"), "says was written", 4),
    Case("iterations", of_another_step("deepspeed_zero0", WHOLE), "is of step 6"),
    Case("suspect", with_nan, "nothing but NaN", 0),
    Case("version", on(age, WHOLE), "is of version 99 of torch's format"),
    Case("version", report_version, "scalai.json is of version 99"),
    Case("code", on(plant, WHOLE), "os.system, which no checkpoint"),
]
ZERO_0_NOT = {
    "overlap": "every tensor is whole",
    "duplicate": "one file, whose dictionaries have a key once",
    "missing file": "one file: without it there is no checkpoint",
    "count": "nothing in it is counted",
    "world": "every rank is equal, and one file holds all",
    "run": "nothing in it says of which job it is",
}

UNIVERSAL_TAG = f"{TAG}_universal"
WEIGHT = "zero/decoder.final_layernorm.weight"


def at(change: Any, name: str) -> Any:
    return on(change, name, UNIVERSAL_TAG)


def other_shape(path: Path) -> None:
    merge(path, {"param": NewTensor("F32", (5,), bytes(20))})


def negative_shape(path: Path) -> None:
    write_view(path, {"param": View((-4,), (1,))})


def repeated_view(path: Path) -> None:
    write_view(path, {"param": View((1 << 50, 4), (0, 1))})


def another_step(path: Path) -> None:
    change_tree(path, lambda tree: NewTensor("F32", (), b"\0\0\xc0\x40"))


def add_a_parameter(directory: Path) -> None:
    zero = directory / UNIVERSAL_TAG / "zero"
    shutil.copytree(directory / UNIVERSAL_TAG / WEIGHT, zero / "decoder.stray.weight")


def mix_the_model(directory: Path) -> None:
    merge(directory / UNIVERSAL_TAG / WHOLE, {"global_steps": 6})


def claim_ranks(directory: Path) -> None:
    """As of stage 3, where each rank has a file."""
    (directory / UNIVERSAL_TAG / WHOLE).unlink()
    path = directory / UNIVERSAL_TAG / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    merge(path, {"dp_world_size": 1 << 40})


UNIVERSAL = [
    *settings(WHOLE, UNIVERSAL_TAG),
    Case("path", at(link_outside, f"{WEIGHT}/fp32.pt"), "is a link to outside"),
    Case("dtype", at(make_complex, f"{WEIGHT}/fp32.pt"), "of an unknown kind"),
    Case("shape", at(negative_shape, f"{WEIGHT}/fp32.pt"), "a tensor [-4] reaches beyond its"),
    Case("hole", at(other_shape, f"{WEIGHT}/fp32.pt"), "Files of two checkpoints are mixed"),
    Case("hole", at(lose_a_weight, WHOLE), "trains decoder.final_layernorm.weight and has no"),
    Case("missing file", lose(f"{WEIGHT}/fp32.pt", UNIVERSAL_TAG), "the conversion to universal"),
    Case("missing file", lose("zero/optimizer_state.pt", UNIVERSAL_TAG), "no checkpoint of a"),
    Case("extra file", add_a_parameter, "has zero/decoder.stray.weight, and no such parameter"),
    Case("truncated", at(cut, f"{WEIGHT}/exp_avg.pt"), "exp_avg.pt is damaged or truncated"),
    Case("bomb", at(compress, f"{WEIGHT}/fp32.pt"), "is compressed; torch stores plainly"),
    Case("bomb", at(repeated_view, f"{WEIGHT}/fp32.pt"), "reaches beyond its storage of 16"),
    Case("count", claim_ranks, "was made of 1099511627776 data-parallel ranks"),
    Case("world", claim_ranks, "and has model_states.pt of 1"),
    Case("digest", spoil("exp_avg/decoder.final_layernorm.weight"), "says was written", 4),
    Case("iterations", at(another_step, f"{WEIGHT}/step.pt"), "unequally many optimizer steps"),
    Case("iterations", mix_the_model, "is of step 6"),
    Case("suspect", with_nan, "nothing but NaN", 0),
    Case("version", at(age, f"{WEIGHT}/fp32.pt"), "is of version 99 of torch's format"),
    Case("version", report_version, "scalai.json is of version 99"),
    Case("code", at(plant, f"{WEIGHT}/fp32.pt"), "os.system, which no checkpoint"),
]
UNIVERSAL_NOT = {
    "overlap": "every tensor is whole in a file of its own",
    "duplicate": "a folder has one name",
    "run": "nothing in it says of which job it is",
}
