"""Which samples a job has trained on: ``intervals`` of places in a pass over its data, the
``ledger`` that each generation carries, and what it proves (``verdict``)."""
