"""Ways to cut a model over ranks, and the passes that each may have: of these one is chosen."""

from collections.abc import Iterator
from dataclasses import replace

from scalai.core.degrees.degrees import DegreeRequest
from scalai.core.degrees.passes import MICRO_BATCHES
from scalai.core.degrees.policy import Case


def splits(case: Case, most: int, least: int) -> Iterator[DegreeRequest]:
    """Yield TP and PP to try, of ``least`` to ``most`` ranks a replica, the kept ones first.

    Where heads or layers are unknown, only divisors of what ran are safe.
    """
    kept, limits = case.kept, case.limits
    fixed = case.policy.kept_axes
    tps = [kept.tp] if "tp" in fixed else _divisors(limits.num_attention_heads or kept.tp)
    is_uneven = limits.first_stage_layers is not None or limits.last_stage_layers is not None
    is_known = limits.num_layers is not None and not is_uneven and "pp" not in fixed
    layers = (limits.num_layers or 0) + limits.extra_layers
    pps = _divisors(layers) if is_known else [kept.pp]
    has_all_stages = is_known and case.policy.freedom.is_free("virtual-stages", for_memory=False)
    pairs = dict.fromkeys([(kept.tp, kept.pp), *((tp, pp) for tp in tps for pp in pps)])
    for tp, pp in pairs:
        if least <= tp * pp <= most:
            stages = [kept.vpp, 1] if pp > 1 else [1]
            if has_all_stages and pp > 1:
                stages += _divisors(layers // pp)
            for vpp in dict.fromkeys(stages):
                yield DegreeRequest(tp, pp, vpp=vpp)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def with_passes(case: Case, split: DegreeRequest, *, for_memory: bool) -> Iterator[DegreeRequest]:
    """Yield a split with each of the passes that it may have, the script's own first."""
    freedom, own = case.policy.freedom, case.own.micro_batch_size
    micros: list[int | None] = [None]
    if own is not None and freedom.is_free("micro-batch", for_memory=for_memory):
        most = MICRO_BATCHES if freedom.is_free("micro-batch", for_memory=False) else own
        batch = case.limits.global_batch_size or own
        micros += [size for size in range(most, 0, -1) if batch % size == 0 and size != own]
    for recompute in freedom.recomputes(for_memory=for_memory):
        for micro in micros:
            yield replace(split, micro_batch_size=micro, recompute=recompute)


def smaller(case: Case, splits: Iterator[DegreeRequest]) -> Iterator[DegreeRequest]:
    """Yield the splits; after an out-of-memory each also with the passes that need less memory."""
    recompute = case.policy.freedom.recomputes(for_memory=True)[-1]
    own = case.own.micro_batch_size or 1
    for split in splits:
        yield split
        if not case.excluded:
            continue
        for request in with_passes(case, split, for_memory=True):
            is_less = request.micro_batch_size is None or request.micro_batch_size < own
            if request.recompute == recompute and is_less and request != split:
                yield request


def after_failure(case: Case, request: DegreeRequest) -> int:
    """Return in which turn a split comes after an out-of-memory: larger TP·PP, then passes that
    need less memory, then what is left. Where nothing has failed all come in one."""
    if request.micro_batch_size is not None or request.recompute is not None:
        return 1
    return 2 if request.tp * request.pp <= case.failed else 0
