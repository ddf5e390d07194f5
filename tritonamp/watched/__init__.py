"""A run seen op by op: which op it is, where it runs, and what autograd has recorded of it."""
