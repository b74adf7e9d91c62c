"""The coordinator of a job: it carries out what the law of the job decides."""
