"""The loaders behind ``MODEL`` on the command line: from its text to a workload.

    file.py:factory            a function in a file that returns a Workload
    package.module:factory     a function in an importable module
    hf:PATH/config.json        a Hugging Face config, offline, without weights (meta)
    gpt2, llama-70b, ...       a bundled model

``--set key=value`` goes to the factory's parameters, parsed by their annotations.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from cost_models.errors import ModelError, PartitionerError, UsageError
from cost_models.units import listed
from partitioner.models.bundled import NAMES, bundled
from partitioner.models.hugging_face import from_config_file
from partitioner.models.workload import Workload
from runtime.collector import collector_paused


@collector_paused()  # imports and a model's modules are many objects, none of them garbage
def load_workload(
    text: str,
    *,
    settings: Mapping[str, str] | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    batch: int | None = None,
) -> Workload:
    """Load the workload that ``text`` names. ``settings`` are the ``--set`` values, still as text.

    ``seq``, ``dtype`` and ``batch`` (samples in the example) are handed to a factory under these names.
    """
    values = dict(settings or {})
    given = {"seq": seq, "dtype": dtype, "batch": batch}
    for key, value in given.items():
        if value is not None:
            if key in values:
                raise UsageError(f"{key} is given twice", [f"--{key} {value} and --set {key}={values[key]}"])
            values[key] = str(value)
    if text.startswith("hf:"):
        return _call(text, from_config_file, values, path=Path(text.removeprefix("hf:")))
    if ":" in text:
        return _call(text, _factory(text), values)
    if text not in NAMES:
        raise UsageError(
            f"there is no model {text!r}",
            ["MODEL is file.py:factory, package.module:factory, hf:PATH/config.json or a bundled name"],
            [
                *(f"{m}?" for m in get_close_matches(text, NAMES)),
                *([f"{text}:FACTORY, naming a function in that file"] if text.endswith(".py") else []),
                f"bundled models: {' '.join(NAMES)}",
            ],
        )
    return _call(text, bundled, values, name=text)


def _factory(text: str) -> Callable[..., Any]:
    """Find the function that ``file.py:factory`` or ``package.module:factory`` names."""
    place, _, attribute = text.rpartition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else _import(place, text)
    found = getattr(module, attribute, None)
    if not callable(found):
        here = [n for n, f in vars(module).items() if inspect.isfunction(f) and not n.startswith("_")]
        raise UsageError(
            f"{place} has no function {attribute!r}",
            [f"its functions are {listed(here, 10) or 'none'}"],
            [f"{place}:{match}" for match in get_close_matches(attribute, here)],
        )
    return found  # type: ignore[no-any-return]


def _load_file(path: Path) -> types.ModuleType:
    if not path.is_file():
        raise UsageError(f"there is no file {path}", [f"looked in {Path.cwd()}"])
    spec = importlib.util.spec_from_file_location(_module_name(path), path)
    assert spec is not None  # a .py file always has a spec and a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Registered, because dataclasses and typing look up a class's module by name; its folder is importable,
    # as for a script.
    sys.modules[spec.name] = module
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except PartitionerError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(f"{path} cannot be imported", [f"{type(error).__name__}: {error}"]) from error
    return module


def _module_name(path: Path) -> str:
    """Return the file's own name, by which other processes import it too, unless it is the name of another module."""
    if path.stem in sys.modules:
        place = getattr(sys.modules[path.stem], "__file__", None)
    else:
        found = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
        place = str(path) if found is None else found.origin
    own = place is not None and Path(place).resolve() == path.resolve()
    return path.stem if own and path.stem.isidentifier() else f"partitioner_workload_{path.stem}"


def _import(name: str, text: str) -> types.ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"cannot load {text!r}",
            [str(error)],
            ["package.module:factory, importable from here", "file.py:factory"],
        ) from error
    except PartitionerError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(f"module {name} cannot be imported", [f"{type(error).__name__}: {error}"]) from error


def _call(text: str, factory: Callable[..., Any], values: Mapping[str, str], **fixed: Any) -> Workload:
    """Call the factory with the values its annotations make of the text."""
    arguments = parse_settings(factory, values, hidden=frozenset(fixed))
    try:
        result = factory(**fixed, **arguments)
    except PartitionerError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(f"{text} failed", [f"{type(error).__name__}: {error}"]) from error
    if not isinstance(result, Workload):
        raise ModelError(
            f"{text} returned {type(result).__name__}, not a Workload",
            suggestions=["return Workload(model, example_inputs, loss_fn=None)"],
        )
    return result


# --------------------------------------------------------------------------------------------------
# --set key=value


def parse_settings(
    factory: Callable[..., Any], values: Mapping[str, str], hidden: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Read texts as the factory's annotations (or the types of its defaults) ask. Raises UsageError with every problem."""
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(factory).parameters.items()
        if name not in hidden
        and parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }
    annotations = _annotations(factory)
    problems: list[str] = []
    result: dict[str, Any] = {}
    for key, text in values.items():
        if key not in parameters:
            problems.append(f"{key} is no parameter of the model's function")
            continue
        default = parameters[key].default
        fallback = str if default in (inspect.Parameter.empty, None) else type(default)
        kinds = _kinds(annotations.get(key, fallback))
        try:
            result[key] = _parse(text, kinds)
        except ValueError:
            problems.append(f"{key}={text}: expected {' or '.join(_kind_name(kind) for kind in kinds)}")
    required = [n for n, p in parameters.items() if p.default is inspect.Parameter.empty and n not in values]
    problems += [f"{name} has no default and was not given" for name in required]
    if problems:
        valid = ", ".join(
            f"{n} ({' or '.join(map(_kind_name, _kinds(annotations.get(n, str))))})" for n in parameters
        )
        way = f"--set key=value with: {valid}" if valid else "leave --set out: that function takes none"
        raise UsageError("the settings do not fit the model", problems, [way])
    return result


def _annotations(factory: Callable[..., Any]) -> dict[str, Any]:
    target = factory.__init__ if inspect.isclass(factory) else factory
    try:
        return typing.get_type_hints(target)
    except (NameError, TypeError):  # annotations that only a type checker can resolve
        return {}


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """List what an annotation admits: ``int | None`` -> (int,); ``Literal["a", "b"]`` -> ("a", "b")."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(
            k for part in typing.get_args(annotation) for k in _kinds(part) if part is not type(None)
        )
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)
    return (annotation,)


def _kind_name(kind: Any) -> str:
    return getattr(kind, "__name__", repr(kind))


def _parse(text: str, kinds: tuple[Any, ...]) -> Any:
    for kind in kinds:
        if kind is bool:
            if text.lower() in _BOOLEANS:
                return _BOOLEANS[text.lower()]
        elif kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
        elif kind in (str, Any) or text == str(kind):
            return text
    raise ValueError(text)


_BOOLEANS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
