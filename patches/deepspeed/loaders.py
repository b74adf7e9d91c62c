"""DeepSpeed's own loaders over torch's, which ``scalai.patches.data`` has taken over.

Source: deepspeed/runtime/dataloader.py and runtime/pipe/engine.py, 0.19.8.
"""

import importlib
from typing import Any

import wrapt

from scalai.patches.calls import Args, Call, Kwargs
from scalai.patches.data.loaders import Feed


def install(feed: Feed) -> None:
    """Hook DeepSpeed's loaders, which has been imported."""

    def count(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> int:
        """A loader is as long as in the first round."""
        if not feed.is_training() or not feed.is_micro_batch(instance.batch_size):
            return int(wrapped(*args, **kwargs))
        return feed.length(len(instance.dataset), drop_last=instance.dataloader_drop_last)

    def draw(wrapped: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """The repeating loader gives up after an empty pass; consumed ones are empty."""
        while True:
            try:
                return wrapped(*args, **kwargs)
            except StopIteration:
                if not feed.clocks.may_yield_nothing:
                    raise

    loaders = importlib.import_module("deepspeed.runtime.dataloader")
    wrapt.wrap_function_wrapper(loaders, "DeepSpeedDataLoader.__len__", count)
    wrapt.wrap_function_wrapper(loaders, "RepeatingLoader.__next__", draw)


def draw_anew(engine: Any) -> None:
    """Have a pipeline that was given its data set, and has begun to draw from it when it was built,
    begin again, now that it is known how far the data is."""
    loader = engine.training_dataloader
    if loader is not None and hasattr(loader, "data_iter"):
        loader.data_iter = iter(loader.loader)
