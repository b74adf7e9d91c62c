"""How a round of a Hugging Face trainer spreads the global batch of the first one."""

from scalai.core.degrees.batches import Batches, fit_batches
from scalai.core.errors import RefusedError
from scalai.runtime.session import Session


def check_ranks(session: Session, counted: int, who: str) -> None:
    """Check that a trainer deals samples to as many ranks as there are.

    Args:
        session: This worker's.
        counted: The processes that the trainer counts.
        who: Which trainer, for the message.

    Raises:
        RefusedError: Every rank would train on the same samples.
    """
    if counted != session.dp:
        raise RefusedError(
            f"{who} counts {counted} process(es), the round has DP{session.dp}. Without GPUs begin "
            "with accelerate.PartialState(cpu=True), or give Trainer --use_cpu."
        )


def round_batches(session: Session, micro_batch_size: int, accumulation: int, who: str) -> Batches:
    """Return this round's micro-batches.

    Args:
        session: This worker's.
        micro_batch_size, accumulation: What the script says: those of the first round.
        who: Which trainer asks, for the message.

    Raises:
        RefusedError: The round has other degrees than data parallelism, or does not divide the
            global batch.
    """
    if session.tp * session.pp != 1:
        raise RefusedError(
            f"TP{session.tp} PP{session.pp}: of a job of {who} the number of data-parallel ranks "
            "changes alone. Leave tp and pp out of [degrees]."
        )
    usual = session.facts.get("first_micro_batch_size", micro_batch_size)
    stated = micro_batch_size * accumulation * session.dp
    total = session.facts.get("global_batch_size", stated)
    if session.micro_batch_size is not None:
        return Batches(total, session.micro_batch_size, session.dp)
    return fit_batches(total, session.dp, usual)
