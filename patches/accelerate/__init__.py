"""Loops on Hugging Face's Accelerate with DeepSpeed, made elastic without editing them."""
