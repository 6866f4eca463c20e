"""Print the ``code_sha256`` of revisions of this repository, as runs and statements record it:
which runs a defect affects (SECURITY.md).

    python scripts/code_digest.py                  the working tree
    python scripts/code_digest.py v0.1.0 abc1234   tags or commits
    python scripts/code_digest.py $(git rev-list v0.1.0..v0.2.0 -- src)
"""

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from dpvision.code_digest import code_digest

ROOT = Path(__file__).parents[1]
NEEDED = ("src/dpvision", "docs/statement.schema.json")
"""The package, and what a link in it points to."""


def digest_of(revision: str) -> str:
    """Return the digest of a tag or commit.

    Raises:
        subprocess.CalledProcessError: git does not know it, or it has no package.
    """
    command = ["git", "archive", "--format=tar", revision, *NEEDED]
    tar = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(tar)) as files:
            files.extractall(folder, filter="data")
        return code_digest(Path(folder) / NEEDED[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revisions", nargs="*")
    revisions = parser.parse_args().revisions
    if not revisions:
        print(code_digest(ROOT / NEEDED[0]), "working tree")
    for revision in revisions:
        try:
            print(digest_of(revision), revision, flush=True)
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode().strip().splitlines()[-1]
            sys.exit(f"error: {revision}: {said}; expected a tag or commit that has src/dpvision.")


if __name__ == "__main__":
    main()
