"""What a person asked for: flags, files, the job that they state."""
