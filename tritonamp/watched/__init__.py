"""Observes a run op by op: the op, its module and source line, and its autograd graph."""
