"""The statement's JSON schema, and a validator for the keywords that it uses."""

import json
import re
from functools import cache
from importlib import resources
from typing import Any, Literal

Tuning = Literal["none", "public", "charged", "not_covered"]
"""How settings and checkpoint were chosen (``history.tuning`` in the statement)."""

Stop = Literal["independent", "not_declared"]
"""Whether the operator declares that private data had no influence on where a run stopped
(``history.stop`` in the statement).
"""

_KINDS: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}
_KNOWN = {
    "$schema",
    "title",
    "description",
    "type",
    "const",
    "enum",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "minItems",
    "maxItems",
    "pattern",
    "minimum",
    "maximum",
}


@cache
def statement_schema() -> dict[str, Any]:
    """Return the schema of statement.json; docs/statement.schema.json is the same file."""
    return json.loads(
        resources.files("dpvision.statement").joinpath("statement.schema.json").read_text()
    )


def problems(value: Any, schema: dict[str, Any], where: str = "statement") -> list[str]:
    """Return one line per violation of ``schema`` by ``value``; empty if there are none.

    Raises:
        NotImplementedError: the schema uses an unsupported keyword.
    """
    if unknown := schema.keys() - _KNOWN:
        raise NotImplementedError(
            f"schema of {where}: {sorted(unknown)}; expected {sorted(_KNOWN)}. Add the keyword "
            "to dpvision.statement.schema."
        )
    if "const" in schema or "enum" in schema:
        allowed_values = schema.get("enum", [schema.get("const")])
        return (
            []
            if any(
                value == a and isinstance(value, bool) == isinstance(a, bool)
                for a in allowed_values
            )
            else [f"{where}: {value!r}"]
        )
    allowed = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not any(
        isinstance(value, _KINDS[kind]) and (kind == "boolean" or not isinstance(value, bool))
        for kind in allowed
    ):
        return [f"{where}: not {' or '.join(allowed)}"]
    found = []
    if isinstance(value, dict) and "properties" in schema:
        if schema.get("additionalProperties", True) is False:
            found += [f"{where}.{key}: unknown" for key in value if key not in schema["properties"]]
        found += [
            f"{where}.{key}: missing" for key in schema.get("required", []) if key not in value
        ]
        found += [
            p
            for key, inner in schema["properties"].items()
            if key in value
            for p in problems(value[key], inner, f"{where}.{key}")
        ]
    elif isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            found.append(f"{where}: {len(value)} items")
        if "items" in schema:
            found += [
                p
                for i, item in enumerate(value)
                for p in problems(item, schema["items"], f"{where}[{i}]")
            ]
    elif isinstance(value, str):
        if not re.search(schema.get("pattern", ""), value):
            found.append(f"{where}: {value!r} does not match")
    elif isinstance(value, int | float) and not schema.get("minimum", value) <= value <= schema.get(
        "maximum", value
    ):
        found.append(f"{where}: {value} out of range")
    return found
