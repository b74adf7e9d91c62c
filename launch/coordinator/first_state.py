"""A job's state before any host has joined."""

from scalai.core.job import membership as m
from scalai.core.job.copies import Copies
from scalai.core.job.fitness import Fitness
from scalai.core.job.succession import begin
from scalai.launch.config.constants import constant
from scalai.launch.config.job_spec import JobSpec
from scalai.launch.coordinator.sizing import Sizing

ORDERS_A_TERM = 1 << 20
"""Orders of two coordinators have different numbers: answers to those of one that is gone may be on
their way to the other."""


def first_state(spec: JobSpec, sizing: Sizing, term: int, took_over_at: float | None) -> m.Job:
    """The law's first state in this term; ``took_over_at``: time of this coordinator's succession;
    None: it succeeds nobody."""
    orders = (term - 1) * ORDERS_A_TERM
    job = m.Job(
        _settings(spec, sizing),
        budget=m.Budget(left=spec.failures),
        copies=Copies(last_replication=orders, last_archive=orders),
        health=Fitness(last_check=orders),
        spacing=spec.spacing,
    )
    return job if took_over_at is None else begin(job, took_over_at)


def _settings(spec: JobSpec, sizing: Sizing) -> m.JobSettings:
    resize, store = spec.config.resize, spec.config.store
    return m.JobSettings(
        assign=sizing.assign(),
        why_not=sizing.why_not,
        # A plain job begins anew from its script's own state, which no host holds.
        place=sizing.place if spec.is_elastic else m.keep_order,
        settle_s=spec.settle_s,
        max_hosts=spec.max_hosts,
        most_failures=spec.failures,
        does_refill=spec.is_loss_free,
        is_loss_free=spec.is_loss_free,
        is_elastic=spec.is_elastic,
        has_durable_dir=spec.durable_dir is not None,
        archive_every_s=store.durable_every_s,
        archive_keep=int(constant("store.durable_keep")),
        has_emergency=spec.is_elastic and store.emergency,
        replicas=spec.replicas,
        build_timeout_s=0.0 if resize.standby == "never" else constant("resize.build_timeout_s"),
        drain_timeout_s=resize.drain_timeout_s,
        quarantine_s=constant("resize.quarantine_s"),
        start_timeout_s=resize.start_timeout_s,
        hang_s=resize.hang_s if spec.is_elastic else 0.0,
        proves=resize.prove_function,
    )
