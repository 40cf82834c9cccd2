"""The site's additions to docs/: a page for each file of the project that a page links to outside of docs/ (a plan, an
example, a schema), so that the site is whole without the repository."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?\))")
CODE = re.compile(r"(```.*?```|`[^`\n]+`)", re.DOTALL)
# Folders whose pages the search puts below the guides: there are hundreds, and their short texts outweigh those of long pages.
BOOST = {"decisions": 0.3, "diagnostics": 0.3, "project": 0.2}
LANGUAGES = {".yaml": "yaml", ".json": "json", ".py": "python", ".svg": "xml"}


def _outside(source: str, target: str) -> str | None:
    """The path in the project of a link that leads out of docs/; None for all others."""
    if "://" in target:
        return None
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(source), target))
    return None if path.startswith(("docs/", "..")) else path


def _page(path: str) -> str:
    """The place in the site of the page of a project file."""
    return f"project/{path}" if path.endswith(".md") else f"project/{path}.md"


def _content(path: str) -> str:
    file = ROOT / path
    if file.is_dir():
        names = sorted(
            p.name + ("/" if p.is_dir() else "") for p in file.iterdir() if not p.name.startswith(("_", "."))
        )
        return f"# {path}\n\n" + "\n".join(f"- `{name}`" for name in names) + "\n"
    text = file.read_text("utf-8")
    if file.suffix == ".md":  # its own links are meant from the project's root
        return _repointed(text, partial(_from_root, path))
    return f"# {path}\n\n```{LANGUAGES.get(file.suffix, '')}\n{text}```\n"


def _from_root(path: str, target: str) -> str:
    """A link of a file outside of docs/, as the site has it."""
    if "://" in target or not target:
        return target
    wanted = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    page = wanted.removeprefix("docs/") if wanted.startswith("docs/") else _page(wanted)
    return posixpath.relpath(page, posixpath.dirname(_page(path)))


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each file outside of docs/ that a page, or such a file, links to."""
    waiting = {found for page in files.documentation_pages() for found in _links(page.src_uri, page.content_string)}
    done: set[str] = set()
    while waiting:
        path = waiting.pop()
        done.add(path)
        files.append(File.generated(config, _page(path), content=_content(path)))
        if path.endswith(".md"):
            links = (target for target in _targets((ROOT / path).read_text("utf-8")) if "://" not in target)
            wanted = {posixpath.normpath(posixpath.join(posixpath.dirname(path), link)) for link in links}
            waiting |= {name for name in wanted if not name.startswith("docs/")} - done
    return files


def _links(source: str, text: str) -> set[str]:
    return {path for target in _targets(text) if (path := _outside(source, target)) is not None}


def _targets(text: str) -> list[str]:
    return [m[2] for m in LINK.finditer(CODE.sub("", text))]


def _repointed(text: str, wanted: Callable[[str], str]) -> str:
    """The text with other targets of its links; what looks like a link in code stays."""
    parts = CODE.split(text)  # text and code take turns
    parts[::2] = [LINK.sub(lambda m: f"{m[1]}{wanted(m[2])}{m[3]}", part) for part in parts[::2]]
    return "".join(parts)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point the links that lead out of docs/ to the pages that `on_files` added, and say how high the search puts the page."""
    source = page.file.src_uri
    page.meta.setdefault("search", {"boost": BOOST.get(source.partition("/")[0], 1)})
    if "code" in page.meta:  # the page of a diagnostic code
        page.meta["title"] = f"{page.meta['code']}: {page.meta['title']}"
    if source.startswith("project/"):
        return markdown

    def wanted(target: str) -> str:
        path = _outside(source, target)
        return target if path is None else posixpath.relpath(_page(path), posixpath.dirname(source) or ".")

    return _repointed(markdown, wanted)
