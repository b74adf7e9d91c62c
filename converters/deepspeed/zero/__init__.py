"""DeepSpeed's own checkpoints with ZeRO, stages 1 to 3."""
