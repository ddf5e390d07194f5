"""Training on several processes: the ranks agree on every step, under DDP and FSDP2."""
