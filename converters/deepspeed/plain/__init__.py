"""DeepSpeed's checkpoints without ZeRO (stage 0)."""
