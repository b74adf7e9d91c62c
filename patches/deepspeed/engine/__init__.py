"""State of an engine: its tensors' elements, and its small state."""
