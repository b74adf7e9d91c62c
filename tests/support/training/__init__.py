"""What trains tiny models in processes of a pool, and what tests ask of it."""
