"""The errors a person can meet. Each ends with the remedy; the command line prints them without a traceback and exits 2."""

OPERATOR_ONLY = "operator only: "
"""Comes before what depends on private records wherever it is printed: for whoever holds them, never to be passed on."""


class DPVisionError(Exception):
    """Base of every error that dpvision raises on purpose.

    Message form: ``where: name=got; expected rule. What to do.``
    """


class ConfigError(DPVisionError):
    """A setting is out of range, unknown or inconsistent with another."""


class PrivacyError(DPVisionError):
    """The request would break, or could not prove, the privacy guarantee: refused, never warned about."""


class DataError(DPVisionError):
    """A source, a store or its index cannot be read, or does not fit what is asked of it."""


class CheckpointError(DPVisionError):
    """A checkpoint or run folder is missing, altered, incomplete or in use."""
