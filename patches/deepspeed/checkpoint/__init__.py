"""What a checkpoint of DeepSpeed holds, and how it gets into live memory."""
