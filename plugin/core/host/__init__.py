"""The law of one host: reactions to commands, calls of workers and results; the door is
``law.advance``."""
