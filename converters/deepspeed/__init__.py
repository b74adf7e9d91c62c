"""DeepSpeed's layouts: ZeRO 0 to 3, pipelines, universal checkpoints."""
