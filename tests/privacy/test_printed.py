"""Printed epsilons and deltas: never below the number, and formatted in one place."""

import ast
import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import dpvision
from dpvision.privacy.plan import make_plan
from dpvision.privacy.printed import down, duration, one_in, size, up, up_delta, up_to
from dpvision.runs.run import EpsilonMeter
from dpvision.statement.guarantee import headline

from .test_plan import SMALL

SOURCE = Path(dpvision.__file__).parent
FORMATTER = SOURCE / "privacy" / "printed.py"
RNG = np.random.default_rng(0)
NUMBERS = [
    *(10.0 ** RNG.uniform(-12, 9, 2000)).tolist(),
    *RNG.integers(0, 10**7, 500).astype(float).tolist(),
    *(k / 1000 for k in range(3000)),
    5e-324,
    2.57347,
    7.99,
    8.0,
    math.nextafter(8.0, 9.0),
    0.1 + 0.2,
    123456.0,
    1e300,
]


@pytest.mark.parametrize("digits", [None, 0, 1, 2, 4])
def test_no_text_states_less_than_the_number_and_none_a_unit_more(digits: int | None) -> None:
    for x in NUMBERS:
        text = float(up(x, digits).replace(",", ""))
        unit = (
            10.0**-digits
            if digits is not None
            else 10.0 ** (math.floor(math.log10(x)) - 3)
            if x
            else 0.0
        )
        assert x * (1 - 1e-15) <= text < x + unit * (1 + 1e-9) or text == x, (x, text)
        assert up(text, digits) == up(x, digits), "a printed number is printed as itself"


def test_what_is_left_is_rounded_down() -> None:
    for x in NUMBERS:
        assert float(down(x)) <= x * (1 + 1e-15)
        assert float(up(x)) - float(down(x)) <= 1.001e-3 * x


def test_numbers_for_a_script_are_rounded_up_too() -> None:
    for x in NUMBERS:
        assert x * (1 - 1e-15) <= up_to(6, x) <= x * (1 + 1.001e-5)


def test_no_text_states_a_smaller_delta_and_none_a_unit_more() -> None:
    """The headline said 8.33e-6 for 1 / 120,000."""
    for x in NUMBERS:
        text, unit = float(up_delta(x)), 10.0 ** (math.floor(math.log10(x)) - 2) if x else 0.0
        assert x * (1 - 1e-15) <= text <= x + unit * (1 + 1e-9), (x, text)
        assert up_delta(text) == up_delta(x), "a printed number is printed as itself"
        if 1e-300 < x < 1:
            assert 1 / int(one_in(x).removeprefix("1 in ").replace(",", "")) >= x * (1 - 1e-14), x
    assert (up_delta(1e-5), up_delta(1 / 120_000), up_delta(1 / 30_000), up_delta(0.0)) == (
        "1e-5",
        "8.34e-6",
        "3.34e-5",
        "0",
    )
    assert (one_in(1e-5), one_in(1 / 120_000), one_in(0.4)) == (
        "1 in 100,000",
        "1 in 120,000",
        "1 in 2",
    )
    assert "delta 8.34e-6 for" in headline(
        {"epsilon": 1.0, "unit_epsilon": None, "delta": 1 / 120_000}, "record", []
    )


def test_binary_rounding_adds_no_unit() -> None:
    assert (up(0.1 + 0.2, 1), up(7.99, 2), up(math.nextafter(8.0, 9.0)), up(8.0000000001)) == (
        "0.3",
        "7.99",
        "8",
        "8.001",
    )


@pytest.mark.parametrize("x", [math.inf, math.nan, None])
def test_what_is_no_number_is_no_small_one(x: float | None) -> None:
    for digits in (None, 2):
        assert up(x, digits) == up_delta(x) == ("infinity" if x == math.inf else "unknown")


def test_the_line_of_a_running_training_states_no_less_than_is_spent() -> None:
    """It printed 2.57 for 2.57347."""
    plan = make_plan(SMALL)
    meter = EpsilonMeter(plan)
    for steps in range(1, plan.steps + 1):
        spent = plan.spent(steps).epsilon
        assert spent is not None and float(meter.text(steps).removeprefix("epsilon <= ")) >= spent


# One formatter


def is_epsilon(node: ast.expr, known: set[str]) -> bool:
    """Whether an expression is an epsilon by its name, its key, its function's name, or arithmetic
    of such.
    """
    match node:
        case ast.Name(id=name):
            return "epsilon" in name.lower() or name in known
        case ast.Attribute(attr=name):
            return "epsilon" in name.lower()
        case ast.Subscript(value=value, slice=ast.Constant(value=str(name))):
            return "epsilon" in name.lower()
        case ast.Subscript(value=value):
            return is_epsilon(value, known)
        case ast.Call(func=ast.Attribute(attr=name)) | ast.Call(func=ast.Name(id=name)):
            return "epsilon" in name.lower() or name in (
                "at_most",
                "this_run_at_most",
                "unit_at_most",
            )
        case ast.BinOp(left=left, right=right):
            return is_epsilon(left, known) or is_epsilon(right, known)
        case ast.BoolOp(values=values):
            return any(is_epsilon(value, known) for value in values)
        case ast.IfExp(body=body, orelse=other):
            return is_epsilon(body, known) or is_epsilon(other, known)
        case ast.NamedExpr(value=value) | ast.UnaryOp(operand=value):
            return is_epsilon(value, known)
    return False


def epsilons_of(scope: ast.AST) -> set[str]:
    """Names that a function gives to epsilons."""
    known: set[str] = set()
    for _ in range(2):
        for node in ast.walk(scope):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if is_epsilon(
                    value, known
                ):
                    known.add(name)
                case ast.NamedExpr(target=ast.Name(id=name), value=value) if is_epsilon(
                    value, known
                ):
                    known.add(name)
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                    pairs = zip(names, values, strict=False)
                    known |= {
                        name.id
                        for name, value in pairs
                        if isinstance(name, ast.Name) and is_epsilon(value, known)
                    }
    return known


def formatted(tree: ast.AST) -> Iterator[ast.expr]:
    """Expressions that get a format of their own: in an f-string, by format, %, round or
    str.format.
    """
    for node in ast.walk(tree):
        match node:
            case ast.FormattedValue(value=value, format_spec=spec) if spec is not None:
                yield value
            case ast.Call(func=ast.Name(id="format" | "round"), args=[value, *_]):
                yield value
            case ast.Call(
                func=ast.Attribute(value=ast.Constant(value=str()), attr="format"), args=values
            ):
                yield from values
            case ast.BinOp(
                left=ast.Constant(value=str()), op=ast.Mod(), right=ast.Tuple(elts=values)
            ):
                yield from values
            case ast.BinOp(left=ast.Constant(value=str()), op=ast.Mod(), right=value):
                yield value
            case ast.Call(func=ast.Name(id="short" | "shown"), args=[value, *_]):
                yield value
            case ast.Call(func=ast.Name(id="pairs"), args=[ast.Dict(values=values), *_]):
                yield from values


def own_formats(source: str) -> list[str]:
    """Epsilons that Python source formats by itself."""
    tree = ast.parse(source)
    scopes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)] or [tree]
    found = {}
    for scope in [tree, *scopes]:
        known = epsilons_of(scope) if scope is not tree else set()
        found |= {
            (v.lineno, v.col_offset): ast.unparse(v)
            for v in formatted(scope)
            if is_epsilon(v, known)
        }
    return [f"{line}: {text}" for (line, _), text in sorted(found.items())]


def own_deltas(source: str) -> list[str]:
    """Deltas, and products with one, that Python source formats by itself."""
    named = {
        f"{v.lineno}: {ast.unparse(v)}"
        for v in formatted(ast.parse(source))
        if "delta" in ast.unparse(v).lower()
    }
    return sorted(
        text
        for text in named
        if "timedelta" not in text and not re.search(r"\bup_delta\(|\bone_in\(", text)
    )


@pytest.mark.parametrize(
    "source",
    [
        'f"{plan.delta:.3g}"',
        'f"{n * delta:.3g}"',
        "short(account.delta or 0)",
        'pairs({"N x delta": r["n_times_delta"]})',
        'f"{1 / delta:,.0f}"',
    ],
)
def test_a_format_of_ones_own_for_a_delta_is_found(source: str) -> None:
    assert own_deltas(source)


@pytest.mark.parametrize(
    "source",
    [
        'f"{plan.epsilon:.2f}"',
        'f"{a.unit_epsilon or 0.0:.3g}"',
        'f"{total_epsilon(parts):.2f}"',
        '"%.2f" % spent["epsilon"]',
        'format(epsilon, ".4g")',
        '"{:.2f}".format(target_epsilon)',
        "round(epsilon, 2)",
        'f"{meter.at_most(3):.2f}"',
        'def f(plan):\n    got = plan.stated_epsilon\n    return f"{got:.4g}"',
        'f"{epsilon[1] * 2:.2f}"',
    ],
)
def test_a_format_of_ones_own_is_found(source: str) -> None:
    assert own_formats(source)


@pytest.mark.parametrize(
    "source", ['f"{up(plan.epsilon)}"', 'f"epsilon={plan.epsilon}"', 'f"{plan.delta:.3g}"']
)
def test_the_formatter_and_the_whole_number_are_no_format_of_ones_own(source: str) -> None:
    assert not own_formats(source)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, id=str(p.relative_to(SOURCE)))
        for p in sorted(SOURCE.rglob("*.py"))
        if p != FORMATTER
    ],
)
def test_no_module_formats_an_epsilon_or_a_delta_itself(path: Path) -> None:
    assert not own_formats(path.read_text()) and not own_deltas(path.read_text())


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.name) for p in sorted(SOURCE.rglob("*.html"))]
)
def test_no_template_formats_an_epsilon_or_a_delta_itself(path: Path) -> None:
    for printed in re.findall(r"\{\{.*?\}\}", path.read_text()):
        for value, filters in re.findall(
            r"([\w.\[\]\"]*delta\w*)((?:\s*\|\s*\w+(?:\([^)]*\))?)*)", printed
        ):
            assert re.fullmatch(r"\s*\|\s*(up_delta|up\(\d\))", filters) or value in (
                "g.delta_rule",
                "up_delta",
            ), printed
        for value, filters in re.findall(
            r"([\w.\[\]\"]*epsilon\w*)((?:\s*\|\s*\w+(?:\([^)]*\))?)*)", printed
        ):
            assert re.fullmatch(r"(\s*\|\s*up\(\d\))?", filters) or value.startswith("figures."), (
                printed
            )
        assert not re.search(r"format\([^)]*epsilon", printed), printed


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (size(99), "99 bytes"),
        (size(2_764_800), "2.8 MB"),
        (size(1.5e12), "1,500.0 GB"),
        (duration(0.4), "0 s"),
        (duration(89), "89 s"),
        (duration(90), "2 min"),
        (duration(5400), "1.5 h"),
    ],
)
def test_sizes_and_times_have_the_unit_that_fits(text: str, shown: str) -> None:
    assert text == shown
