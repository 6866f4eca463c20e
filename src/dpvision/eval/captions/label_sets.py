"""Label sets for zero-shot classification: CIFAR's class names, a store's names, or a file with
synonyms.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpvision.data.import_labels import canonical
from dpvision.data.store import Store
from dpvision.errors import ConfigError, DataError
from dpvision.eval.captions.settings import PROMPT

_CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100 = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
    camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile
    cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp
    lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom
    oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
    possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake
    spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor
    train trout tulip turtle wardrobe whale willow_tree wolf woman worm"""
_WORDNET_ID = re.compile(r"n\d{8}")
BUILT_IN = {"cifar10": tuple(_CIFAR10.split()), "cifar100": tuple(_CIFAR100.split())}
"""Class names in the publishers' spelling and order."""


@dataclass(frozen=True)
class LabelSet:
    """Strings of each class, in the order of the labels."""

    name: str
    classes: tuple[tuple[str, ...], ...]
    """One or more strings per class. A string may stand for several classes, as "crane" does in
    ImageNet: as an answer it is right for each of them.
    """

    def __post_init__(self) -> None:
        for label, strings in enumerate(self.classes):
            if not strings or not all(strings):
                raise DataError(
                    f"labels: {self.name}: class {label} has an empty string; expected a name "
                    "for each. Give it one."
                )
        if len(self.classes) < 2:
            raise DataError(
                f"labels: {self.name}: {len(self.classes)} classes; expected two or more. Add "
                "classes, one per line."
            )
        if len({frozenset(map(str.lower, strings)) for strings in self.classes}) < 2:
            raise DataError(
                f"labels: {self.name}: all {len(self.classes)} classes have the strings "
                f"{', '.join(self.classes[0])}; expected different ones. Rename some."
            )


def load_label_set(name: str, store: Store) -> LabelSet:
    """Load the label set of a name for a store's labels.

    Args:
        name: "store" for the store's class names, "cifar10", "cifar100", or a file. A text file has
            one line per class in the order of the labels, synonyms separated by commas. JSON is a
            list in that order, or an object from class names or numbers; a class is such a line, or
            a list of strings.
        store: labelled; its class names, if any, must match the set.

    Raises:
        ConfigError: no such set or file.
        DataError: the file cannot be read, or its classes differ from the store's.
    """
    if name == "store":
        if store.label_names is None:
            raise DataError(
                f"labels: {store.path} has no class names; expected some. Give a file with one "
                "line per class."
            )
        return LabelSet(
            f"{store.path.name}'s own", tuple((_spoken(label),) for label in store.label_names)
        )
    if name in BUILT_IN:
        found = LabelSet(name, tuple((_spoken(label),) for label in BUILT_IN[name]))
        if store.label_names is not None and [_spoken(label) for label in store.label_names] != [
            c[0] for c in found.classes
        ]:
            raise DataError(
                f"labels: {name} and {store.path} have other classes, or another order "
                f"({', '.join(store.label_names[:3])}, ...); expected "
                f"{', '.join(BUILT_IN[name][:3])}, ... Import the data set with --dataset "
                f"{name}, or use --zero-shot store."
            )
        return found
    if not Path(name).is_file():
        raise ConfigError(
            f"labels: {name!r}; expected store, {', '.join(BUILT_IN)} or a file with one line "
            "per class. Use --zero-shot store."
        )
    found = LabelSet(Path(name).name, _read_classes(Path(name), store.label_names))
    if store.label_names is not None and len(store.label_names) != len(found.classes):
        raise DataError(
            f"labels: {name} has {len(found.classes)} classes; expected "
            f"{len(store.label_names)}, as {store.path}, in the same order. Write one line per "
            "class of the store."
        )
    return found


def prompted(
    labels: LabelSet, prompt: str = PROMPT, *, match_article: bool = False
) -> list[list[str]]:
    """Return the captions of each class: the prompt followed by each string.

    Args:
        match_article: whether a prompt that ends in "a" uses "an" before a, e, i, o, u. The paper
            always uses "a".

    Raises:
        ConfigError: an empty prompt.
    """
    prompt = " ".join(prompt.split())
    if not prompt:
        raise ConfigError(
            f"zero-shot: prompt={prompt!r}; expected text before the label. Use {PROMPT!r}."
        )
    an = f"{prompt}n" if match_article and prompt.split()[-1] == "a" else prompt
    return [
        [f"{an if string[0].lower() in 'aeiou' else prompt} {string}" for string in strings]
        for strings in labels.classes
    ]


def _spoken(name: str) -> str:
    return " ".join(name.replace("_", " ").split()).lower()


def _read_classes(path: Path, names: Sequence[str] | None) -> tuple[tuple[str, ...], ...]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"labels: {path}: {error}; expected a text file in UTF-8. Check the path, or convert "
            "the file."
        ) from None
    if path.suffix.lower() == ".json" or text.lstrip()[:1] in ("[", "{"):
        return _of_json(path, text, names)
    lines = text.splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    return tuple(_strings(path, f"line {number}", line) for number, line in enumerate(lines, 1))


def _of_json(path: Path, text: str, names: Sequence[str] | None) -> tuple[tuple[str, ...], ...]:
    try:
        found = json.loads(
            text, object_pairs_hook=list
        )  # of an object, pairs: a key may stand twice
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"labels: {path}: {error}; expected JSON. Correct the file, or write one class per "
            "line."
        ) from None
    if isinstance(found, list) and found and text.lstrip().startswith("{"):
        found = _in_order(path, found, names)
    if not isinstance(found, list):
        raise DataError(
            f"labels: {path}: {type(found).__name__}; expected a list, or an object from classes "
            "to names. Write one."
        )
    return tuple(_strings(path, f"class {label}", entry) for label, entry in enumerate(found))


def _in_order(path: Path, pairs: list[tuple[str, Any]], names: Sequence[str] | None) -> list[Any]:
    """Return the entries of an object in the order of the labels: by the store's class names, or by
    class numbers 0, 1, ...
    """
    keys = [canonical(key) for key, _ in pairs]
    own = [canonical(name) for name in names or ()]
    by_name = bool(set(keys) & set(own))
    wanted = own if by_name else [str(number) for number in range(len(keys))]
    missing, strange = (
        [key for key in wanted if key not in keys],
        [key for key in keys if key not in wanted],
    )
    twice = [key for key in dict.fromkeys(keys) if keys.count(key) > 1]
    if missing or strange or twice:
        rule = (
            f"the store's {len(own)} class names"
            if by_name
            else f"class numbers 0 to {len(keys) - 1}, or the store's class names"
        )
        wrong = (
            f"{twice[0]!r} twice"
            if twice
            else f"{strange[0]!r}"
            if strange
            else f"nothing for {missing[0]!r}"
        )
        raise DataError(
            f"labels: {path} has {wrong}; expected as keys {rule}, each once. Correct the keys."
        )
    entry_of = dict(zip(keys, (entry for _, entry in pairs), strict=True))
    return [entry_of[key] for key in wanted]


def _strings(path: Path, where: str, entry: Any) -> tuple[str, ...]:
    """Return the strings of a class: parts of a text between commas, or the items of a list.

    Underscores are blanks. A WordNet id beside a name, as in Keras's ``imagenet_class_index.json``,
    is left out.
    """
    parts = entry.split(",") if isinstance(entry, str) else entry
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise DataError(
            f"labels: {path}: {where} is {entry!r}; expected a name, or a list of names. Correct "
            "the entry."
        )
    spoken = dict.fromkeys(
        string for part in parts if (string := " ".join(part.replace("_", " ").split()))
    )
    strings = tuple(string for string in spoken if not _WORDNET_ID.fullmatch(string)) or tuple(
        spoken
    )
    if not strings:
        raise DataError(
            f"labels: {path}: {where} is empty; expected a class name. Remove it, or add the name."
        )
    return strings
