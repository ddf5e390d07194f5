"""The commands of ``python -m tritonamp``."""
