"""Losses over many classes: cross entropy of logits, and of what a linear layer makes of inputs."""
