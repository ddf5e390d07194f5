"""What loops for torch.amp and for apex have in common."""
