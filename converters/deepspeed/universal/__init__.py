"""DeepSpeed's universal checkpoints: a folder per parameter."""
