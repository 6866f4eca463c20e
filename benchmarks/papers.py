"""The rows of the papers' tables and figures (ViP, DP-Cap, DP transfer): run their miniatures, and
write docs/papers.md.

    python benchmarks/papers.py --list
    python benchmarks/papers.py --rows transfer-f1b,vip-t3-base --data DATA [--work DIR] [--dry-run]
    python benchmarks/papers.py --page

papers.json holds the papers' rows, and for each figure of ours the result it stands in. --rows runs
the miniatures of those rows, each once; what DIR keeps (stores, runs, features, scores) is used
again, so that an interrupted miniature goes on. A result is written to benchmarks/results under the
date; --page and the tests take the newest. DATA has a folder per public image set (cifar10,
eurosat), each with train.parquet and test.parquet.
"""

import argparse
import datetime
from importlib import import_module
from pathlib import Path

from common import RESULTS, Work, write_result
from papers_page import FACTS, PAGE, ROWS, here, page, results_of, state

from dpvision.errors import ConfigError, DPVisionError

PACKAGES = ("dpvision", "torch", "numpy", "dp-accounting")


def asked(rows: list[str]) -> list[str]:
    """Return the results that the miniatures of these rows make, each once.

    Raises:
        ConfigError: an unknown row, or one without a miniature.
    """
    keys: dict[str, None] = {}
    for row in rows:
        if row not in ROWS:
            raise ConfigError(f"papers: --rows {row}; expected rows of --list. Correct the name.")
        found = [key for key in results_of(row) if "module" in FACTS["results"][key]]
        if not found:
            raise ConfigError(
                f"papers: --rows {row}; expected a row with a miniature ({here(ROWS[row])}). "
                "--list marks them."
            )
        keys |= dict.fromkeys(found)
    return list(keys)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--rows", help="names from --list, separated by commas")
    what.add_argument("--list", action="store_true", help="print every row and what it has")
    what.add_argument("--page", action="store_true", help="write docs/papers.md")
    parser.add_argument("--work", type=Path, default=Path("runs/papers"))
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--dry-run", action="store_true", help="print what would run")
    try:
        act(parser.parse_args())
    except DPVisionError as error:
        parser.exit(2, f"{error}\n")


def act(args: argparse.Namespace) -> None:
    """Do what the command line asks for."""
    if args.list:
        for name, row in ROWS.items():
            runs = [key for key in results_of(name) if "module" in FACTS["results"][key]]
            print(f"{name:<20} {state(row):<10} {row['what']}{' *' if runs else ''}")
        print("* has a miniature that --rows runs")
    elif args.page:
        PAGE.write_text(page())
    else:
        keys = asked(args.rows.split(","))
        print(f"miniatures: {', '.join(keys)}", flush=True)
        if not args.dry_run:
            run(keys, Work(args.work.resolve(), args.data.resolve()))


def run(keys: list[str], work: Work) -> None:
    """Run miniatures in turn; each result is written when it is complete."""
    work.folder.mkdir(parents=True, exist_ok=True)
    for key in keys:
        # Each module has its own dependencies, some of them extras.
        make = import_module(FACTS["results"][key]["module"]).MINIATURES[key]
        path = RESULTS / f"{datetime.date.today()}-papers-{key}.json"
        write_result(path, f"papers {key}", make(work), packages=PACKAGES)


if __name__ == "__main__":
    main()
