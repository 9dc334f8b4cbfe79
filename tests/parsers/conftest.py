"""Collected where the command line names this folder only: ``make formats`` installs the packages and runs these."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if any("parsers" in argument for argument in config.args) else True
