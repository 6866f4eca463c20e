"""Mutants of the accounting, the ledger, clipping and noise, drawn at random: do tests fail?

    python benchmarks/mutation_sample.py [--per-file 30] [--seed 0] [--minutes 75] [--json FILE]
    python benchmarks/mutation_sample.py --after FILE [--json FILE]
    python benchmarks/mutation_sample.py --again FILE [--json FILE]
    python benchmarks/mutation_sample.py --page FILE [FILE ...]

A mutant is one change of one place of a file: another comparison, operation or constant, a negated
condition, an argument or a statement (also a refusal) left out. Annotations, texts of errors and
code for a GPU are left alone. The tests of that file must fail within a minute. With the same
``--per-file`` and ``--seed``, ``--after`` goes on where the time of FILE was over, and its result
has the lines of FILE too; ``--again`` tries the survivors of FILE with other tests. ``--page``
writes the table of docs/audits.md. Nothing has to be installed. Each mutant is tried on a copy of
the tree, in a fork of a process that has imported torch, SciPy and pytest, because a new process
for each would take most of the time.

Lines of a result: the file and line, the change, whether it was killed, timed out or survived, and
the seconds.
"""

import argparse
import ast
import contextlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import ROOT, row, write_result

PAGE = ROOT / "docs" / "audits.md"
BEGIN, END = (
    "<!-- mutation: written by benchmarks/mutation_sample.py -->",
    "<!-- end of mutation -->",
)
LIMIT_S, LIMIT_AGAIN_S, LIMIT_WHOLE_S = 60, 180, 600
"""Of processor time; four times as long by the clock, for a test that waits. The slowest tests are
left out, so that the others take at most half of it.
"""
MEMORY = 12 * 2**30
"""Bytes, against a mutant whose grids fill the machine."""
PACKAGES = ("torch", "numpy", "scipy", "dp-accounting", "pytest")
ON_GPU = ("_away", "_on_gpu", "_words")
LEDGER = ("privacy/test_ledger.py", "attacks/test_ledger.py", "mutants/test_ledger_mutants.py")
NOISE = ("privacy/test_mechanism.py", "dp/test_noise.py", "mutants/test_noise_mutants.py")
CLIP = ("dp/test_clip.py", "dp/test_clip_rounding.py", "mutants/test_clip_mutants.py")
PLAN = ("privacy/test_plan.py", "privacy/test_sampling.py", "privacy/test_selection.py")
TOTALS = ("attacks/test_figures.py", "attacks/test_lineage.py", "attacks/test_stopping.py")
ACCOUNTANT = "privacy/test_accountant.py"
MISUSE = "attacks/test_misuse.py"
COMPOSE = "privacy/test_second_accountant.py::test_runs_of_different_kinds_compose"
TESTS = {
    "privacy/plan.py": (*PLAN, "privacy/test_loss_distribution.py"),
    "privacy/dp_plan.py": (*PLAN, *NOISE[:2], "attacks/test_stopping.py"),
    "privacy/accountant.py": (*PLAN, ACCOUNTANT, "privacy/test_claims.py"),
    "privacy/composition.py": (*TOTALS, COMPOSE),
    "privacy/ledger.py": LEDGER,
    "privacy/ledger_format.py": LEDGER,
    "dp/clip.py": CLIP,
    "dp/noise.py": NOISE,
}
MORE = {
    "privacy/plan.py": (
        PLAN[0],
        PLAN[2],
        "attacks/test_limits.py::test_the_target_of_a_person_is_kept_and_delta_is_judged_by_people",
    ),
    "privacy/dp_plan.py": (
        *PLAN[:1],
        "attacks/test_batches.py",
        "attacks/test_heads.py::test_no_plan_has_a_clipping_norm_whose_bound_fails",
        f"{NOISE[2]}::test_record_in_every_sum",
        f"{NOISE[2]}::test_step_released_again",
        "mutants/test_sampling_mutants.py::test_batches_in_turn",
    ),
    "privacy/accountant.py": (
        *(TOTALS[0], PLAN[2]),
        f"{ACCOUNTANT}::test_the_rates_of_one_pair_are_those_of_its_two_lines",
        f"{ACCOUNTANT}::test_a_units_epsilon_is_at_most_a_thousandth_above_that_of_a_finer_grid",
    ),
    "privacy/composition.py": TOTALS[:1],
    "privacy/ledger.py": (
        *LEDGER[:1],
        "attacks/test_lineage.py::test_an_entry_taken_out_of_a_manifest_is_noticed",
    ),
    "privacy/ledger_format.py": LEDGER[:1],
    "dp/clip.py": (
        f"{CLIP[0]}::test_unknown_settings_are_refused",
        f"{CLIP[0]}::test_tied_parameter_stands_once_and_frozen_ones_not_at_all",
        f"{CLIP[0]}::test_host_rows_are_those_of_the_batch",
        "attacks/test_precision.py",
        "attacks/test_reference_bits.py",
        "dp/test_scale.py::test_scale_is_the_largest_power_of_two_less_headroom",
    ),
    "dp/noise.py": (
        NOISE[1],
        f"{MISUSE}::test_the_sum_or_the_batch_of_a_step_is_released_in_no_other_step",
    ),
}
"""Tests for survivors: of other packages, and those with tests that were added for them."""
COMPARISONS: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.Is: ast.IsNot(),
    ast.IsNot: ast.Is(),
    ast.In: ast.NotIn(),
    ast.NotIn: ast.In(),
}
OPERATIONS: dict[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(),
    ast.Sub: ast.Add(),
    ast.Mult: ast.Div(),
    ast.Div: ast.Mult(),
    ast.FloorDiv: ast.Mult(),
    ast.Mod: ast.Mult(),
    ast.Pow: ast.Mult(),
}
SWAPPED = {"min": "max", "max": "min", "floor": "ceil", "ceil": "floor", "exp": "expm1"}
SWAPPED |= {"log1p": "log", "any": "all", "all": "any"}


def changes(node: ast.AST) -> Iterator[str]:
    """Yield the texts that may replace a node."""
    text = ast.unparse(node)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = COMPARISONS[type(node.ops[0])]
        yield f"({ast.unparse(ast.Compare(node.left, [other], node.comparators))})"
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        yield f"({ast.unparse(ast.BinOp(node.left, OPERATIONS[type(node.op)], node.right))})"
    elif isinstance(node, ast.BoolOp):
        joined = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield f"({ast.unparse(ast.BoolOp(joined, node.values))})"
    elif isinstance(node, ast.UnaryOp):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield f"{node.value + 1}" if isinstance(node.value, int) else f"({node.value} * 1.5)"
    elif isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        if name in SWAPPED:
            called = ast.unparse(node.func).removesuffix(name) + SWAPPED[name]
            yield called + text[len(ast.unparse(node.func)) :]
        for left_out in node.keywords:
            kept = [k for k in node.keywords if k is not left_out]
            yield ast.unparse(ast.Call(node.func, node.args, kept))
    elif isinstance(node, ast.Raise | ast.AugAssign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield "pass"


def inside(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of which mutants are made."""
    if isinstance(node, ast.FunctionDef) and node.name in ON_GPU:
        return
    yield node
    if isinstance(node, ast.Raise | ast.JoinedStr):
        return
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from inside(child)


def mutants(source: str) -> list[tuple[int, str, str]]:
    """Return the line, the change and the new source of each mutant of a file."""
    lines = source.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:i])) for i in range(len(lines))]
    found = []
    for node in inside(ast.parse(source)):
        tests = [node.test] if isinstance(node, ast.If | ast.IfExp) else []
        texts = [(t, f"(not ({ast.unparse(t)}))") for t in tests]
        for at, new in [*texts, *((node, new) for new in changes(node))]:
            first = starts[at.lineno - 1] + at.col_offset
            last = starts[at.end_lineno - 1] + at.end_col_offset
            whole = source.encode()
            changed = (whole[:first] + new.encode() + whole[last:]).decode()
            found.append((at.lineno, f"{ast.unparse(at)} -> {new}".replace("\n", " "), changed))
    return found


class Watch:
    """Plugin of pytest: fast tests first, the slowest left out, and each test's seconds and
    failures into a file.
    """

    def __init__(self, told: Path, seconds: dict[str, float], most_s: float) -> None:
        self.told, self.seconds, self.found = told, seconds, Counter[str]()
        self.most_s = most_s
        self.failed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        def seconds(item: Any) -> float:
            return self.seconds.get(item.nodeid, 0.0)

        items.sort(key=seconds)
        sums = itertools.accumulate(map(seconds, items))
        items[:] = [item for item, sum_s in zip(items, sums, strict=True) if sum_s <= self.most_s]
        of_file = Counter[str]()
        for item in items:
            of_file[str(item.path)] += seconds(item)  # fixtures of a file are made once
        items.sort(key=lambda i: (of_file[str(i.path)], str(i.path), seconds(i)))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.found[report.nodeid] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.told.write_text(json.dumps([dict(self.found), self.failed]))


def tried(work: Path, tests: list[str], seconds: dict[str, float], limit_s: float) -> str:
    """Run tests on the sources in ``work`` in a fork; return "survived", "killed" or "timed out".
    ``work``/told.json has the seconds and failures.
    """
    import pytest

    (work / "told.json").write_text("[{}, []]")
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        log = os.open(work / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.path.insert(0, str(work / "src"))
        os.environ["PYTHONPATH"] = str(work / "src")
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s), int(limit_s)))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        if seconds:
            # Compiled files are told apart by second and size, which two mutants may share.
            sys.dont_write_bytecode = True
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        os.chdir(work)
        options = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={work / 'temporary'}"]
        status = pytest.main(
            [*options, *tests], plugins=[Watch(work / "told.json", seconds, limit_s / 2)]
        )
        os._exit(int(status))
    end = time.monotonic() + 4 * limit_s
    status = None
    while status is None and time.monotonic() < end:
        done, code = os.waitpid(child, os.WNOHANG)
        status = code if done else None
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # also processes that the tests left
    if status is None:
        os.waitpid(child, 0)
    if status in (None, signal.SIGXCPU, signal.SIGKILL):
        return "timed out"
    return "killed" if status else "survived"


def run(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Try the sampled mutants, file by file in turn; return a line for each, after those of
    ``--after``.
    """
    import dp_accounting  # noqa: F401
    import scipy.integrate  # noqa: F401
    import torch

    torch.set_num_threads(1)
    end = time.monotonic() + 60 * asked.minutes
    file = asked.again or asked.after
    before: list[dict[str, Any]] = json.loads(file.read_text())["rows"] if file else []
    survivors = {(r["case"], r["variant"]) for r in before if r["metric"] != "killed"}
    rows = before if asked.after else []
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        shutil.copy(ROOT / "pyproject.toml", work)
        for folder in ("src", "tests", "docs", "benchmarks", "examples", "scripts"):
            shutil.copytree(ROOT / folder, work / folder)
        queue: list[tuple[int, str, list[str], dict[str, float], tuple[int, str, str]]] = []
        for name, files in TESTS.items():
            source = (ROOT / "src" / "dpvision" / name).read_text()
            every = mutants(source)
            sample = random.Random(asked.seed).sample(every, asked.per_file)
            if asked.again:
                sample = [m for m in sample if (f"{name}:{m[0]}", m[1]) in survivors]
            elif asked.after:  # mutants are tried in the order in which they are drawn
                if row(name, "all mutants", "number", [len(every)]) not in before:
                    sys.exit(f"{asked.after}: {name} has changed since. Begin anew.")
                sample = sample[sum(r["case"].startswith(f"{name}:") for r in before) :]
            tests = [f"tests/{file}" for file in (MORE[name] if asked.again else files)]
            if not sample or (asked.only and name not in asked.only):
                continue
            began = time.monotonic()
            if tried(work, tests, {}, LIMIT_WHOLE_S) != "survived":
                sys.exit(f"{name}: its tests fail without a mutant.\n{(work / 'log').read_text()}")
            if not asked.after:
                rows.append(row(name, "no mutant", "seconds", [time.monotonic() - began]))
                rows.append(row(name, "all mutants", "number", [len(every)]))
            print(name, len(every), f"{time.monotonic() - began:.1f} s", flush=True)
            seconds = json.loads((work / "told.json").read_text())[0]
            queue += [(i, name, tests, seconds, mutant) for i, mutant in enumerate(sample)]
        for _, name, tests, seconds, (line, change, source) in sorted(queue, key=lambda q: q[:2]):
            if time.monotonic() > end:
                break
            changed = work / "src" / "dpvision" / name
            own = changed.read_text()
            changed.write_text(source)
            began = time.monotonic()
            found = tried(work, tests, seconds, LIMIT_AGAIN_S if asked.again else LIMIT_S)
            changed.write_text(own)
            rows.append(row(f"{name}:{line}", change, found, [time.monotonic() - began]))
            failed = json.loads((work / "told.json").read_text())[1]
            print(f"{name}:{line}", change, found, *failed[:1], flush=True)
    return rows


def write_page(results: list[Path]) -> None:
    """Write the table: the tries of the first result, and survivors killed in the others."""
    first, *again = [json.loads(path.read_text())["rows"] for path in results]
    later = {
        (r["case"], r["variant"])
        for rows in again
        for r in rows
        if r["metric"] in ("killed", "timed out")
    }
    lines = [
        "| file | possible | tried | killed | out of time | killed by other tests | survived |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    total = Counter[str]()
    for name in TESTS:
        number = sum(r["value"] for r in first if (r["case"], r["metric"]) == (name, "number"))
        found = Counter(
            "others"
            if r["metric"] != "killed" and (r["case"], r["variant"]) in later
            else r["metric"]
            for r in first
            if r["case"].startswith(name + ":")
        )
        of = Counter(possible=round(number), tried=found.total(), killed=found["killed"])
        of.update(late=found["timed out"], others=found["others"], left=found["survived"])
        total.update(of)
        lines.append(f"| `{name}` | {' | '.join(map(str, of.values()))} |")
    lines.append(f"| all | {' | '.join(map(str, total.values()))} |")
    text = PAGE.read_text()
    head, tail = text[: text.index(BEGIN)], text[text.index(END) :]
    PAGE.write_text(f"{head}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{tail}")


def main() -> None:
    """Parse the command line and do one of the three forms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per-file", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=75.0)
    parser.add_argument("--only", nargs="*", choices=list(TESTS))
    parser.add_argument("--after", type=Path)
    parser.add_argument("--again", type=Path)
    parser.add_argument("--page", type=Path, nargs="+")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.page:
        write_page(asked.page)
        return
    write_result(asked.json, "mutation_sample", run(asked), packages=PACKAGES)


if __name__ == "__main__":
    main()
