"""Label sets for zero-shot classification: CIFAR's class names, a store's names, or a file with synonyms."""

from dataclasses import dataclass
from pathlib import Path

from dpvision.data.store import Store
from dpvision.errors import ConfigError, DataError
from dpvision.eval.captions.settings import PROMPT

_CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100 = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle caterpillar cattle
    chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house
    kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange
    orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal
    shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
    tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"""
BUILT_IN = {"cifar10": tuple(_CIFAR10.split()), "cifar100": tuple(_CIFAR100.split())}
"""Class names in the publishers' spelling and order."""


@dataclass(frozen=True)
class LabelSet:
    """Strings of each class, in the order of the labels."""

    name: str
    classes: tuple[tuple[str, ...], ...]
    """One or more strings per class, all different between classes."""

    def __post_init__(self) -> None:
        owner: dict[str, int] = {}
        for label, strings in enumerate(self.classes):
            if not strings or not all(strings):
                raise DataError(f"labels: {self.name}: class {label} has an empty string; expected a name for each class. Give it one.")
            for string in strings:
                other = owner.setdefault(string.lower(), label)
                if other != label:
                    raise DataError(
                        f"labels: {self.name}: {string!r} stands for class {other} ({', '.join(self.classes[other])}) and class {label} "
                        f"({', '.join(strings)}); expected different strings. Rename one of them."
                    )
        if len(self.classes) < 2:
            raise DataError(f"labels: {self.name}: {len(self.classes)} classes; expected two or more. Add classes, one per line.")


def load_label_set(name: str, store: Store) -> LabelSet:
    """Load the label set of a name for a store's labels.

    Args:
        name: "store" for the store's class names, "cifar10", "cifar100", or a text file: one line per class in the order of the labels,
            synonyms separated by commas.
        store: labelled; its class names, if any, must match the set.

    Raises:
        ConfigError: no such set or file.
        DataError: the file cannot be read; two classes share a string; the classes differ from the store's.
    """
    if name == "store":
        if store.label_names is None:
            raise DataError(f"labels: {store.path} has no class names; expected some. Give a file with one line per class.")
        return LabelSet(f"{store.path.name}'s own", tuple((_spoken(label),) for label in store.label_names))
    if name in BUILT_IN:
        found = LabelSet(name, tuple((_spoken(label),) for label in BUILT_IN[name]))
        if store.label_names is not None and [_spoken(label) for label in store.label_names] != [c[0] for c in found.classes]:
            raise DataError(
                f"labels: {name} and {store.path} have other classes, or another order ({', '.join(store.label_names[:3])}, ...); expected "
                f"{', '.join(BUILT_IN[name][:3])}, ... Import the data set with --dataset {name}, or use --zero-shot store."
            )
        return found
    if not Path(name).is_file():
        raise ConfigError(
            f"labels: {name!r}; expected store, {', '.join(BUILT_IN)} or a file with one line per class. Use --zero-shot store."
        )
    found = LabelSet(Path(name).name, _read_classes(Path(name)))
    if store.label_names is not None and len(store.label_names) != len(found.classes):
        raise DataError(
            f"labels: {name} has {len(found.classes)} classes; expected {len(store.label_names)}, as {store.path}, in the same order. "
            "Write one line per class of the store."
        )
    return found


def prompted(labels: LabelSet, prompt: str = PROMPT, *, match_article: bool = False) -> list[list[str]]:
    """Return the captions of each class: the prompt followed by each string.

    Args:
        match_article: whether a prompt that ends in "a" uses "an" before a, e, i, o, u. The paper always uses "a".

    Raises:
        ConfigError: an empty prompt.
    """
    prompt = " ".join(prompt.split())
    if not prompt:
        raise ConfigError(f"zero-shot: prompt={prompt!r}; expected text before the label. Use {PROMPT!r}.")
    an = f"{prompt}n" if match_article and prompt.split()[-1] == "a" else prompt
    return [[f"{an if string[0].lower() in 'aeiou' else prompt} {string}" for string in strings] for strings in labels.classes]


def _spoken(name: str) -> str:
    return " ".join(name.replace("_", " ").split()).lower()


def _read_classes(path: Path) -> tuple[tuple[str, ...], ...]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"labels: {path}: {error}; expected a text file in UTF-8. Check the path, or convert the file.") from None
    while lines and not lines[-1].strip():
        lines.pop()
    return tuple(_strings(path, number, line) for number, line in enumerate(lines, 1))


def _strings(path: Path, number: int, line: str) -> tuple[str, ...]:
    strings = tuple(dict.fromkeys(string for part in line.split(",") if (string := " ".join(part.split()))))
    if not strings:
        raise DataError(f"labels: {path}: line {number} is empty; expected a class name. Remove the line, or add the name.")
    return strings
