"""Megatron-LM's command line, read as its parser reads it; what is appended to it wins."""

import argparse
from dataclasses import replace

import pytest

from scalai.converters.megatron.arguments import (
    MegatronArguments,
    derived_flags,
    is_megatron,
    read_arguments,
)
from scalai.converters.megatron.model_shape import more_recompute_of, offload_of, recompute_of
from scalai.core.degrees.degrees import DegreeRequest, Degrees, ModelLimits, refusal
from scalai.core.degrees.passes import Offload, Recompute
from scalai.core.errors import RefusedError, UsageError

GPT = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --lr 1e-3 "
    "--micro-batch-size 2 --global-batch-size 24 --vocab-size 50257"
)

SPILLED = "--use-precision-aware-optimizer --optimizer-cpu-offload --optimizer-offload-fraction"


def read(flags: str = "") -> MegatronArguments:
    return read_arguments(f"{GPT} {flags}".split())


def derive(flags: str, degrees: Degrees, micro: int | None = None) -> str:
    return " ".join(derived_flags(read(flags), degrees, 50304, micro)[0])


def test_limits_and_degrees_are_read() -> None:
    arguments = read("--tensor-model-parallel-size 2 --pipeline-model-parallel-size=2 --swiglu")
    assert arguments.initial == DegreeRequest(2, 2, cp=1, ep=1, micro_batch_size=2)
    assert arguments.limits == ModelLimits(
        num_attention_heads=8,
        num_layers=8,
        global_batch_size=24,
        micro_batch_size=2,
        seq_length=32,
        qkv_rows=192,
        ffn_hidden_size=128,
        has_uneven_shares=True,
        has_uneven_stages=True,
        fixed=(("cp", 1, "another split of sequences is not supported"),),
    )


def test_the_last_occurrence_wins_in_either_spelling() -> None:
    arguments = read("--num-layers=12 --num-layers 16 --tensor-model-parallel-size 4 "
                     "--tensor-model-parallel-size=1")  # fmt: skip
    assert (arguments.limits.num_layers, arguments.initial.tp) == (16, 1)


def test_abbreviations_are_another_flag_as_in_megatrons_parser() -> None:
    assert read("--tensor-model-parallel 4").initial.tp == 1


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ("--group-query-attention --num-query-groups 2", "num_query_groups", 2),
        ("--num-query-groups 2", "num_query_groups", None),
        ("--multi-latent-attention --group-query-attention --num-query-groups 2",
         "num_query_groups", None),
        ("--ffn-hidden-size 100", "ffn_hidden_size", 100),
        ("", "ffn_hidden_size", 256),
        ("--padded-vocab-size 50432", "padded_vocab_size", 50432),
        ("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
         "extra_layers", 2),
        ("--sequence-parallel", "is_sequence_parallel", True),
        ("--num-experts 4", "is_sequence_parallel", True),
        ("--num-experts 4", "num_experts", 4),
        ("--expert-tensor-parallel-size 1", "expert_tp", 1),
        ("--rampup-batch-size 8 8 100", "ramp_batch_sizes", (8, 16)),
        ("--step-batch-size-schedule 0:12 1B:24", "ramp_batch_sizes", (12,)),
        ("--eval-global-batch-size 6", "eval_batch_size", 6),
        ("--eval-global-batch-size 6 --eval-micro-batch-size 1", "eval_batch_size", None),
        ("--num-distributed-optimizer-instances 2", "optimizer_instances", 2),
        ("--no-overlap-p2p-communication", "min_pp_with_vpp", 3),
        ("--pipeline-model-parallel-layout Et*4|t*4L --pipeline-model-parallel-size 2",
         "own_stages", (2, 1)),
        ("--pipeline-model-parallel-layout Ettt|tttttL --pipeline-model-parallel-size 1",
         "own_stages", (1, 2)),
        ("--decoder-last-pipeline-num-layers 2 --pipeline-model-parallel-size 2",
         "own_stages", (2, 0)),
        ("--hybrid-layer-pattern M|M", "num_layers", None),
        ("--dataloader-type cyclic --num-experts 4", "has_uneven_shares", True),
        ("--dataloader-type external", "has_uneven_shares", False),
        ("--moe-router-load-balancing-type global_aux_loss", "has_uneven_shares", False),
        ("--step-batch-size-schedule 0:12 1B:24", "has_uneven_shares", False),
        ("--cuda-graph-impl local", "has_uneven_shares", False),
        ("--account-for-loss-in-pipeline-split --mtp-num-layers 1", "has_uneven_stages", True),
        ("--decoder-num-layers 8 --encoder-num-layers 8", "has_uneven_stages", False),
        ("--overlap-param-gather-with-optimizer-step", "has_uneven_stages", False),
        ("--hybrid-layer-pattern MMMM", "has_uneven_stages", False),
    ],
)  # fmt: skip
def test_each_limit_is_read(flags: str, field: str, value: object) -> None:
    assert getattr(read(flags).limits, field) == value


def test_virtual_stages_are_counted_from_either_flag() -> None:
    pipeline = "--pipeline-model-parallel-size 2 "
    assert read(pipeline + "--num-layers-per-virtual-pipeline-stage 2").initial.vpp == 2
    assert read(pipeline + "--num-virtual-stages-per-pipeline-rank 4").initial.vpp == 4


def test_every_fault_is_named_at_once() -> None:
    with pytest.raises(RefusedError, match=r"(?s)--inprocess-restart.*--use-torch-fsdp2"):
        read("--use-torch-fsdp2 --inprocess-restart")


def test_a_global_batch_that_would_follow_dp_is_refused() -> None:
    with pytest.raises(RefusedError, match="--global-batch-size is not given"):
        read_arguments(["--micro-batch-size", "2"])


def test_cyclic_data_without_sharding_passes() -> None:
    read("--dataloader-type cyclic --no-data-sharding")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--num-layers many", "--num-layers has 'many' behind it"),
        ("--num-layers --seq-length 3", "--num-layers has 'nothing' behind it"),
        ("--rampup-batch-size 8 8", "8 8 is no batch-size ramp"),
        ("--rampup-batch-size 8 7 100", "cannot grow from 8 to 24 by 7"),
        ("--rampup-batch-size 24 8 100", "begins with the final batch of 24"),
        ("--rampup-batch-size 8 8 0", "0 samples; use 1 or more"),
        ("--step-batch-size-schedule 768", "'768' is no THRESHOLD:SIZE"),
        ("--step-batch-size-schedule 1K:8", "the first threshold must be 0"),
        ("--step-batch-size-schedule 0:8,0:16", "no other may be there twice"),
        ("--step-batch-size-schedule 0:0", "every size must be 1 or more"),
        ("--pipeline-model-parallel-layout Et*8xL", "'x' is no layer"),
        ("--pipeline-model-parallel-layout Et*7L", "has 7 layers, --num-layers says 8"),
        ("--pipeline-model-parallel-layout t*8L", "the first layer must be E"),
        ("--pipeline-model-parallel-layout Et*8mL", "has 1 m, --mtp-num-layers says 0"),
        ("--pipeline-model-parallel-layout Et*8L --decoder-last-pipeline-num-layers 2",
         "both say what stages have"),
        ("--pipeline-model-parallel-layout (t*9999)*9999", "beyond all models"),
        ("--pipeline-model-parallel-layout Et*8L --num-virtual-stages-per-pipeline-rank 2",
         "both say what stages have"),
        ("--decoder-first-pipeline-num-layers 2 --account-for-loss-in-pipeline-split",
         "cannot count as layers beside it"),
        ("--decoder-first-pipeline-num-layers 2 --num-layers-per-virtual-pipeline-stage 1",
         "are then stated by --num-virtual-stages-per-pipeline-rank"),
    ],
)  # fmt: skip
def test_a_malformed_value_is_named(flags: str, why: str) -> None:
    with pytest.raises((UsageError, RefusedError), match=why):
        read(flags)


@pytest.mark.parametrize(
    ("flags", "degrees", "why"),
    [
        ("--context-parallel-size 2", Degrees(1, 1, 2), "cp=1 must stay 2"),
        ("--tp-comm-overlap --sequence-parallel", Degrees(1, 1, 1), "--tp-comm-overlap needs"),
        ("--distribute-saved-activations", Degrees(1, 1, 1), "--distribute-saved-activations"),
        ("--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 3",
         Degrees(1, 3, 1), "the 2 middle stages do not divide the 5 layers"),
        ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3",
         Degrees(1, 9, 1), "pp=9 is more than num_layers=8"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*3|t*5L",
         Degrees(1, 2, 1, vpp=2), "pp=2 has vpp=1 by the script's own layout of stages"),
        ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3 "
         "--overlap-param-gather-with-optimizer-step", Degrees(1, 4, 1), "pp=4 must stay 2"),
        ("--rampup-batch-size 8 8 100", Degrees(1, 1, 12), "ramp-up batch size=8"),
        ("--eval-global-batch-size 6", Degrees(1, 1, 4), "dp=4 does not divide the evaluation's"),
        ("--eval-global-batch-size 12 --num-virtual-stages-per-pipeline-rank 2",
         Degrees(1, 4, 2, vpp=2), "3 micro-batches a replica of the evaluation"),
        ("--num-distributed-optimizer-instances 2", Degrees(1, 1, 3), "do not divide dp*cp=3"),
        ("--num-distributed-optimizer-instances 2 --num-experts 4 "
         "--expert-model-parallel-size 4", Degrees(1, 1, 4, ep=4),
         "1 data-parallel replicas of the experts"),
        ("--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-size 4 "
         "--overlap-param-gather-with-optimizer-step", Degrees(1, 1, 1), "vpp=1 must stay 2"),
    ],
)  # fmt: skip
def test_degrees_that_the_flags_do_not_allow_are_not_valid(
    flags: str, degrees: Degrees, why: str
) -> None:
    assert why in str(refusal(degrees, read(flags).limits))


def test_degrees_and_the_divisor_of_the_vocabulary_are_derived() -> None:
    assert derive("", Degrees(2, 4, 1)) == (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 "
        "--make-vocab-size-divisible-by 25152"
    )


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_derived_divisor_gives_the_same_padded_vocabulary(tp: int) -> None:
    flags = derived_flags(read(), Degrees(tp, 1, 1), 50304)[0]
    multiple = int(flags[flags.index("--make-vocab-size-divisible-by") + 1]) * tp
    assert -(-50257 // multiple) * multiple == 50304  # _vocab_size_with_padding


def test_before_the_first_start_the_vocabulary_is_left_as_given() -> None:
    flags, notes = derived_flags(read(), Degrees(2, 1, 1), None)
    assert "--make-vocab-size-divisible-by" not in flags
    assert any(note.startswith("--make-vocab-size-divisible-by") for note in notes)


def test_a_pinned_vocabulary_must_be_the_jobs() -> None:
    assert "vocab" not in derive("--padded-vocab-size 50304", Degrees(2, 1, 1))
    with pytest.raises(RefusedError, match="Give --padded-vocab-size 50304"):
        derive("--padded-vocab-size 50432", Degrees(2, 1, 1))
    with pytest.raises(RefusedError, match="tp=5 does not divide"):
        derive("", Degrees(5, 1, 1))


@pytest.mark.parametrize(
    ("flags", "degrees", "derived"),
    [
        ("--num-layers-per-virtual-pipeline-stage 2", Degrees(1, 2, 1, vpp=2), "-stage 2"),
        ("--num-layers-per-virtual-pipeline-stage 2", Degrees(1, 4, 1, vpp=2), "-stage 1"),
        ("--num-layers-per-virtual-pipeline-stage 2", Degrees(1, 1, 1), "-stage 8"),
        ("--num-virtual-stages-per-pipeline-rank 2", Degrees(1, 1, 1), "-rank 1"),
        ("", Degrees(1, 2, 1, vpp=2), "--num-virtual-stages-per-pipeline-rank 2"),
        ("", Degrees(1, 3, 1), "--pipeline-model-parallel-layout Ett|ttt|tttL"),
        ("--num-virtual-stages-per-pipeline-rank 2", Degrees(1, 3, 1, vpp=2),
         "--pipeline-model-parallel-layout Et|t|tt|t|tt|tL"),
        ("--mtp-num-layers 1 --untie-embeddings-and-output-weights", Degrees(1, 3, 1),
         "--pipeline-model-parallel-layout Ettt|ttt|ttmL"),
        ("--mtp-num-layers 1", Degrees(1, 2, 1), "--make-vocab-size-divisible-by 50304"),
        ("--account-for-loss-in-pipeline-split", Degrees(1, 3, 1),
         "--make-vocab-size-divisible-by 50304"),
        ("--account-for-loss-in-pipeline-split", Degrees(1, 2, 1), "-layout Etttt|ttttL"),
        ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3",
         Degrees(1, 2, 1), "--make-vocab-size-divisible-by 50304"),
        ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3",
         Degrees(1, 4, 1), "-layout Ett|tt|tt|ttL"),
        ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3",
         Degrees(1, 1, 1), "-layout EttttttttL"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*3|t*5L",
         Degrees(1, 2, 2), "--make-vocab-size-divisible-by 50304"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*3|t*5L",
         Degrees(1, 4, 2), "-layout Ett|tt|tt|ttL"),
    ],
)  # fmt: skip
def test_virtual_stages_are_derived_by_the_flag_in_use(
    flags: str, degrees: Degrees, derived: str
) -> None:
    assert derive(flags, degrees).endswith(derived)


def test_chunks_of_one_whole_stage_turn_the_interleaved_schedule_off() -> None:
    derived = derive("--num-layers-per-virtual-pipeline-stage 2", Degrees(1, 4, 1))
    assert derived.endswith("--num-layers-per-virtual-pipeline-stage 2")  # 8 / 4: one chunk
    kept = (
        "--num-layers-per-virtual-pipeline-stage 2 --account-for-loss-in-pipeline-split "
        "--overlap-param-gather-with-optimizer-step"
    )
    with pytest.raises(RefusedError, match="cannot be derived for TP1·PP2·DP1"):
        derive(kept, Degrees(1, 2, 1))


def test_micro_batch_experts_and_chunk_groups_are_derived() -> None:
    assert "--micro-batch-size" not in derive("", Degrees(1, 1, 1), micro=2)
    assert "--micro-batch-size 4" in derive("", Degrees(1, 1, 1), micro=4)
    experts = derive("--num-experts 4 --expert-model-parallel-size 4", Degrees(2, 1, 2, ep=2))
    assert "--expert-model-parallel-size 2" in experts
    assert "--sequence-parallel" in experts
    group = "--microbatch-group-size-per-virtual-pipeline-stage 3"
    assert group in derive(group, Degrees(1, 2, 1, vpp=2))
    assert group.replace("3", "4") in derive(group, Degrees(1, 4, 1, vpp=2))


@pytest.mark.fault
@pytest.mark.parametrize(
    ("flags", "dp", "batch", "derived"),
    [
        ("--step-batch-size-schedule 0:24", 2, 8, "--eval-global-batch-size 8"),
        ("--step-batch-size-schedule 0:24", 8, 8,
         "--eval-global-batch-size 8 --eval-micro-batch-size 1"),
        ("--step-batch-size-schedule 0:24", 2, None, ""),
        ("--global-batch-size 24", 2, 8, ""),
        ("--global-batch-size 24 --eval-global-batch-size 12", 4, None,
         "--eval-micro-batch-size 1"),
        ("--global-batch-size 24 --eval-global-batch-size 12", 3, None, ""),
        ("--global-batch-size 24 --eval-global-batch-size 12 --eval-micro-batch-size 3", 4,
         None, ""),
    ],
)  # fmt: skip
def test_an_evaluation_keeps_the_samples_of_its_steps(
    flags: str, dp: int, batch: int | None, derived: str
) -> None:
    base = GPT.replace("--global-batch-size 24", flags)
    arguments = read_arguments(base.split())
    found = derived_flags(arguments, Degrees(1, 1, dp), 50304, eval_batch_size=batch)[0]
    assert " ".join(found[4:-2]) == derived


@pytest.mark.parametrize(
    ("recompute", "flags"),
    [
        (None, ""),
        ("none", ""),
        ("selective", "--recompute-granularity selective"),
        ("full", "--recompute-granularity full --recompute-method uniform "
         "--recompute-num-layers 1"),
    ],
)  # fmt: skip
def test_what_is_computed_again_is_said_by_flags_behind_all_others(
    recompute: Recompute | None, flags: str
) -> None:
    found = derived_flags(read(), Degrees(1, 2, 1), None, 1, recompute=recompute)[0]
    assert " ".join(found[4:]) == f"--micro-batch-size 1 {flags}".strip()


@pytest.mark.parametrize(
    ("offload", "release", "flags"),
    [
        (None, (0, 16, 1), ""),
        ("optimizer-half", (0, 14, 0), f"{SPILLED} 0.5"),
        ("optimizer", (0, 16, 1), f"{SPILLED} 1.0 --overlap-cpu-optimizer-d2h-h2d"),
        ("optimizer", None, f"{SPILLED} 1.0"),
    ],
)
def test_what_goes_to_host_memory_is_said_by_flags_behind_all_others(
    offload: Offload | None, release: tuple[int, int, int] | None, flags: str
) -> None:
    job = replace(read("--bf16 --use-distributed-optimizer"), release=release)
    found = derived_flags(job, Degrees(1, 2, 1), None, 1, offload=offload)[0]
    assert " ".join(found[4:]) == f"--micro-batch-size 1 {flags}".strip()


@pytest.mark.parametrize(
    ("fraction", "own"), [("", "optimizer"), ("0.5", "optimizer-half"), ("0.3", "none")]
)
def test_what_the_script_itself_has_in_host_memory_is_known(fraction: str, own: Offload) -> None:
    stated = f"--optimizer-offload-fraction {fraction}" if fraction else ""
    assert offload_of(read(f"{SPILLED.rsplit(' ', 1)[0]} {stated}")) == own


@pytest.mark.parametrize(
    ("flags", "own", "more"),
    [
        ("", "none", ("full",)),
        ("--transformer-impl local", "none", ("selective", "full")),
        ("--transformer-impl local --recompute-granularity selective", "selective", ("full",)),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2", "full",
         ()),
    ],
)  # fmt: skip
def test_more_can_be_computed_again_and_never_less(
    flags: str, own: Recompute, more: tuple[Recompute, ...]
) -> None:
    assert recompute_of(read(flags)) == own
    assert more_recompute_of(read(flags)) == more


def test_what_cannot_be_derived_is_named() -> None:
    flags = "--sequence-parallel --use-checkpoint-args --recompute-num-layers 2"
    _, notes = derived_flags(read(flags), Degrees(1, 1, 2), 50304)
    assert [note.partition(":")[0] for note in notes] == [
        "--recompute-num-layers",
        "--use-checkpoint-args",
        "--sequence-parallel",
    ]


def test_appended_flags_win_in_argparse() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    appended = derived_flags(read(), Degrees(2, 1, 1), None)[0]
    argv = ["--tensor-model-parallel-size=4", *appended]
    assert parser.parse_known_args(argv)[0].tensor_model_parallel_size == 2


def test_only_megatrons_arguments_are_taken_for_its() -> None:
    assert is_megatron(GPT.split())
    assert is_megatron(["--tensor-model-parallel-size", "2"])
    assert not is_megatron(["--lr", "1", "--micro-batch-size", "2"])
    assert not is_megatron([])


def test_a_stated_group_of_micro_batches_stays_where_the_batch_goes_with_it() -> None:
    """10 micro-batches on 4 stages go in fives, as Megatron-LM's own tests have it."""
    flags = (
        "--num-layers 12 --num-attention-heads 8 --micro-batch-size 1 --global-batch-size 20 "
        "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 3 "
        "--microbatch-group-size-per-virtual-pipeline-stage 5"
    )
    arguments = read_arguments(flags.split())
    # 4 micro-batches on 4 stages: one of each at once.
    groups = {
        Degrees(1, 4, 2, vpp=3): "5",
        Degrees(1, 2, 1, vpp=3): "5",
        Degrees(1, 4, 5, vpp=3): "4",
    }
    for degrees, group in groups.items():
        assert refusal(degrees, arguments.limits) is None
        assert _group_for(arguments, degrees) == group
    assert "10 micro-batches" in str(
        refusal(Degrees(1, 4, 2, vpp=3), replace(arguments.limits, chunk_group=4))
    )
    # Also where virtual stages may not change.
    fixed = read_arguments([*flags.split(), "--overlap-param-gather-with-optimizer-step"])
    assert ("vpp", 3) in {(axis, size) for axis, size, _ in fixed.limits.fixed}
    assert _group_for(fixed, Degrees(1, 4, 5, vpp=3)) == "4"


def _group_for(arguments: MegatronArguments, degrees: Degrees) -> str:
    derived = derived_flags(arguments, degrees, None)[0]
    return derived[derived.index("--microbatch-group-size-per-virtual-pipeline-stage") + 1]
