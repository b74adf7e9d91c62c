"""A job as its coordinator knows it before any host has joined."""

from scalai.core.job import membership as m
from scalai.core.job.function_proof import FunctionProof
from scalai.core.job.succession import begin
from scalai.launch.config.job import JobSpec
from scalai.launch.coordinator.sizing import Sizing

ORDERS_A_TERM = 1 << 20
"""Orders of two coordinators have different numbers: answers to those of one that is gone may be on
their way to the other."""


def first_state(spec: JobSpec, sizing: Sizing, term: int, took_over_at: float | None) -> m.Job:
    """Return the state that the law begins with, in this term; ``took_over_at``: when this
    coordinator took the place of one that is gone; None: it takes nobody's."""
    resize, store = spec.config.resize, spec.config.store
    orders = (term - 1) * ORDERS_A_TERM
    job = m.Job(
        assign=sizing.assign(),
        why_not=sizing.why_not,
        # A plain job begins anew from its script's own state, which no host holds.
        place=sizing.place if spec.is_elastic else m.keep_order,
        settle_s=spec.settle_s,
        max_hosts=spec.max_hosts,
        failures_left=spec.failures,
        most_failures=spec.failures,
        does_refill=spec.is_loss_free,
        is_loss_free=spec.is_loss_free,
        has_emergency=spec.is_elastic and store.emergency,
        replicas=spec.replicas,
        has_durable_dir=spec.durable_dir is not None,
        archive_every_s=store.durable_every_s,
        archive_keep=store.durable_keep,
        is_elastic=spec.is_elastic,
        build_timeout_s=0.0 if resize.standby == "never" else resize.build_timeout_s,
        drain_timeout_s=resize.drain_timeout_s,
        start_timeout_s=resize.start_timeout_s,
        hang_s=resize.hang_s if spec.is_elastic else 0.0,
        quarantine_s=resize.quarantine_s,
        function=FunctionProof(policy=resize.prove_function),
        spacing=spec.spacing,
        last_replication=orders,
        last_archive=orders,
        last_check=orders,
    )
    return job if took_over_at is None else begin(job, took_over_at)
