"""Ranks that agree on every step, under DDP, FSDP2, tensor parallelism and pipelines."""
