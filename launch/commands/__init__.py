"""What a person runs beside a job: questions, checks, conversions."""
