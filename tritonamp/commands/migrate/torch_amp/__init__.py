"""Loops with torch's autocast and GradScaler."""
