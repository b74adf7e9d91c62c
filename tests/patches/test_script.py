from argparse import Namespace

from scalai.patches.megatron.training_hooks import warnings_of


def test_surprises_are_said() -> None:
    logged = " ".join(warnings_of(Namespace(exit_signal_handler=True, dataloader_type="external")))
    assert "Signal the agent" in logged
    assert "consumed_train_samples" in logged
