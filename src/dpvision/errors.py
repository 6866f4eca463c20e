"""The errors a person can meet. Each ends with the remedy; the command line prints them without a
traceback and exits 2.
"""

import errno
import os
import re
from shlex import quote

OPERATOR_ONLY = "operator only: "
"""Comes before what depends on private records wherever it is printed: for whoever holds them,
never to be passed on.
"""


_MARKS = """]:;,.)'">"""
_SCHEME = r"\b((?!file:|local:|memory:)[a-zA-Z][a-zA-Z0-9+.-]{0,30}:/{1,2}"
_USER = re.compile(
    _SCHEME + r")(?:[^\s/?#]{0,1000}@|[^\s/?#:\[]{0,1000}:(?!:|\d*(?:[/?#\s]|$))\S{0,1000}@)"
)
"""User and password of a URL, also of a password with a slash. Of a path two slashes became one."""
_QUERY = re.compile(_SCHEME + r"[^\s?#]{0,4000})[?#](\S*)")
"""Query and fragment of a URL, with the punctuation of the sentence at its end."""


def without_secrets(text: str) -> str:
    """Return a text whose URLs have no user, password, query or fragment: signed addresses and
    passwords are used by whoever reads a log.
    """
    if ":/" not in text:
        return text
    text = _USER.sub(r"\1", text) if "@" in text else text
    return _QUERY.sub(lambda found: found[1] + found[2][len(found[2].rstrip(_MARKS)) :], text)


class DPVisionError(Exception):
    """Base of every error that dpvision raises on purpose.

    Message form: ``where: name=got; expected rule. What to do.`` It goes ``without_secrets``.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(without_secrets(message))


class ConfigError(DPVisionError):
    """A setting is out of range, unknown or inconsistent with another."""


class PrivacyError(DPVisionError):
    """The request would break, or could not prove, the privacy guarantee: refused, never warned
    about.
    """


class DataError(DPVisionError):
    """A source, a store or its index cannot be read, or does not fit what is asked of it."""


class CheckpointError(DPVisionError):
    """A checkpoint or run folder is missing, altered, incomplete or in use."""


def remedy_for(error: BaseException, otherwise: str) -> str:
    """Return what to do about a file that cannot be read or written: its permissions or the limit
    on open files, if they are the reason, else ``otherwise``.
    """
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return "Allow this process more open files: ulimit -n 65536."
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return "That disk is read-only: give a path on another."
    if not isinstance(error, OSError) or error.errno not in (errno.EACCES, errno.EPERM):
        return otherwise
    place = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "."
    place = place if os.path.lexists(place) else os.path.dirname(os.path.abspath(place))
    return (
        f"This user may not use it: have its owner change the permissions (ls -ld {quote(place)})."
    )


class RunStopped(Exception):
    """A signal stopped a run, which is saved; the message says how to go on."""
