"""Tokenise captions for CIDEr: lower-case words by the rules of the Penn Treebank, without
punctuation.

    >>> words("The dog's ball isn't red.")
    ['the', 'dog', "'s", 'ball', 'is', "n't", 'red']

The reference pipeline runs Stanford's PTBTokenizer 3.4.1 in Java. This module implements the rules
that captions need; docs/caption_measures.md gives the rate of differences.
"""

import re

_ABBREVIATIONS = (
    "mr|mrs|ms|dr|prof|st|jr|sr|vs|etc|inc|co|corp|ltd|dept|ave|blvd|rd|ky|"
    "jan|feb|mar|apr|aug|sept|sep|oct|nov|dec|mon|tue|tues|wed|thu|thurs|fri|"
    "gen|sgt|lt|capt|col|gov|sen|rep|rev|hon|fig|est|ft|mt|ph\\.d"
)
_TOKEN = re.compile(
    rf"""
      https?://\S*[\w/] | www\.\S*\w
    | [\w.+-]+@[\w-]+(?:\.[\w-]+)+                         # addresses
    | [@\#](?=[^\W\d_])\w+                                 # names of users, hash tags
    | (?:[^\W\d_]\.)+[^\W\d_]\.? | (?<!\w)(?:{_ABBREVIATIONS})\.
    | no\.(?=\s*\d) | [^\W\d_]\.(?=\s+\S)                  # u.s. d.c; mr.; an initial
    | 'n' | n't(?!\w) | '(?:s|m|d|re|ve|ll)(?!\w)          # clitics on their own
    | '\d\ds?(?!\w)                                        # '90s
    | \d+(?::\d+)+ | \d+(?:[.,/]\d+)+(?:[^\W_]+)? | \.\d+  # 1,000  10:30  1/2  .5
    | [^\W_]+(?:[-_/.'][^\W_]+)*                           # words, also close-up, and/or, o'clock
    | \.{{2,}} | -{{2,}} | [–—] | ``|'' | \S
    """,
    re.VERBOSE,
)
_CLITIC = re.compile(r"^(.+?)(n't|'(?:s|m|d|re|ve|ll))$")
_KEPT = re.compile(r"^(?:o'\w+|d'\w+|c'mon|ma'am)$")
_PAIRS = {
    "cannot": ("can", "not"),
    "gonna": ("gon", "na"),
    "gotta": ("got", "ta"),
    "wanna": ("wan", "na"),
    "gimme": ("gim", "me"),
    "lemme": ("lem", "me"),
    "'twas": ("'t", "was"),
    "'tis": ("'t", "is"),
}
_BRACKETS = {"(": "-lrb-", ")": "-rrb-", "[": "-lsb-", "]": "-rsb-", "{": "-lcb-", "}": "-rcb-"}
_DROPPED = frozenset(
    [
        "''",
        "'",
        "``",
        "`",
        ".",
        "?",
        "!",
        ",",
        ":",
        "-",
        "--",
        "...",
        ";",
        '"',
        "–",
        "—",
        "…",
        "‘",
        "’",
        "“",
        "”",
    ]
)


def words(caption: str) -> list[str]:
    """Return the words of a caption as the reference passes them to CIDEr.

    Brackets remain, as "-lrb-" and the like: the reference lower-cases them before it looks for
    "-LRB-" to drop.
    """
    found: list[str] = []
    for token in _TOKEN.findall(caption.lower().replace("’", "'").replace("‘", "'")):
        found += _split(token)
    return [
        word for word in found if word not in _DROPPED and not re.fullmatch(r"\.{2,}|-{2,}", word)
    ]


def _split(token: str) -> list[str]:
    if token in _BRACKETS:
        return [_BRACKETS[token]]
    if token in _PAIRS:
        return list(_PAIRS[token])
    clitic = None if _KEPT.match(token) else _CLITIC.match(token)
    return [token] if clitic is None else [*_split(clitic[1]), clitic[2]]
