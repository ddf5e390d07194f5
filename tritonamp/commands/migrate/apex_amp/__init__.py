"""Loops with apex.amp, and imports from apex."""
