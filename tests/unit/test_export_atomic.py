"""A model takes the place of another at once or not at all, whenever the writer is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import OutputError
from paceline.quantize.export import atomic
from paceline.quantize.export.atomic import check_output, write_atomically

SOURCE = Path("elsewhere")

KILLED = """
import os, signal, sys
from pathlib import Path
from paceline.quantize.export import atomic

out, count, can_exchange = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True"
WATCHED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "shutil.rmtree")

def write(path):
    if out.suffix == ".gguf":
        path.write_bytes(b"new" * 1000)
        return
    path.mkdir()
    for name in ("config.json", "model.safetensors"):
        (path / name).write_bytes(b"new" * 1000)

def hook(event, arguments):
    global count
    if event in WATCHED and not str(arguments[0]).startswith(sys.prefix):
        if count == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        count -= 1

if not can_exchange:
    atomic.exchange = lambda first, second: False
write_atomically, verify = atomic.write_atomically, lambda path: None
sys.addaudithook(hook)
write_atomically(out, write, verify, force=True, source=Path("elsewhere"))
count = -1
print("done")
"""


def make(path: Path, content: bytes) -> None:
    """A model: a file for .gguf, else a directory of two files."""
    if path.suffix == ".gguf":
        path.write_bytes(content * 1000)
        return
    path.mkdir()
    for name in ("config.json", "model.safetensors"):
        (path / name).write_bytes(content * 1000)


def content(path: Path) -> set[bytes]:
    """What its files hold; one value when they belong together, each file whole."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    if path.is_dir():
        assert [file.name for file in files] == ["config.json", "model.safetensors"]
    return {file.read_bytes() for file in files}


OLD, NEW = b"old" * 1000, b"new" * 1000


@pytest.mark.parametrize(("name", "can_exchange"), [("m.gguf", True), ("m", True), ("m", False)])
def test_killed_before_any_call_it_leaves_the_old_or_the_new_whole(
    tmp_path: Path, name: str, can_exchange: bool
) -> None:
    seen = set()
    for count in range(200):
        folder = tmp_path / str(count)
        folder.mkdir()
        out = folder / name
        make(out, b"old")
        command = [sys.executable, "-c", KILLED, str(out), str(count), str(can_exchange)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if result.returncode == 0:
            assert result.stdout == "done\n"
            assert content(out) == {NEW}
            assert os.listdir(folder) == [name]
            break
        assert result.returncode == -signal.SIGKILL, result.stderr
        if can_exchange or out.exists():
            (found,) = content(out)
        else:  # between the two renames: the next write finds the old one and puts it back
            atomic._clear_abandoned(out)
            (found,) = content(out)
            assert found == OLD
        assert found in (OLD, NEW)
        seen.add(found)
        write_atomically(out, lambda path: make(path, b"new"), lambda path: None, force=True, source=SOURCE)
        assert content(out) == {NEW}
        assert os.listdir(folder) == [name]
    else:
        pytest.fail("never ran to its end")
    assert count > 6
    assert seen == {OLD, NEW}


@pytest.mark.parametrize("name", ["m.gguf", "m"])
def test_an_error_leaves_the_old_one(tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    make(out, b"old")

    def fail(path: Path) -> None:
        raise OSError(28, "No space left on device")

    def reject(path: Path) -> None:
        assert content(path) == {NEW}
        raise KeyboardInterrupt

    with pytest.raises(OutputError, match="No space left on device"):
        write_atomically(out, fail, lambda path: None, force=True, source=SOURCE)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(out, lambda path: make(path, b"new"), reject, force=True, source=SOURCE)
    assert content(out) == {OLD}
    assert os.listdir(tmp_path) == [name]


def test_what_exists_is_replaced_only_when_asked(tmp_path: Path) -> None:
    out = tmp_path / "new" / "m"
    write_atomically(out, lambda path: make(path, b"old"), lambda path: None, force=False, source=SOURCE)
    with pytest.raises(OutputError, match="--force"):
        write_atomically(out, lambda path: make(path, b"new"), lambda path: None, force=False, source=SOURCE)
    assert content(out) == {OLD}
    write_atomically(out, lambda path: make(path, b"new"), lambda path: None, force=True, source=SOURCE)
    assert content(out) == {NEW}


def test_what_appears_while_it_is_written_stays(tmp_path: Path) -> None:
    out = tmp_path / "m"

    def write(path: Path) -> None:
        make(path, b"new")
        make(out, b"old")  # somebody else

    with pytest.raises(OutputError, match="--force"):
        write_atomically(out, write, lambda path: None, force=False, source=SOURCE)
    assert content(out) == {OLD}
    assert os.listdir(tmp_path) == ["m"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    make(tmp_path / "real", b"old")
    (tmp_path / "link").symlink_to("real")
    write_atomically(tmp_path / "link", lambda path: make(path, b"new"), lambda path: None, force=True, source=SOURCE)
    assert (tmp_path / "link").is_symlink()
    assert content(tmp_path / "real") == {NEW}


def test_a_file_gives_its_place_to_a_directory_and_back(tmp_path: Path) -> None:
    out = tmp_path / "m"
    out.write_bytes(b"old")
    write_atomically(out, lambda path: make(path, b"new"), lambda path: None, force=True, source=SOURCE)
    assert content(out) == {NEW}
    write_atomically(out, lambda path: path.write_bytes(NEW), lambda path: None, force=True, source=SOURCE)
    assert out.read_bytes() == NEW
    assert os.listdir(tmp_path) == ["m"]


def test_other_things_are_never_removed(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "mother.txt").write_text("dear")
    with pytest.raises(OutputError, match="other things than a model"):
        check_output(tmp_path / "letters", force=True)
    make(tmp_path / "source", b"old")
    for out in (tmp_path / "source", tmp_path / "source" / ".." / "source", tmp_path):
        with pytest.raises(OutputError, match="would be lost"):
            check_output(out, force=True, source=tmp_path / "source")
    # A file of the source is not the source, and yet the source is lost with it.
    with pytest.raises(OutputError, match="would be lost"):
        check_output(tmp_path / "source" / "model.safetensors", force=True, source=tmp_path / "source")
    # A project with a config.json, and one that keeps a model and letters.
    (tmp_path / "letters" / "config.json").write_text("{}")
    make(tmp_path / "mixed", b"old")
    (tmp_path / "mixed" / "src").mkdir()
    for name in ("letters", "mixed"):
        with pytest.raises(OutputError, match="other things than a model"):
            check_output(tmp_path / name, force=True)
    (tmp_path / "empty").mkdir()
    check_output(tmp_path / "empty", force=True)
    check_output(tmp_path / "source" / "inside", force=False, source=tmp_path / "source")


def test_a_writer_that_lives_keeps_its_scratch_directory(tmp_path: Path) -> None:
    out = tmp_path / "m"

    def write(path: Path) -> None:
        write_atomically(out, lambda inner: make(inner, b"old"), lambda inner: None, force=True, source=SOURCE)
        make(path, b"new")

    write_atomically(out, write, lambda path: None, force=True, source=SOURCE)
    assert content(out) == {NEW}


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file/m: cannot be written"):
        write_atomically(
            tmp_path / "file" / "m", lambda path: make(path, b"new"), lambda path: None, force=True, source=SOURCE
        )
