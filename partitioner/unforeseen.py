"""Exceptions that nobody foresaw: errors of ours, which begin with the versions that were not tried, if there are any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cost_models.errors import InternalError, PartitionerError
from cost_models.tried import untried_versions


@contextmanager
def versions_named() -> Iterator[None]:
    """Let an exception pass as it is, or as an InternalError where something is installed that was not tried.

    Decorates what users call.
    """
    try:
        yield
    except PartitionerError:
        raise
    except Exception as error:
        if not untried_versions():
            raise
        raise internal_error(error, "install versions that are known good") from error


def internal_error(error: Exception, suggestion: str) -> InternalError:
    """Say an exception as an error of ours."""
    return InternalError(f"{type(error).__name__}: {error}", suggestions=[suggestion])
