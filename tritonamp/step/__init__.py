"""From a loss to new weights, or to a skip."""
