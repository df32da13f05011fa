"""The chat page as one HTML document: styles and scripts of this folder put in, and a policy that allows only these."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

_STYLE = re.compile(r'<link rel="stylesheet" href="([\w.]+)">')
_SCRIPT = re.compile(r'<script src="([\w.]+)"></script>')


@dataclass(frozen=True)
class PageDocument:
    """``policy`` is what the header Content-Security-Policy says: the page's own code, this server, nothing else."""

    html: str
    policy: str


@cache
def page_document() -> PageDocument:
    """The page; put together once."""
    folder = resources.files(__package__)
    hashes: dict[str, list[str]] = {"style": [], "script": []}

    def inlined(tag: str, name: str) -> str:
        source = folder.joinpath(name).read_text("utf-8")
        assert f"</{tag}" not in source, f"{name} would end its own element"
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        hashes[tag].append(f"'sha256-{digest}'")
        return f"<{tag}>{source}</{tag}>"

    html = folder.joinpath("index.html").read_text("utf-8")
    html = _STYLE.sub(lambda found: inlined("style", found[1]), html)
    html = _SCRIPT.sub(lambda found: inlined("script", found[1]), html)
    policy = {
        "default-src": "'none'",
        "script-src": " ".join(hashes["script"]),
        "style-src": " ".join(hashes["style"]),
        "connect-src": "'self'",
        "img-src": "data:",  # the icon of the tab
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return PageDocument(html, "; ".join(f"{name} {value}" for name, value in policy.items()))
