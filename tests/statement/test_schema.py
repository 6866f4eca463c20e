"""The check against a schema knows every keyword that it is given, or says so."""

from typing import Any

import pytest

from dpvision.statement.schema import problems, statement_schema

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
        "b": {"type": "array", "minItems": 1, "maxItems": 2, "items": {"type": "integer"}},
        "c": {"type": "string", "pattern": "^[0-9a-f]{4}$"},
        "d": {"enum": ["x", 1]},
        "e": {"const": True},
    },
    "required": ["a"],
    "additionalProperties": False,
}


def test_what_fits_has_no_problems() -> None:
    assert problems({"a": 0.5, "b": [1], "c": "0a9f", "d": 1, "e": True}, SCHEMA) == []
    assert problems({"a": None}, SCHEMA) == []


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({}, "a: missing"),
        ({"a": 0, "z": 1}, "z: unknown"),
        ({"a": "0"}, "a: not number or null"),
        ({"a": True}, "a: not number"),
        ({"a": 1.5}, "a: 1.5 out of range"),
        ({"a": float("nan")}, "a: nan out of range"),
        ({"a": 0, "b": []}, "b: 0 items"),
        ({"a": 0, "b": [1, 2, 3]}, "b: 3 items"),
        ({"a": 0, "b": [1.5]}, "b[0]: not integer"),
        ({"a": 0, "c": "xyz"}, "c: 'xyz'"),
        ({"a": 0, "d": True}, "d: True"),
        ({"a": 0, "e": 1}, "e: 1"),
        ([], "not object"),
    ],
)
def test_every_departure_is_found(value: Any, where: str) -> None:
    assert where in "; ".join(problems(value, SCHEMA))


def test_a_keyword_that_is_not_known_is_no_silent_pass() -> None:
    with pytest.raises(NotImplementedError, match="anyOf"):
        problems(1, {"type": "integer", "anyOf": []})


def test_every_keyword_of_the_statements_schema_is_known() -> None:
    def walk(schema: dict[str, Any]) -> None:
        problems(object(), schema)
        for inner in [
            *schema.get("properties", {}).values(),
            *([schema["items"]] if "items" in schema else []),
        ]:
            walk(inner)

    walk(statement_schema())
