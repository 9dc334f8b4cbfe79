"""Settings of a YAML or JSON file, by the path of their keys: what is wrong with one is said with its place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import yaml

from cost_models.errors import UsageError
from cost_models.units import show

T = TypeVar("T")
MOST = 10**9
"""The largest number that a setting may be."""
YES_NO = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class FileSettings:
    """A mapping of a file. ``path``: the keys around it, with a dot behind them."""

    def __init__(self, title: str, values: Mapping[str, Any], path: str = "") -> None:
        self.title = title
        self.values = values
        self.path = path

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, name: str) -> object:
        """Return a value as it is, None if it is not there."""
        return self.values.get(name)

    def count(self, name: str, default: int = 1, least: int = 1) -> int:
        """Return a whole number."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,10}", value, re.ASCII):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            raise self.wrong(name, f"a whole number of {least} or more")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return whether something is on: true and false, or the words for them."""
        value = self.get(name)
        if value is None:
            return default
        found = YES_NO.get(str(value).lower()) if isinstance(value, str | bool | int) else None
        if found is None:
            raise self.wrong(name, "true or false")
        return found

    def word(self, name: str, meanings: Mapping[str, T], default: T) -> T:
        """Return what a word means; capitals do not count."""
        value = self.get(name)
        if value is None:
            return default
        known = {word.lower(): meaning for word, meaning in meanings.items()}
        if not isinstance(value, str | int) or str(value).lower() not in known:
            raise self.wrong(name, f"one of {', '.join(meanings)}")
        return known[str(value).lower()]

    def within(self, name: str) -> FileSettings:
        """Return the mapping behind a key, an empty one if it is not there."""
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(name, "a mapping")
        named = {} if value is None else {str(key): item for key, item in value.items()}
        return FileSettings(self.title, named, f"{self.path}{name}.")

    def others(self, known: Iterable[str], pattern: str = "") -> list[str]:
        """Return the paths of keys that are not ``known`` and look like ``pattern``."""
        rest = sorted(self.values.keys() - set(known))
        return [f"{self.path}{name}" for name in rest if re.search(pattern, name)]

    def wrong(self, name: str, expected: str) -> UsageError:
        """Return the error of a value that is none of what is ``expected``."""
        return self.refused(f"{self.path}{name}: expected {expected}, not {show(self.get(name))}")

    def refused(self, why: str) -> UsageError:
        """Return the error of a file that cannot be read."""
        return UsageError(f"cannot read {self.title}'s configuration", [why])

    def unplanned(self, why: str) -> UsageError:
        """Return the error of a configuration that has no plan here."""
        return UsageError("cannot plan this configuration", [why])


def from_yaml(title: str, text: str) -> FileSettings:
    """Return the settings of a YAML file. Raises UsageError with the line of what is no YAML."""
    try:
        found = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise _no_mapping(title, f"{place}{error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # no character, a date of day 99
        raise _no_mapping(title, " ".join(str(error).split())) from error
    return _mapping(title, found)


def from_json(title: str, text: str) -> FileSettings:
    """Return the settings of a JSON file. Raises UsageError with the line of what is no JSON."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for name in {name for name, _ in pairs if [other for other, _ in pairs].count(name) > 1}:
            raise _no_mapping(title, f"{name} is there twice")
        return dict(pairs)

    try:
        found = json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        raise _no_mapping(title, f"line {error.lineno}, column {error.colno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand brackets
        raise _no_mapping(title, str(error)) from error
    return _mapping(title, found)


def _mapping(title: str, found: object) -> FileSettings:
    if not isinstance(found, Mapping):
        raise _no_mapping(title, f"expected a mapping, not {show(found)}")
    return FileSettings(title, {str(key): value for key, value in found.items()})


def _no_mapping(title: str, why: str) -> UsageError:
    return UsageError(f"cannot read {title}'s configuration", [why])
