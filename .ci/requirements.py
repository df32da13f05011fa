"""Prints requirements of pyproject.toml, one a line: `requirements.py runtime|build|build-tools|EXTRA ...`.

So the Makefile installs exactly what pyproject.toml says without building the package first.
"""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib


def requirements(group: str) -> list[str]:
    """The requirements of `runtime`, `build`, `build-tools` (cmake, ninja where the system has none) or an extra."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    if group == "runtime":
        return list(project["project"]["dependencies"])
    if group == "build":
        return list(project["build-system"]["requires"])
    if group == "build-tools":
        from scikit_build_core.build import get_requires_for_build_wheel

        return list(get_requires_for_build_wheel())
    return list(project["project"]["optional-dependencies"][group])


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for requirement in requirements(name):
            print(requirement)
