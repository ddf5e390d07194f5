"""Ranks decide as one."""
