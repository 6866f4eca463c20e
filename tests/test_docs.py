"""Pages that nobody can find are not read: the index and the site's menu name every page, and links between pages lead somewhere."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def test_the_index_and_the_menu_name_every_page() -> None:
    index, menu = (DOCS / "index.md").read_text(), (DOCS.parent / "mkdocs.yml").read_text()
    assert [page for page in PAGES if page != "index.md" and f"]({page})" not in index] == []
    assert [page for page in PAGES if not re.search(rf"[\s:'\"]{re.escape(page)}\b", menu)] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_pages_images_and_headings_that_are_there(page: str) -> None:
    here = DOCS / page
    for target, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)", here.read_text()):
        there = (here.parent / target).resolve() if target else here
        assert there.exists(), target
        if anchor and there.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", there.read_text(), flags=re.M)
            slugs = {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower())).strip("-") for heading in headings}
            assert anchor in slugs, f"{target}#{anchor}"
