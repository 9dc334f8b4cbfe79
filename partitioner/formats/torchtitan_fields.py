"""The settings of a torchtitan configuration, each with its line: of a Python file, never run, or of an old TOML file."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cost_models.errors import UsageError

CANNOT_READ = "cannot read torchtitan's configuration"
TABLES = {"ParallelismConfig": "parallelism", "TrainingConfig": "training"}
POLICIES = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget"}
"""Classes of torchtitan.distributed.activation_checkpoint, and the words of the TOML form."""
LARGEST = 1 << 62


@dataclass(frozen=True)
class GivenSetting:
    """One value, and where it stands."""

    value: Any
    line: int


@dataclass
class GivenSettings:
    """The settings of a file, by the names that torchtitan has."""

    parallelism: dict[str, GivenSetting] = field(default_factory=dict)
    training: dict[str, GivenSetting] = field(default_factory=dict)
    checkpointing: GivenSetting | None = None
    """full, selective, memory_budget or none; None where the file does not say."""


def refused(line: int, why: str, *more: str) -> UsageError:
    """Return the error about a place in the file."""
    return UsageError(CANNOT_READ, [f"line {line}: {why}"], more)


def _several(what: str, lines: Sequence[int]) -> UsageError:
    where = ", ".join(map(str, lines))
    return UsageError(
        CANNOT_READ, [f"{what} is there {len(lines)} times, in lines {where}"], ["keep the one that is meant"]
    )


def settings_of(text: str) -> GivenSettings:
    """Read the settings of a file of either form."""
    if re.search(r"(?m)^[ \t]*\[[ \t]*\w+[ \t]*\]", text) and not re.search(
        r"\bParallelismConfig\s*\(", text
    ):
        return _of_toml(text)
    return _of_python(text)


def _of_python(text: str) -> GivenSettings:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise refused(error.lineno or 1, f"this is no Python: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UsageError(CANNOT_READ, [f"this is no Python: {error}"]) from error
    settings = GivenSettings()
    for name, table in TABLES.items():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _last(node.func) == name]
        if len(calls) > 1:
            raise _several(f"{name}(…)", [call.lineno for call in calls])
        if calls:
            setattr(settings, table, dict(_keywords(calls[0], name)))
        elif table == "parallelism":
            raise UsageError(CANNOT_READ, ["no ParallelismConfig(…) is there"])
    settings.checkpointing = _policy(tree)
    return settings


def _last(node: ast.expr) -> str:
    """Return the last name of a.b.C."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _keywords(call: ast.Call, name: str) -> Iterator[tuple[str, GivenSetting]]:
    if call.args:
        raise refused(call.args[0].lineno, f"{name} takes its settings by name")
    for keyword in call.keywords:
        line = keyword.value.lineno
        if keyword.arg is None:
            raise refused(line, f"** in {name}(…) hides what is set: write its settings out")
        try:
            value = _value(keyword.value)
        except (ValueError, RecursionError) as error:
            raise refused(line, f"{keyword.arg}: {error}") from error
        yield keyword.arg, GivenSetting(value, line)


def _value(node: ast.expr) -> Any:
    """Return a constant: a number, text, None, a list of these, a product such as 8 * 4096."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(element) for element in node.elts]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _value(node.operand)
        if type(number) is int:
            return -number
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _value(node.left), _value(node.right)
        if type(left) is int and type(right) is int and abs(left * right) < LARGEST:
            return left * right
    raise ValueError("expected a plain value, not something to compute")


def _policy(tree: ast.Module) -> GivenSetting | None:
    """Return what is said of activation checkpointing: activation_checkpoint=FullAC.Config(), or = None."""
    found: list[GivenSetting] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.keyword | ast.Assign):
            continue
        names = [node.arg] if isinstance(node, ast.keyword) else [_last(target) for target in node.targets]
        if names != ["activation_checkpoint"]:
            continue
        value = node.value
        if isinstance(value, ast.Constant) and value.value is None:
            found.append(GivenSetting("none", value.lineno))
            continue
        made = value.func if isinstance(value, ast.Call) else value
        owner = made.value if isinstance(made, ast.Attribute) and made.attr == "Config" else made
        name = _last(owner)
        if name in POLICIES:
            found.append(GivenSetting(POLICIES[name], value.lineno))
        elif name != "activation_checkpoint":
            raise refused(
                value.lineno, f"activation_checkpoint: expected one of {', '.join(POLICIES)} or None"
            )
    if len(found) > 1:
        raise _several("activation_checkpoint", [setting.line for setting in found])
    return found[0] if found else None


def _of_toml(text: str) -> GivenSettings:
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(CANNOT_READ, [f"this is no TOML: {error}"]) from error
    settings = GivenSettings()
    for table in TABLES.values():
        found = data.get(table, {})
        if not isinstance(found, dict):
            raise refused(_line(text, table), f"{table}: expected a table")
        setattr(
            settings, table, {name: GivenSetting(value, _line(text, name)) for name, value in found.items()}
        )
    if "parallelism" not in data:
        raise UsageError(CANNOT_READ, ["no table [parallelism] is there"])
    checkpointing = data.get("activation_checkpoint", {})
    if isinstance(checkpointing, dict) and "mode" in checkpointing:
        mode, line = checkpointing["mode"], _line(text, "mode")
        if mode not in (*POLICIES.values(), "none"):
            words = ", ".join(POLICIES.values())
            raise refused(line, f"mode: expected one of {words} and none, not {str(mode)[:40]!r}")
        settings.checkpointing = GivenSetting(mode, line)
    return settings


def _line(text: str, name: str) -> int:
    """Return the line in which a name is set, as far as it is written plainly; 1 where it is not."""
    found = re.search(rf"(?m)^[ \t]*\[?[ \t]*(?:[\w-]+\.)?[\"']?{re.escape(name)}[\"']?[ \t]*[=\]]", text)
    return 1 if found is None else text.count("\n", 0, found.start()) + 1
