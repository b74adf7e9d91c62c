"""What an engine keeps, and where: its tensors' elements, and its small state."""
