from argparse import Namespace

import pytest

from scalai.core.errors import RefusedError
from scalai.patches.megatron.script import refuse_random_order, warnings_of


def test_random_order_is_accepted_where_whole_global_batches_make_an_epoch() -> None:
    refuse_random_order(total_samples=96, global_batch_size=12)
    with pytest.raises(RefusedError, match="100 samples are not a multiple"):
        refuse_random_order(total_samples=100, global_batch_size=12)


def test_surprises_are_said() -> None:
    logged = " ".join(warnings_of(Namespace(exit_signal_handler=True, dataloader_type="external")))
    assert "Signal the agent" in logged
    assert "consumed_train_samples" in logged
