"""Every Make target says what it does, and can be made. Needs no servers: part of `make test`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

from devstack.worker_process import PROJECT_FOLDER

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

MAKEFILE = (PROJECT_FOLDER / "Makefile").read_text()
TARGETS = re.findall(r"^\.PHONY: ([a-z][a-z0-9-]*)$", MAKEFILE, re.MULTILINE)


def make(*arguments: str) -> str:
    """Run make and return what it prints; it must succeed."""
    done = subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=PROJECT_FOLDER,
        env={"PATH": os.environ.get("PATH", os.defpath)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30.0,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_targets_that_the_readme_promises_are_there() -> None:
    assert {"help", "demo", "up", "ask", "test", "integration", "lint", "type"} <= set(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_says_what_it_does(target: str) -> None:
    (line,) = [line for line in MAKEFILE.splitlines() if line.startswith(f"{target}:")]
    assert re.search(r" ## \S", line)


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_can_be_made(target: str) -> None:
    assert make("-n", target).strip()


@pytest.mark.parametrize("arguments", [(), ("help",)], ids=["make", "make-help"])
def test_help_is_what_make_does_and_lists_every_target(arguments: tuple[str, ...]) -> None:
    listed = re.findall(r"^ +make ([a-z0-9-]+) +\S", make(*arguments), re.MULTILINE)
    assert sorted(listed) == sorted(TARGETS)


def test_a_prompt_is_asked_as_it_was_typed() -> None:
    prompt = """What's "5 $HOME" for `id` and $(id)?"""
    # instead of the interpreter a command that shows the last of its arguments; the environment counts as made
    shown = make("-o", ".venv/.ready", "ask", f"PROMPT={prompt}", """PY=show() { echo "$${@: -1}"; }; show""")
    assert shown.strip() == prompt
