"""What ``python -m tritonamp`` runs."""
