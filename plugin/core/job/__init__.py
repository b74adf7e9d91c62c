"""The job's law: what happens to a job, and the commands that follow. The coordinator runs it."""
