"""Check a built site: it loads nothing from elsewhere, and every link in it leads somewhere.

.venv/bin/python docs/check_site.py site

`mkdocs build --strict` checks the links that are written in Markdown. This reads the pages as a browser
gets them, so it also sees what the theme, the API pages, the notebook and raw HTML bring. Every public
class and function has to have its place in the pages below api/.
"""

from __future__ import annotations

import importlib
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Attributes whose content a browser fetches by itself; a link is only followed by the reader.
FETCHED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href")}
NOT_FETCHED_LINKS = {"canonical", "prev", "next", "edit"}
PUBLIC = ("qknorm", "qknorm.nn", "qknorm.monitor", "qknorm.auditor")


class Page(HTMLParser):
    """The ids of a page, what it links to, and what it fetches."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)
        for style in re.findall(r"<style.*?</style>", text, re.DOTALL):
            self.fetched += urls_of(style)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        for name, value in values.items():
            if (tag, name) in FETCHED and values.get("rel") not in NOT_FETCHED_LINKS:
                self.fetched.append(value)
            elif name == "href":
                self.links.append(value)


def urls_of(css: str) -> list[str]:
    """What a style sheet fetches."""
    return re.findall(r"""url\(["']?(.*?)["']?\)""", css) + re.findall(
        r"""@import\s+["'](.*?)["']""", css
    )


def faults(site: Path) -> list[str]:
    """One sentence for each thing that is wrong."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    found = []

    def look(source: Path, address: str) -> None:
        parts = urlsplit(address)
        if parts.scheme or parts.netloc or not (parts.path or parts.fragment):
            return
        # The page for a missing page stands anywhere, and names everything from the root.
        base = site if source.name == "404.html" else source.parent
        path = unquote(parts.path)
        target = (
            (site / path.lstrip("/") if path.startswith("/") else base / path).resolve()
            if path
            else source
        )
        if target.is_dir():
            target /= "index.html"
        if not target.exists():
            found.append(f"{source.relative_to(site)} leads to {address}, which does not exist.")
        elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
            found.append(
                f"{source.relative_to(site)} leads to {address}, a place which that page does not have."
            )

    for path, page in pages.items():
        for address in page.links + page.fetched:
            look(path, address)
    fetched = [(path, address) for path, page in pages.items() for address in page.fetched]
    for path in site.rglob("*.css"):
        fetched += [(path, address) for address in urls_of(path.read_text())]
    found += [
        f"{path.relative_to(site)} loads {address} from elsewhere."
        for path, address in fetched
        if urlsplit(address).netloc
    ]
    return found


def undocumented(site: Path) -> list[str]:
    """One sentence for each public class or function that the API pages leave out."""
    shown = {name for path in site.glob("api/**/*.html") for name in Page(path.read_text()).ids}
    last = {name.rpartition(".")[2] for name in shown}
    public = {name: importlib.import_module(name) for name in PUBLIC}
    return [
        f"{module}.{name} is in no page below api/."
        for module, holder in public.items()
        for name in holder.__all__
        if callable(getattr(holder, name)) and name not in last
    ]


def main() -> None:
    site = Path(sys.argv[1]).resolve()
    if not (site / "index.html").exists():
        sys.exit(f"{site} holds no site: run mkdocs build.")
    found = faults(site) + undocumented(site)
    print(
        "\n".join(found)
        or f"{site.name}: every link leads somewhere, and nothing is loaded from elsewhere."
    )
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
