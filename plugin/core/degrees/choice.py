"""Chooses a job's degrees on the available ranks.

:func:`choose` alone decides. The user's degrees come first, then the order of the job's planner
(``planner/preference.py``), then the running degrees. Micro-batch and recomputation are the
script's, unless the user frees them or memory forces others (``passes.Freedom``). State goes to
host memory only where no layout fits without.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace

from scalai.core.degrees.batches import Shares
from scalai.core.degrees.degrees import (
    DegreeRequest,
    Degrees,
    ModelLimits,
    divisors,
    refusal,
    spill_refusal,
    stage_counts,
)
from scalai.core.degrees.passes import (
    AS_GIVEN,
    MEMORY_PARTS,
    MICRO_BATCHES,
    OFFLOADS,
    Passes,
    difference,
)
from scalai.core.degrees.policy import Case, Choice, DegreePolicy
from scalai.core.errors import RefusedError, ScalaiError


def splits(case: Case, most: int, least: int) -> Iterator[DegreeRequest]:
    """Yield TP and PP to try, of ``least`` to ``most`` ranks a replica, the kept ones first.

    With unknown heads or layers only divisors of the kept sizes are safe, or fewer stages where
    these may be uneven.
    """
    kept, limits = case.kept, case.limits
    fixed = case.policy.kept_axes
    tps = [kept.tp] if "tp" in fixed else divisors(limits.num_attention_heads or kept.tp)
    is_uneven = limits.first_stage_layers is not None or limits.last_stage_layers is not None
    is_uneven = is_uneven and not limits.has_uneven_stages
    is_known = limits.num_layers is not None and not is_uneven and "pp" not in fixed
    layers = limits.num_layers or 0
    pps = stage_counts(layers, limits) if is_known else [kept.pp]
    if limits.num_layers is None and limits.has_uneven_stages and "pp" not in fixed:
        pps = [*range(kept.pp, 0, -1)]
    pp_of, vpp_of = limits.own_stages or (0, 0)
    has_all_stages = is_known and case.policy.freedom.is_free("virtual-stages", for_memory=False)
    pairs = dict.fromkeys([(kept.tp, kept.pp), *((tp, pp) for tp in tps for pp in pps)])
    for tp, pp in pairs:
        if least <= tp * pp <= most:
            stages = [kept.vpp, 1] if pp > 1 else [1]
            if has_all_stages and pp > 1:
                stages += divisors(-(-(layers + limits.extra_layers) // pp))
            if vpp_of and pp == pp_of:
                stages = [vpp_of]
            for vpp in dict.fromkeys(stages):
                yield DegreeRequest(tp, pp, vpp=vpp)


def with_passes(
    case: Case, split: DegreeRequest, *, for_memory: bool, spills: bool = False
) -> Iterator[DegreeRequest]:
    """Yield a split with each of its allowed passes, the script's own first.

    Args:
        spills: Only passes with state in host memory.
    """
    freedom, own = case.policy.freedom, case.own.micro_batch_size
    micros: list[int | None] = [None]
    if own is not None and freedom.is_free("micro-batch", for_memory=for_memory):
        most = MICRO_BATCHES if freedom.is_free("micro-batch", for_memory=False) else own
        batch = case.limits.global_batch_size or own
        micros += [size for size in range(most, 0, -1) if batch % size == 0 and size != own]
    for offload in freedom.spills if spills else (None,):
        for recompute in freedom.recomputes(for_memory=for_memory):
            for micro in micros:
                yield replace(split, micro_batch_size=micro, recompute=recompute, offload=offload)


def smaller(case: Case, splits: Iterator[DegreeRequest]) -> Iterator[DegreeRequest]:
    """Yield the splits; after an out-of-memory, and below the size known to fit, each also with
    passes of less memory, and with these and state in host memory."""
    recompute = case.policy.freedom.recomputes(for_memory=True)[-1]
    own = case.own.micro_batch_size or 1
    for split in splits:
        yield split
        is_small = case.is_modelled and split.tp * split.pp < case.floor
        if not case.excluded and not is_small:
            continue
        for spills in (False, True):
            for request in with_passes(case, split, for_memory=True, spills=spills):
                is_less = request.micro_batch_size is None or request.micro_batch_size < own
                if request.recompute == recompute and is_less and request != split:
                    yield request


def after_failure(case: Case, request: DegreeRequest) -> int:
    """Return a split's turn after an out-of-memory: larger TP·PP, passes of less memory, state in
    host memory, the rest. Without a failure all share one turn."""
    if request.offload is not None:
        return 2 + OFFLOADS.index(request.offload)
    if request.micro_batch_size is not None or request.recompute is not None:
        return 1
    return 2 + len(OFFLOADS) if request.tp * request.pp <= case.failed else 0


def choose(
    world: int,
    limits: ModelLimits,
    policy: DegreePolicy,
    present: Degrees | None,
    *,
    excluded: Sequence[Choice] = (),
    requested: DegreeRequest | None = None,
    ran: Passes = AS_GIVEN,
) -> Choice:
    """Return the first of :func:`candidates`.

    Args:
        world: Available ranks.
        present: Degrees of the last round; None on the first start.
        excluded: Choices that ran out of memory in their first step.
        requested: The user's degrees for this change; they win over everything.
        ran: Passes of ``present``.

    Raises:
        RefusedError: Nothing is valid; the message names the nearest worlds with valid degrees.
    """
    case = Case(world, limits, policy, present, tuple(excluded), ran)
    refused: list[str] = []
    for choice in _candidates(case, requested, refused):
        return choice
    why = "; ".join(dict.fromkeys(refused)) or case.floor_reason()
    raise RefusedError(
        f"{_ranks(world)}: no valid degrees ({why}). {_nearest_worlds(case, requested)} "
        f"Or write other degrees for {world} under [degrees]."
    )


def candidates(
    world: int,
    limits: ModelLimits,
    policy: DegreePolicy,
    present: Degrees | None,
    *,
    excluded: Sequence[Choice] = (),
    requested: DegreeRequest | None = None,
    ran: Passes = AS_GIVEN,
) -> Iterator[Choice]:
    """Yield the valid choices, best first: the table's, the planner's, present TP and PP, others.

    TP·PP never goes below the size known to fit in memory, nor below one that ran out of memory.
    The table is exempt, and the planner, by its model of memory. After an out-of-memory splits with
    larger TP·PP come first, then splits with passes of less memory. A request admits nothing beside
    itself. Arguments as in :func:`choose`.
    """
    case = Case(world, limits, policy, present, tuple(excluded), ran)
    return _candidates(case, requested, [])


def _candidates(
    case: Case, requested: DegreeRequest | None, refused: list[str]
) -> Iterator[Choice]:
    """Yield :func:`candidates`; ``refused`` collects the reasons against better ones."""
    if case.world < 1:
        raise RefusedError(f"{case.world} ranks: a job needs at least one.")
    sizes = case.sizes()
    if not sizes:
        refused.append(f"the smallest allowed size is {min(case.policy.allowed_sizes)}")
    seen = {choice.key for choice in case.excluded}
    for choice in _in_order(case, sizes, requested, refused):
        if choice.key not in seen:
            seen.add(choice.key)
            yield choice


def _in_order(
    case: Case, sizes: Sequence[int], requested: DegreeRequest | None, refused: list[str]
) -> Iterator[Choice]:
    yield from _asked_for(case, sizes, requested, refused)
    if requested is not None:
        return
    failure = ""
    try:
        yield from _preferred(case, sizes)
    except ScalaiError as error:
        failure = f"; the planner cannot say: {error}"
    for choice in _split_anew(case, sizes, refused):
        yield replace(choice, reason=choice.reason + failure)


def _asked_for(
    case: Case, sizes: Sequence[int], requested: DegreeRequest | None, refused: list[str]
) -> Iterator[Choice]:
    """Yield the user's choices: the request, else the table's entries."""
    before = case.present.world_size if case.present else None
    for size in sizes:
        if requested is not None:
            requests: tuple[DegreeRequest, ...] = (requested,)
            source = "as requested"
        else:
            rule = case.policy.rule(size, before)
            requests = rule.requests if rule else ()
            source = f'by [degrees] "{rule.key}"' if rule else ""
        for request in requests:
            choice = _fit(case, request, size, source, refused)
            if choice is not None:
                yield choice


def _preferred(case: Case, sizes: Sequence[int]) -> Sequence[Choice]:
    """Return the planner's order of all splits except those out of memory.

    Passes not freed by the user differ from the script's only if nothing fits otherwise.
    """
    preference, freedom = case.policy.preference, case.policy.freedom
    if preference is None:
        return ()
    own, runs = _valid(case, sizes, for_memory=False), _that_runs(case, sizes)
    ordered = preference.order(own, case.present, case.ran, case.excluded)
    if ordered and runs is not None and runs not in own:
        # First: another choice may equal it, and would be a change in name only.
        ordered = preference.order((runs, *own), case.present, case.ran, case.excluded)
    if ordered or not any(freedom.is_free(part, for_memory=True) for part in MEMORY_PARTS):
        return ordered
    forced = _valid(case, sizes, for_memory=True)
    if runs is not None and runs not in forced:
        forced = (runs, *forced)
    ordered = preference.order(forced, case.present, case.ran, case.excluded)
    if ordered or not freedom.spills:
        why = "no layout fits with the script's flags alone"
        return [replace(each, reason=f"{each.reason}; {why}") for each in ordered]
    forced = _valid(case, sizes, for_memory=True, spills=True)
    ordered = preference.order(forced, case.present, case.ran, case.excluded)
    return [replace(each, reason=f"{each.reason}; {preference.spilled(each)}") for each in ordered]


def _that_runs(case: Case, sizes: Sequence[int]) -> Choice | None:
    """Return present degrees with their passes, possibly a user's; None: not valid here, or out of
    memory."""
    present = case.present
    if present is None:
        return None
    split = DegreeRequest(present.tp, present.pp, vpp=present.vpp)
    found = (_as_it_ran(case, split, size, "computed") for size in sizes)
    failed = {each.key for each in case.excluded}
    return next((each for each in found if each is not None and each.key not in failed), None)


def _valid(
    case: Case, sizes: Sequence[int], *, for_memory: bool, spills: bool = False
) -> tuple[Choice, ...]:
    """Return all valid choices, with passes free for speed, or also for memory, or those with state
    in host memory."""
    least = max(case.policy.min_model_parallel or 0, case.failed)
    failed = {each.key for each in case.excluded}
    known: dict[tuple[Degrees, Passes], Choice] = {}
    for split in splits(case, max(sizes, default=0), least):
        for request in with_passes(case, split, for_memory=for_memory, spills=spills):
            for size in sizes:
                choice = _fit(case, request, size, "computed", [])
                if choice is not None and choice.key not in failed:
                    known.setdefault(choice.key, choice)
    return tuple(known.values())


def _split_anew(case: Case, sizes: Sequence[int], refused: list[str]) -> Iterator[Choice]:
    """Yield present TP and PP, then every other valid split; after an out-of-memory also with
    passes of less memory."""
    kept, ranked = case.kept, []
    least = 1 if case.is_modelled else case.floor
    tried = smaller(case, splits(case, max(sizes, default=0), least))
    is_new = case.present is None and not case.excluded and not case.policy.stepped
    if is_new and case.policy.initial and kept.tp * kept.pp >= least:  # it is had, or refused
        tried = iter([DegreeRequest(kept.tp, kept.pp, vpp=kept.vpp)])
    for request in tried:
        is_kept = (request.tp, request.pp) == (kept.tp, kept.pp)
        source = "TP and PP kept" if case.present else "initial degrees"
        if case.excluded:
            source = "the next candidate after an out-of-memory"
        elif not is_kept:
            source = "TP and PP changed"
        if request.offload is not None and not case.excluded:
            source += ", as nothing is known to fit without state in host memory"
        passes = request.micro_batch_size, request.recompute, request.offload
        is_own = passes == (None, None, None)
        for size in sizes:
            choice = _fit(case, request, size, source, refused)
            if choice is not None and is_own and choice.degrees == case.present:
                choice = _as_it_ran(case, request, size, source) or choice
            if choice is not None and not case.is_known_to_fit(*choice.key):
                refused.append(case.floor_reason())
                choice = None
            if choice is not None:
                # The same TP and PP move the fewest bytes; then idle ranks cost most. From host
                # memory a job comes back to what it ran.
                is_back = case.ran.offload is not None and choice.key in case.policy.stepped
                cost = (
                    not (is_back and is_own), not (is_kept and is_own),
                    after_failure(case, request),
                    not is_own and not is_kept, -(request.micro_batch_size or MICRO_BATCHES),
                    len(choice.idle_ranks),
                    request.tp * request.pp, request.tp != kept.tp, request.pp != kept.pp,
                    request.vpp != kept.vpp, request.tp,
                )  # fmt: skip
                ranked.append((cost, choice))
                break
    yield from (choice for _, choice in sorted(ranked, key=lambda entry: entry[0]))


def _as_it_ran(case: Case, split: DegreeRequest, size: int, source: str) -> Choice | None:
    """Return present degrees with their passes, possibly from an entry for one change; None: no
    longer valid."""
    ran = case.ran
    request = replace(
        split, micro_batch_size=ran.micro_batch_size, recompute=ran.recompute, offload=ran.offload
    )
    choice = _fit(case, request, size, source, [])
    return choice if choice is not None and choice.degrees == case.present else None


def _fit(
    case: Case, request: DegreeRequest, size: int, source: str, refused: list[str]
) -> Choice | None:
    """Return the request with the most valid replicas on ``size`` ranks.

    None, with a line in ``refused``: no number of replicas is valid.
    """
    allowed = case.policy.allowed_sizes
    cp, ep = request.cp or case.kept.cp or 1, request.ep or case.kept.ep or 1
    micro = request.micro_batch_size or case.own.micro_batch_size
    fault = case.policy.freedom.refusal(request.recompute, request.offload)
    if fault is not None:
        refused.append(fault)
        return None
    replica = request.tp * request.pp * cp
    most = size // replica
    if request.dp is not None:
        most = request.dp if request.dp <= most else 0
    if most == 0:
        cut = replace(request, cp=cp) if cp > 1 else request
        refused.append(f"{cut} does not fit on {_ranks(size)}")
        return None
    first_fault = ""
    for dp in range(most, 0 if request.dp is None else most - 1, -1):
        degrees = Degrees(request.tp, request.pp, dp, request.vpp, cp, ep)
        fault = refusal(degrees, case.limits, micro)
        fault = fault or spill_refusal(degrees, case.limits, request.offload)
        if fault is None and allowed and degrees.world_size not in allowed:
            fault = f"{_ranks(degrees.world_size)} are not an allowed size"
        if fault is None:
            why_idle = first_fault or f"{size} is not a multiple of {replica}"
            if size < case.world:
                why_idle = f"allowed sizes are {', '.join(map(str, allowed))}"
            elif request.dp is not None:
                why_idle = f"DP{request.dp} was asked for"
            else:
                fewest = _fewest_replicas(case, degrees, micro)
                if fewest.dp < dp:
                    why_idle = f"DP{dp} would need as many passes as DP{fewest.dp}"
                degrees = fewest
            passes = case.policy.freedom.differing(
                Passes(micro, request.recompute, request.offload)
            )
            return _chosen(case, degrees, passes, source, why_idle, refused)
        first_fault = first_fault or f"not {degrees}: {fault}"
    refused.append(first_fault)
    return None


def _fewest_replicas(case: Case, degrees: Degrees, micro: int | None) -> Degrees:
    """Return valid degrees with the fewest replicas among those with as many passes a step: more
    would only make fillers."""
    limits, allowed = case.limits, case.policy.allowed_sizes
    if not limits.has_uneven_shares or limits.global_batch_size is None:
        return degrees
    count = limits.global_batch_size // (micro or 1)
    for dp in range(-(-count // Shares(count, degrees.dp).passes), degrees.dp):
        fewer = replace(degrees, dp=dp)
        is_allowed = not allowed or fewer.world_size in allowed
        if is_allowed and refusal(fewer, limits, micro) is None:
            return fewer
    return degrees


def replicated(case: Case, request: DegreeRequest) -> Iterator[Degrees]:
    """Yield the request with each valid number of replicas on ``case.world`` ranks."""
    cp, ep = request.cp or case.kept.cp or 1, request.ep or case.kept.ep or 1
    micro = request.micro_batch_size or case.own.micro_batch_size
    most = case.world // (request.tp * request.pp * cp)
    for dp in range(1, most + 1) if request.dp is None else (request.dp,):
        degrees = Degrees(request.tp, request.pp, dp, request.vpp, cp, ep)
        if degrees.world_size <= case.world and refusal(degrees, case.limits, micro) is None:
            yield degrees


def _chosen(
    case: Case,
    degrees: Degrees,
    passes: Passes,
    source: str,
    why_idle: str,
    refused: Sequence[str],
) -> Choice:
    before = case.present
    change = f"{before} -> {degrees}" if before and before != degrees else str(degrees)
    ran = case.ran if before else case.own
    if changed := difference(ran, passes, case.policy.freedom):
        change += f", {changed}"
    line = f"{_ranks(case.world)}: {change}, {source}"
    if refused:
        line += f"; {refused[0]}"
    idle = tuple(range(degrees.world_size, case.world))
    if idle:
        names = f"rank {idle[0]}" if len(idle) == 1 else f"ranks {idle[0]} to {idle[-1]}"
        line += f"; {names} idle ({why_idle})"
    return Choice(degrees, idle, line, *astuple(passes))


def _nearest_worlds(case: Case, requested: DegreeRequest | None) -> str:
    """Name the nearest smaller and larger world with valid degrees."""
    policy = case.policy
    known = (case.world, *policy.allowed_sizes, *(rule.world_size for rule in policy.rules))
    furthest = 4 * max(case.floor, *known)

    def is_valid(world: int) -> bool:
        return any(True for _ in _candidates(replace(case, world=world), requested, []))

    below = next((size for size in range(case.world - 1, 0, -1) if is_valid(size)), None)
    above = next((size for size in range(case.world + 1, furthest + 1) if is_valid(size)), None)
    near = [str(size) for size in (below, above) if size is not None]
    if not near:
        return f"Nor are there any for another world of up to {_ranks(furthest)}."
    return f"Use a world that has some, the nearest: {' or '.join(near)}."


def check_rules(limits: ModelLimits, policy: DegreePolicy) -> None:
    """Check the whole table before training starts.

    Raises:
        RefusedError: An entry has no valid request on its world; the message names it and why.
    """
    for rule in policy.rules:
        case = Case(rule.world_size, limits, policy, None, ())
        refused: list[str] = []
        if all(
            _fit(case, request, rule.world_size, "", refused) is None for request in rule.requests
        ):
            why = "; ".join(refused) or "it names no degrees"
            raise RefusedError(f'[degrees] "{rule.key}" cannot be used ({why}). Correct the entry.')


def check_initial(limits: ModelLimits, policy: DegreePolicy) -> None:
    """Check the degrees of the script's flags, if the table is empty.

    Raises:
        RefusedError: No number of replicas is valid; the message says why.
    """
    asked = policy.initial
    if asked is None or policy.rules:
        return
    cp, ep = asked.cp or 1, asked.ep or 1
    faults = []
    for dp in range(1, (limits.global_batch_size or ep) + 1):
        degrees = Degrees(asked.tp, asked.pp, dp, asked.vpp, cp, ep)
        fault = refusal(degrees, limits, asked.micro_batch_size)
        if fault is None:
            return
        faults.append(fault)
    why = Counter(faults).most_common(1)[0][0]
    shown = replace(asked, cp=cp if cp > 1 else None, ep=ep if ep > 1 else None)
    raise RefusedError(
        f"the script's flags ask for {shown}, which cannot be had: {why}. Correct the flags, or "
        "write degrees under [degrees]."
    )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
