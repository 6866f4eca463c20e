"""Join two lists of names, such as the rows of a table and the files of a folder, without missing a
match and without guessing one.
"""

import unicodedata
from collections import Counter
from collections.abc import Collection

UNMATCHED_FILE = "unmatched.jsonl"
"""File under a store's confidential/: rows without a file, and files without a row."""


def one_form(name: str) -> str:
    """Return a file name in Unicode's NFC: some file systems decompose accents, tables do not."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def folded(name: str) -> str:
    """Return a file name as it is compared without regard to case."""
    return one_form(one_form(name).casefold())


def join_names(rows: Collection[str], files: Collection[str]) -> dict[str, str]:
    """Return the file of each row that has one.

    The name decides in one Unicode form; where two files have that form, the one spelled as the
    row. Case is ignored only for a row whose name misses, and only if one row and one file are
    alike without it.
    """
    alike: dict[str, list[str]] = {}
    for file in files:
        alike.setdefault(one_form(file), []).append(file)
    found = {}
    for row in rows:
        group = alike.get(one_form(row), [])
        if len(group) == 1 or row in group:
            found[row] = group[0] if len(group) == 1 else row
    if len(found) < len(rows):
        rows_alike = Counter(map(folded, rows))
        files_alike: dict[str, list[str]] = {}
        for file in files:
            files_alike.setdefault(folded(file), []).append(file)
        for row in rows:
            group = files_alike.get(folded(row), [])
            if row not in found and len(group) == rows_alike[folded(row)] == 1:
                found[row] = group[0]
    return found
