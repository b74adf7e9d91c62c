"""transformers' Trainer with DeepSpeed, made elastic without editing the script."""
