"""The job's law: from events to commands. The coordinator runs it."""
