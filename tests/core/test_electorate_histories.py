"""The vote on the coordinator, in virtual time: never two holders, and a holder again once faults
have stopped; and the same histories find each rule that is broken."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest

from scalai.core import electorate as changes
from scalai.core import witness as rules
from scalai.core.electorate import Electorate, Mandate, Witness
from scalai.core.witness import ClaimTerm, Memory, Told, VoteRequest, WriteRecord
from scalai.launch.coordinator import votes
from support.voting_simulation import Answer, TwoHoldersError, World, history

HISTORIES = int(os.environ.get("SCALAI_VOTE_HISTORIES", "60"))
AT_MOST = 1500
"""In so many histories a broken rule is found."""
SIZES = "abc", "abcd", "abcde", "abcdefg"
AGAIN_S = 60.0
"""Within so long somebody holds the lease once faults have stopped: what was held has run out, two
claims have failed, and what came late is over."""


class NobodyHoldsError(Exception):
    """Faults have stopped, a majority is there, and the job has no coordinator."""


def lived(seed: int, answer: Answer = rules.answer, *, keeps_name: bool = False) -> bool:
    """Live through one history. Returns whether it had to end with a holder."""
    world = World(seed, SIZES[seed % len(SIZES)], answer, keeps_name=keeps_name)
    try:
        history(world)
        world.run(30.0)  # what is late arrives
        is_possible = world.can_elect() or world.holder() is not None
        deadline = world.now + AGAIN_S
        while is_possible and world.holder() is None:
            if world.now >= deadline:
                raise NobodyHoldsError(f"seed {seed}: nobody holds the lease")
            world.run(1.0)
        return is_possible
    finally:
        world.close()


def test_two_never_hold_and_one_does_once_faults_stop() -> None:
    ended = [lived(seed) for seed in range(HISTORIES)]
    assert sum(ended) > HISTORIES / 3, "most end with a majority"


def grants_again(memory: Memory, request: VoteRequest) -> tuple[Memory, Told]:
    """Grants a term that it has granted to another one."""
    if isinstance(request, ClaimTerm) and request.term == memory.term:
        memory = replace(memory, claimant=request.claimant)
    return rules.answer(memory, request)


def takes_any_claim(memory: Memory, request: VoteRequest) -> tuple[Memory, Told]:
    """Grants who has not seen the newest record."""
    if isinstance(request, ClaimTerm):
        request = replace(request, seen=(1 << 40, True, 0))
    return rules.answer(memory, request)


def takes_earlier_terms(memory: Memory, request: VoteRequest) -> tuple[Memory, Told]:
    """Takes records of a holder that another one has outvoted."""
    if isinstance(request, WriteRecord) and request.memory == memory.name:
        return memory, Told(memory.name, memory.term, memory.record, True)
    return rules.answer(memory, request)


@pytest.mark.parametrize("answer", [grants_again, takes_any_claim, takes_earlier_terms])
def test_a_witness_that_grants_too_much_is_found(answer: Answer) -> None:
    with pytest.raises(TwoHoldersError):
        for seed in range(AT_MOST):
            lived(seed, answer)


@pytest.mark.turns
def test_a_witness_that_has_forgotten_and_still_votes_is_found() -> None:
    with pytest.raises(TwoHoldersError):
        for seed in range(AT_MOST):
            with suppress(NobodyHoldsError):
                lived(seed, keeps_name=True)


def at_once(mandate: Mandate, wanted: tuple[Witness, ...] | None = None) -> Mandate:
    """Has the new witnesses count alone, at once."""
    found = changes.following(mandate, wanted)
    if found.record.electorate.before:
        alone = Electorate(found.record.electorate.witnesses)
        found = replace(found, record=replace(found.record, electorate=alone))
    return found


def never_back(mandate: Mandate, wanted: tuple[Witness, ...] | None = None) -> Mandate:
    """Has the new witnesses count alone though the majorities have not taken them together."""
    if mandate.back is not None and not mandate.is_agreed:
        mandate = replace(mandate, is_agreed=True, back=None)
    return changes.following(mandate, wanted)


@pytest.mark.parametrize("following", [at_once, never_back])
def test_witnesses_that_change_without_joint_agreement_are_found(
    following: Callable[..., Mandate], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(votes, "following", following)
    with pytest.raises(TwoHoldersError):
        for seed in range(AT_MOST):
            lived(seed)
