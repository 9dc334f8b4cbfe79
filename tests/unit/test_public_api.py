"""The one place users import from: complete, lazy, documented."""

from __future__ import annotations

import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import partitioner

ROOT = Path(__file__).parents[2]

AFTER_IMPORT = """
import sys
import partitioner
print([name for name in ("torch", "numpy", "networkx", "pydantic", "transformers", "pulp") if name in sys.modules])
"""


def test_importing_it_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AFTER_IMPORT], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", partitioner.__all__)
def test_every_export_resolves_and_says_what_it_is(name: str) -> None:
    found = getattr(partitioner, name)
    assert found.__name__ == name
    assert inspect.getdoc(found)


def test_no_module_of_the_package_has_the_name_of_an_export() -> None:
    modules = {module.name for module in pkgutil.iter_modules(partitioner.__path__)}
    assert not modules & set(partitioner.__all__)  # importing it would put the module where the export is


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'train'"):
        partitioner.train  # noqa: B018
    assert set(partitioner.__all__) <= set(dir(partitioner))


def test_the_signature_of_partition() -> None:
    parameters = inspect.signature(partitioner.partition).parameters
    assert list(parameters)[:2] == ["model", "cluster"]
    assert all(p.kind is p.KEYWORD_ONLY for p in list(parameters.values())[2:])
    defaults = {name: p.default for name, p in parameters.items()}
    assert defaults["strategy"] == "auto"
    assert defaults["schedule"] == defaults["microbatches"] == "auto"
    assert defaults["optimizer_memory"] == "adamw"


@pytest.mark.parametrize(
    "name",
    ["save", "load", "__str__", "diff", "deploy", "verify", "simulate", "launch_command", "world_size"],
)
def test_a_plan_can(name: str) -> None:
    assert inspect.getdoc(getattr(partitioner.Plan, name))
