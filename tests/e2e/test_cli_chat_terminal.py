"""`paceline chat` at a real terminal: the keys that a person presses."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from paceline.weights.catalog import resolve_model

TIMEOUT_S = 60.0
CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    """A pseudo-terminal with `paceline chat` in it."""

    def __init__(self, *words: str) -> None:
        self._master, slave = pty.openpty()

        def take_terminal() -> None:
            os.setsid()
            import fcntl
            import termios

            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGINT, signal.default_int_handler)

        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline", "chat", *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            preexec_fn=take_terminal,
            env={**os.environ, "TERM": "xterm", "NO_COLOR": "1"},
        )
        os.close(slave)
        self.shown = ""

    def type(self, keys: str) -> None:
        """Presses keys."""
        os.write(self._master, keys.encode())

    def wait_for(self, text: str) -> str:
        """What was shown up to and including ``text`` since the last wait."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while text not in self.shown:
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"{text!r} never came; shown: {self.shown!r}"
            if select.select([self._master], [], [], left_s)[0]:
                self.shown += self._read()
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def press_until(self, keys: str, text: str) -> None:
        """Presses keys, again every five seconds, until ``text`` is shown."""
        for _ in range(int(TIMEOUT_S / 5)):
            self.type(keys)
            deadline_s = time.monotonic() + 5
            while text not in self.shown and (left_s := deadline_s - time.monotonic()) > 0:
                if select.select([self._master], [], [], left_s)[0]:
                    self.shown += self._read()
            if text in self.shown:
                break
        self.wait_for(text)

    def end(self) -> int:
        """The exit status."""
        return self.process.wait(timeout=TIMEOUT_S)

    def close(self) -> None:
        """Ends the process if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)

    def _read(self) -> str:
        try:
            return os.read(self._master, 65536).decode("utf-8", "replace")
        except OSError:  # the program has closed its side
            raise AssertionError(f"the program ended; shown: {self.shown!r}") from None


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    """Terminals that are closed at the end."""
    resolve_model("smollm2-135m", download=False)
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def test_ctrl_c_stops_the_answer_and_not_the_program(terminals: list[Terminal]) -> None:
    terminal = Terminal("--ignore-eos")
    terminals.append(terminal)
    terminal.wait_for("> ")
    terminal.type("Write a very long story about a fox.\n")
    terminal.wait_for("story about a fox.")
    # The answer has begun once letters come that were not typed.
    terminal.wait_for(" the ")
    terminal.type(CTRL_C)
    terminal.wait_for("[stopped]")
    terminal.wait_for("> ")
    terminal.type("/help\n")
    terminal.wait_for("/clear")
    terminal.wait_for("> ")
    terminal.type(CTRL_D)
    assert terminal.end() == 0


def test_ctrl_c_at_the_prompt_says_how_to_leave(terminals: list[Terminal]) -> None:
    terminal = Terminal()
    terminals.append(terminal)
    terminal.wait_for("> ")
    # Only after an echo does the line editor surely wait: CPython loses an interrupt that comes just before.
    terminal.type("half a line")
    terminal.wait_for("half a line")
    terminal.press_until(CTRL_C, "/exit leaves")
    terminal.wait_for("> ")
    terminal.type("/exit\n")
    assert terminal.end() == 0


def test_conversation_that_no_longer_fits_is_told(terminals: list[Terminal]) -> None:
    terminal = Terminal("--context", "128", "--max-tokens", "8")
    terminals.append(terminal)
    terminal.wait_for("> ")
    terminal.type("word " * 120 + "\n")
    assert "128" in terminal.wait_for("/clear starts anew")
    terminal.wait_for("> ")
    terminal.type("Hello\n")
    terminal.wait_for("tok/s")
    terminal.wait_for("> ")
    terminal.type(CTRL_D)
    assert terminal.end() == 0
