"""Formulas that models write out, such as GELU, run as one op inside enabled forwards."""
