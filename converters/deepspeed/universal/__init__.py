"""DeepSpeed's universal checkpoints: a folder a parameter."""
