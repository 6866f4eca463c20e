"""The finished run of the statement's tests, for pages."""

from ..statement.conftest import copy_of, finished_run, small_privacy

__all__ = ["copy_of", "finished_run", "small_privacy"]
