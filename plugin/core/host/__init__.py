"""The law of one host: what its agent does about commands, calls of workers and what becomes of its
work; ``law.advance`` is the whole of it."""
