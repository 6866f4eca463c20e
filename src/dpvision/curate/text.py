"""Normalise captions, and keep those of some languages and lengths."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dpvision.curate.record import Record
from dpvision.data.captions import find_captions, suspicion
from dpvision.errors import ConfigError

NO_CAPTION = "no caption"


@dataclass(frozen=True)
class Caption:
    """Step ``caption``: an image is left out if none of its captions is kept."""

    name: ClassVar[str] = "caption"
    decodes: ClassVar[bool] = False
    languages: tuple[str, ...] = ()
    """ISO 639-1 codes of the languages that are kept, e.g. en de; all if none is given."""
    min_words: int = 1
    """Shortest caption that is kept, in words."""
    max_words: int = 256
    """Longest caption that is kept, in words."""
    keep_suspicious: bool = False
    """Keep captions that are the name of a file, have no letter, or say that there is none."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_words <= self.max_words:
            raise ConfigError(
                f"caption: min_words={self.min_words}, max_words={self.max_words}; expected 1 or "
                "more, and the second not below the first. Use 1 and 256."
            )

    def opened(self) -> Callable[[Sequence[Record]], None]:
        """See ``RecordStep``."""
        language = _identifier() if self.languages else None
        if language is not None and (odd := set(self.languages) - set(language.labels)):
            raise ConfigError(
                f"caption: languages={sorted(odd)}; expected ISO 639-1 codes that py3langid knows: "
                f"{' '.join(sorted(language.labels))}. Use en for English."
            )

        def apply(records: Sequence[Record]) -> None:
            for record in records:
                self._one(record, language)

        return apply

    def _one(self, record: Record, language: Any) -> None:
        captions = find_captions(record.sample.fields)
        found, kept = captions.kept, list[str]()
        record.dropped += [("", reason) for reason in captions.dropped.elements()]
        for text in found:
            reason = self._problem(text, language)
            if reason is None:
                kept.append(text)
            else:
                record.dropped.append((text, reason))
        if not kept:
            reasons = dict.fromkeys(reason for _, reason in record.dropped)
            record.leave_out(f"no caption: {', '.join(sorted(reasons))}" if reasons else NO_CAPTION)
            return
        if len(kept) < len(found):  # the import cleans them in the same way
            record.change_captions(kept)

    def _problem(self, text: str, language: Any) -> str | None:
        words = len(text.split())
        if words < self.min_words:
            return "too short"
        if words > self.max_words:
            return "too long"
        if not self.keep_suspicious and (odd := suspicion(text)):
            return odd
        if language is not None and language.classify(text)[0] not in self.languages:
            return "another language"
        return None


def _identifier() -> Any:
    """Return py3langid's model (Lui and Baldwin 2012), which comes with the package."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise ConfigError(
            "caption: py3langid is not installed; expected it for languages. In a checkout: pip "
            "install '.[curate]'."
        ) from None
    return LanguageIdentifier.from_model_file(MODEL_FILE)
