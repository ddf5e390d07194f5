"""The step: from a scaled loss to new weights, or to a skip."""
