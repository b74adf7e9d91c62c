"""The coordinator of a job: carries out the decisions of the job's law."""
