"""Files of Hugging Face's trainers beside a DeepSpeed engine's checkpoint."""
