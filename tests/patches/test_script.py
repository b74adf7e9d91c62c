from argparse import Namespace

import pytest

from scalai.core.errors import RefusedError
from scalai.patches.megatron.script import (
    refuse_random_order,
    refuse_script_arguments,
    warnings_of,
)


def test_the_default_data_order_is_accepted() -> None:
    refuse_script_arguments(Namespace(dataloader_type="single", data_sharding=True))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"dataloader_type": "cyclic", "data_sharding": True}, "own part of the data"),
        ({"decrease_batch_size_if_needed": True}, "order of samples"),
        ({"use_mp_args_from_checkpoint_args": True}, "parallel degrees"),
        ({"inprocess_restart": True}, "restarts the workers"),
        ({"perform_rl_step": True}, "makes its own data"),
        ({"non_persistent_ckpt_type": "local"}, "fits one layout"),
        ({"skip_train": True}, "nothing is trained"),
    ],
)
def test_what_depends_on_the_layout_is_refused_with_the_reason(
    values: dict[str, object], reason: str
) -> None:
    with pytest.raises(RefusedError, match=reason):
        refuse_script_arguments(Namespace(**values))


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(RefusedError) as caught:
        refuse_script_arguments(Namespace(skip_train=True, inprocess_restart=True))
    assert "--skip-train" in str(caught.value)
    assert "--inprocess-restart" in str(caught.value)


def test_random_order_is_accepted_where_whole_global_batches_make_an_epoch() -> None:
    refuse_script_arguments(Namespace(dataloader_type="cyclic", data_sharding=False))
    refuse_random_order(total_samples=96, global_batch_size=12)
    with pytest.raises(RefusedError, match="100 samples are not a multiple"):
        refuse_random_order(total_samples=100, global_batch_size=12)


def test_surprises_are_said() -> None:
    said = " ".join(warnings_of(Namespace(exit_signal_handler=True, dataloader_type="external")))
    assert "Signal the agent" in said
    assert "consumed_train_samples" in said
