"""An evolutionary search for the devices of jobs."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scalai.core.cluster.question import Floats

_POPULATION = 16
_GENERATIONS = 20
_EVICTED = 0.3
Genomes = npt.NDArray[np.int64]
"""By genome and job, an index of its size; 0: it waits."""


def evolve(
    worths: Floats, sizes: Sequence[int], devices: int, start: Sequence[Sequence[int]], seed: int
) -> list[int]:
    """Return the devices of each job, from the best genome found.

    Args:
        worths: [jobs, 1 + sizes], of a job's genes; the price of a move is taken off already.
        start: Genomes to begin with, as devices by job.

    Source:
        ONES (Bian et al., SC 2021): crossover by gene, eviction of a job, idle devices filled;
        differs in: a gene is a job's size with its best batch, and hosts are chosen afterwards.
    """
    random = np.random.default_rng(seed)
    counts = np.array([0, *sizes])
    index = {int(count): place for place, count in enumerate(counts)}
    first = [[index.get(size, 0) for size in genome] for genome in start]
    pool = np.array(first or [[0] * len(worths)], dtype=np.int64)
    pool = _filled(pool, worths, counts, devices, random)
    for _ in range(_GENERATIONS):
        mothers = pool[random.integers(len(pool), size=_POPULATION)]
        fathers = pool[random.integers(len(pool), size=_POPULATION)]
        children = np.where(random.random(mothers.shape) < 0.5, mothers, fathers)
        evicted = random.integers(children.shape[1], size=_POPULATION)
        is_evicted = random.random(_POPULATION) < _EVICTED
        children[is_evicted, evicted[is_evicted]] = 0
        children = _filled(children, worths, counts, devices, random)
        pool = np.unique(np.concatenate([pool, children]), axis=0)
        order = np.argsort(-_fitness(pool, worths), kind="stable")
        pool = pool[order[:_POPULATION]]
    return [int(counts[gene]) for gene in pool[0]]


def _fitness(pool: Genomes, worths: Floats) -> Floats:
    found: Floats = worths[np.arange(worths.shape[0]), pool].sum(axis=1)
    return found


def _filled(
    pool: Genomes, worths: Floats, counts: Genomes, devices: int, random: np.random.Generator
) -> Genomes:
    """Take genes out of genomes that hold too many devices, and give idle ones to the best."""
    found = pool.copy()
    jobs = np.arange(worths.shape[0])
    for genome in found:
        genome[np.isneginf(worths[jobs, genome])] = 0
        for job in random.permutation(len(genome)):
            if counts[genome].sum() <= devices:
                break
            genome[job] = 0
        while True:
            idle = devices - counts[genome].sum()
            more = counts[None, :] - counts[genome][:, None]
            gain = worths - worths[jobs, genome][:, None]
            is_open = (more > 0) & (more <= idle) & (gain > 1e-9)
            if not is_open.any():
                break
            each = np.where(is_open, gain / np.maximum(more, 1), -np.inf)
            job, gene = divmod(int(each.argmax()), len(counts))
            genome[job] = gene
    return found
