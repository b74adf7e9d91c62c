"""The content of a DeepSpeed checkpoint, and its way into live memory."""
