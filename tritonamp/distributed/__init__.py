"""Training on several ranks, which agree on every step: DDP, FSDP2, tensor parallelism, pipelines.
"""
