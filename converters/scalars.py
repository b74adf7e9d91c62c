"""Single values that lie among a source's tensors."""

from scalai.converters.checkpoint import STEP, Checkpoint
from scalai.core.errors import RefusedError
from scalai.store.values import number_of


def made_steps(source: Checkpoint) -> int:
    """Return how many steps the optimizer has made: the job's, less those that an overflow
    skipped. Raises as ``read_steps``."""
    steps = read_steps(source)
    return source.values.step if steps is None else int(steps)


def read_steps(source: Checkpoint) -> float | None:
    """Return how many steps the optimizer has made for every parameter; None: no tensor says.

    Raises:
        RefusedError: Parameters made unequally many; most layouts keep one number for all.
    """
    placed, found = source.placed, {}
    for row in range(len(placed.collection)):
        tensor, _ = placed.collection.box(row)
        if not tensor.name.startswith(f"{STEP}/") or tensor.dtype != "F32":
            continue
        file, begin = placed.files[placed.file[row]], int(placed.begin[row])
        if file.content is not None:
            data = file.content[begin : begin + 4]
        else:
            with open(source.directory / file.path, "rb") as opened:
                opened.seek(begin)
                data = opened.read(4)
        found[number_of(data, "F32")] = tensor.name
    if len(found) > 1:
        few = ", ".join(f"{name}: {step:g}" for step, name in list(found.items())[:3])
        raise RefusedError(
            f"parameters have made unequally many optimizer steps ({few}), and this layout keeps "
            "one number for all. Convert to scalai's own layout instead."
        )
    return next(iter(found), None)
