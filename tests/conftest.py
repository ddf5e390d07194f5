"""What runs (covering.py), and what every test gets (every_test.py)."""

import importlib

import pytest

pytest_plugins = ["covering"]


def pytest_collection(session: pytest.Session) -> None:
    """Register what every test gets, which imports torch, where tests are collected.

    The process that starts the others does not collect, and they would wait for it to import torch.
    """
    session.config.pluginmanager.register(importlib.import_module("every_test"))
