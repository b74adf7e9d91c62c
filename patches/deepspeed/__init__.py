"""What touches DeepSpeed: the live state of an engine."""
