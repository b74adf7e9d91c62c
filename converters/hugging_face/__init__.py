"""What Hugging Face's trainers save beside a DeepSpeed engine's checkpoint."""
