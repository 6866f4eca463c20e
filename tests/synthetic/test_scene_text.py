"""The sentences are parsed by a grammar of their own, and every claim is compared with the
scene.
"""

import re

import pytest

from dpvision.synthetic.scenes import Scene, SceneObject, make_scene

NOUN = re.compile(
    r"\b(a|an|the) (?:(small|large) )?(?:(solid|striped|dotted|checked) )?"
    r"(red|orange|yellow|green|cyan|blue|purple|pink|white|black) "
    r"(disc|square|triangle|diamond|ring|cross|star|heart)\b"
)
RELATION = r"(to the left of|left of|to the right of|right of|above|over|below|under)"
PLACE = (
    r"(?: (in the middle|at the (?:top|bottom|left|right|top left|top right|bottom left|"
    r"bottom right))(?: of the picture)?)?"
)
ENDING = re.compile(
    r"(?:, lit from (the left|the right|above|below)|, on a (pale|dark) background)$"
)
LIGHT = {"the left": "left", "the right": "right", "above": "top", "below": "bottom"}
NUM = 4000


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    return [make_scene(i, 16) for i in range(NUM)]


def test_every_claim_of_every_sentence_is_true(scenes: list[Scene]) -> None:
    num_claims = 0
    for scene in scenes:
        skeleton, named = _resolve_nouns(scene)
        assert named == set(range(len(scene.objects))), scene.caption
        ending = ENDING.search(skeleton)
        if ending:
            light, background = ending.groups()
            assert light is None or LIGHT[light] == scene.light
            assert background is None or background == scene.background
            skeleton = skeleton[: ending.start()]
        rest, claims = _claims(skeleton)
        for i, relation, j in claims:
            assert _holds(scene.objects[int(i)], relation, scene.objects[int(j)]), scene.caption
        num_claims += len(claims)
        # Everything has been understood: what is left is a list of objects.
        match = re.fullmatch(
            rf"(?:there is |a picture of |(three|four) shapes: )?"
            rf"O\d(?:(?:, | and |, and |, with |, where )O\d)*"
            rf"(?: on its own)?{PLACE}",
            rest,
        )
        assert match, (scene.caption, rest)
        assert match[1] is None or {"three": 3, "four": 4}[match[1]] == len(scene.objects)
        if match[2]:
            assert _is_at(scene.objects[0], match[2]), scene.caption
    assert num_claims > NUM / 2


def test_sentences_have_many_forms(scenes: list[Scene]) -> None:
    forms = {re.sub(r"O\d", "O", _resolve_nouns(scene)[0]) for scene in scenes}
    assert len(forms) > 300
    assert len({scene.caption for scene in scenes}) > 0.85 * NUM


def test_no_attribute_is_always_or_never_said(scenes: list[Scene]) -> None:
    first = [NOUN.search(scene.caption) for scene in scenes]
    for group in (2, 3):
        share = sum(m is not None and m[group] is not None for m in first) / NUM
        assert 0.4 < share < 0.8


def _resolve_nouns(scene: Scene) -> tuple[str, set[int]]:
    """The sentence with O0, O1 ... in place of the objects it names, checking articles, attributes
    and that each name is unique.
    """
    named: set[int] = set()

    def number(match: re.Match[str]) -> str:
        article, size, texture, colour, shape = match.groups()
        found = [
            i for i, obj in enumerate(scene.objects) if (obj.colour, obj.shape) == (colour, shape)
        ]
        assert len(found) == 1, scene.caption
        obj = scene.objects[found[0]]
        assert size in (None, obj.size) and texture in (None, obj.texture), scene.caption
        if article == "the":
            assert found[0] in named, scene.caption
        else:
            assert found[0] not in named, scene.caption
            assert (article == "an") == (match[0].split()[1][0] in "aeiou"), scene.caption
        named.add(found[0])
        return f"O{found[0]}"

    return NOUN.sub(number, scene.caption), named


def _claims(skeleton: str) -> tuple[str, list[tuple[str, str, str]]]:
    """Claims (i, relation, j), and the sentence with the claims shortened to their objects."""
    claims: list[tuple[str, str, str]] = []

    def inverted(match: re.Match[str]) -> str:
        relation, j, i = match.groups()
        claims.append((i, relation, j))
        return f"O{i}, O{j}"

    def joined(match: re.Match[str]) -> str:
        i, first, j, second, k = match.groups()
        claims.extend([(i, first, j), (i, second, k)])
        return f"O{i}, O{j}, O{k}"

    def plain(match: re.Match[str]) -> str:
        i, relation, j = match.groups()
        claims.append((i, relation, j))
        return f"O{i}, O{j}"

    skeleton = re.sub(rf"^{RELATION} O(\d) there is O(\d)$", inverted, skeleton)
    skeleton = re.sub(rf"O(\d) {RELATION} O(\d) and {RELATION} O(\d)", joined, skeleton)
    return re.sub(rf"O(\d) (?:is |being )?{RELATION} O(\d)", plain, skeleton), claims


def _holds(a: SceneObject, relation: str, b: SceneObject) -> bool:
    dx, dy = b.x - a.x, b.y - a.y
    along = {"left": dx, "right": -dx, "above": dy, "over": dy, "below": -dy, "under": -dy}[
        relation.replace("to the ", "").split()[0]
    ]
    return along >= 0.15 and along >= max(abs(dx), abs(dy))


def _is_at(obj: SceneObject, place: str) -> bool:
    words = set(place.split())
    column = "left" if obj.x < 0.4 else "right" if obj.x > 0.6 else "middle"
    row = "top" if obj.y < 0.4 else "bottom" if obj.y > 0.6 else "middle"
    return {column, row} - {"middle"} == words & {"left", "right", "top", "bottom"} and (
        "middle" not in words or column == row == "middle"
    )
