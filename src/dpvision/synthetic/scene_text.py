"""Captions of scenes.

Every claim is true of the layout, and every object named is identified uniquely.

Colour and shape are always mentioned and are unique in a scene; size and texture are optional. An
object that was already named is referred to as "the red disc".
"""

from dpvision.synthetic.scene_layout import Draws, Layout, SceneObject

RELATION_PHRASES = {
    "left of": ("left of", "to the left of"),
    "right of": ("right of", "to the right of"),
    "above": ("above", "over"),
    "below": ("below", "under"),
}
LIGHT_PHRASES = {
    "left": "from the left",
    "right": "from the right",
    "top": "from above",
    "bottom": "from below",
}


def make_caption(layout: Layout, draws: Draws) -> str:
    """Return a lower-case English caption (a sentence or a noun phrase) of the layout."""
    order = draws.shuffled(range(len(layout.objects)))
    phrases = {i: _with_article(_describe(layout.objects[i], draws)) for i in order}
    between = {
        (i, j): draws.choice(RELATION_PHRASES[relation]) for i, relation, j in layout.relations
    }

    def again(i: int) -> str:
        return f"the {layout.objects[i].colour} {layout.objects[i].shape}"

    listed = _list_of([phrases[i] for i in order])
    options = [listed, f"a picture of {listed}"]
    if len(order) == 1:
        options = [listed, f"there is {listed}", f"a picture of {listed}", f"{listed} on its own"]
        place = _place(layout.objects[0])
        if place:
            options += [f"{listed} {place}", f"{listed} {place} of the picture"]
    elif len(order) == 2:
        i, j = order
        a, b = phrases[i], phrases[j]
        options += [
            f"{a} {between[i, j]} {b}",
            f"{a} is {between[i, j]} {b}",
            f"there is {a} {between[i, j]} {b}",
            f"{between[i, j]} {b} there is {a}",
            f"{a} and {b}, {again(i)} being {between[i, j]} {again(j)}",
        ]
    elif len(order) == 3:
        i, j, k = order
        a, b, c = phrases[i], phrases[j], phrases[k]
        options += [
            f"three shapes: {listed}",
            f"{a} {between[i, j]} {b} and {between[i, k]} {c}",
            f"{a} is {between[i, j]} {b}, and {c} is {between[k, j]} {again(j)}",
            f"{a} {between[i, j]} {b}, with {c} {between[k, i]} {again(i)}",
            f"{listed}, where {again(i)} is {between[i, k]} {again(k)}",
        ]
    else:
        i, j, k, m = order
        a, b, c, d = (phrases[n] for n in order)
        options += [
            f"four shapes: {listed}",
            f"{a} {between[i, j]} {b}, and {c} {between[k, m]} {d}",
            f"{a} is {between[i, j]} {b}, {c} is {between[k, j]} {again(j)}, and {d} is "
            f"{between[m, i]} {again(i)}",
            f"{listed}, where {again(i)} is {between[i, m]} {again(m)}",
        ]
    ending = draws.choice(
        (
            "",
            "",
            "",
            "",
            "",
            "",
            f", lit {LIGHT_PHRASES[layout.light]}",
            f", on a {layout.background} background",
        )
    )
    return draws.choice(options) + ending


def _describe(obj: SceneObject, draws: Draws) -> str:
    words = []
    if draws.uniform() < 0.6:
        words.append(obj.size)
    if draws.uniform() < (0.2 if obj.texture == "solid" else 0.75):
        words.append(obj.texture)
    return " ".join([*words, obj.colour, obj.shape])


def _with_article(phrase: str) -> str:
    return f"an {phrase}" if phrase[0] in "aeiou" else f"a {phrase}"


def _list_of(phrases: list[str]) -> str:
    return phrases[0] if len(phrases) == 1 else f"{', '.join(phrases[:-1])} and {phrases[-1]}"


def _place(obj: SceneObject) -> str:
    """Return the object's position in the image as text, or "" if it is not clear."""
    column = (
        "left"
        if obj.x < 0.38
        else "right"
        if obj.x > 0.62
        else "middle"
        if 0.42 < obj.x < 0.58
        else ""
    )
    row = (
        "top"
        if obj.y < 0.38
        else "bottom"
        if obj.y > 0.62
        else "middle"
        if 0.42 < obj.y < 0.58
        else ""
    )
    if not column or not row:
        return ""
    if column == row:
        return "in the middle"
    if row == "middle":
        return f"at the {column}"
    return f"at the {row}" if column == "middle" else f"at the {row} {column}"
