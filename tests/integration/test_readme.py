"""What the README and the requirement files say is so. Needs no servers: part of `make test`."""

from __future__ import annotations

import configparser
import re
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from devstack.worker_process import PROJECT_FOLDER
from inference_worker import config

README = (PROJECT_FOLDER / "README.md").read_text()


def load_pins(name: str) -> dict[str, str]:
    """Return what a requirements file pins: canonical name → version."""
    pins = {}
    for line in (PROJECT_FOLDER / name).read_text().splitlines():
        text = line.partition("#")[0].partition(";")[0].strip()
        if text and not text.startswith("-r "):
            assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+", text), f"{name}: {text} is no pin"
            package, _, version = text.partition("==")
            pins[canonicalize_name(package)] = version
    return pins


def load_ranges(*extras: str) -> list[Requirement]:
    """Return what setup.cfg asks for, with these extras."""
    parser = configparser.ConfigParser()
    parser.read(PROJECT_FOLDER / "setup.cfg")
    texts = [parser["options"]["install_requires"], *(parser["options.extras_require"][extra] for extra in extras)]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def targets() -> set[str]:
    """Return the targets of the Makefile."""
    return set(re.findall(r"^([a-z][a-z0-9-]*):", (PROJECT_FOLDER / "Makefile").read_text(), re.MULTILINE))


def test_the_readme_shows_the_producer_as_it_is() -> None:
    producer = (PROJECT_FOLDER / "devstack/producer.py").read_text().strip()
    assert f"```python\n{producer}\n```" in README


def test_the_producer_is_short_enough_to_be_read() -> None:
    code = [line for line in (PROJECT_FOLDER / "devstack/producer.py").read_text().splitlines() if line.strip()]
    assert len(code) <= 40


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_every_make_target_that_a_page_names_exists(page: str) -> None:
    text = (PROJECT_FOLDER / page).read_text()
    named = set(re.findall(r"(?:`|^\$ |^ {2,})(?:[A-Z_]+=\S+ )*make ([a-z][a-z0-9-]*)", text, re.MULTILINE))
    assert named
    assert named <= targets()


def test_the_readme_has_the_table_of_variables_as_the_code_has_it() -> None:
    (table,) = re.findall(r"<!-- variables -->\n\n(.*)\n<!-- /variables -->", README, re.DOTALL)
    assert table == config.to_markdown(), "run `make docs`"


def test_every_link_of_the_readme_leads_somewhere() -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", README)
    assert links
    assert [link for link in links if not Path(PROJECT_FOLDER / link).exists()] == []


def test_requirements_pin_everything_that_setup_cfg_asks_for_and_within_its_ranges() -> None:
    pins = load_pins("requirements.txt")
    for wanted in load_ranges():
        version = pins.get(canonicalize_name(wanted.name))
        assert version is not None, f"{wanted.name} is not pinned"
        assert wanted.specifier.contains(version), f"{wanted.name}=={version} is not within {wanted.specifier}"


def test_development_requirements_pin_the_extras_within_their_ranges_and_repeat_nothing() -> None:
    own, pins = load_pins("requirements.txt"), load_pins("requirements-dev.txt")
    assert "-r requirements.txt" in (PROJECT_FOLDER / "requirements-dev.txt").read_text().splitlines()
    assert not set(own) & set(pins)
    for wanted in load_ranges("test", "lint"):
        version = (own | pins).get(canonicalize_name(wanted.name))
        assert version is not None, f"{wanted.name} is not pinned"
        assert wanted.specifier.contains(version), f"{wanted.name}=={version} is not within {wanted.specifier}"


#: the oldest Python that is supported, where most is needed beside the standard library
OLDEST_PYTHON = {"extra": "", "python_version": "3.11", "python_full_version": "3.11.0"}


def needed_by(name: str) -> list[str]:
    """Return what an installed package says that it needs; nothing of one that this Python does not need."""
    try:
        requirements = [Requirement(text) for text in requires(name) or []]
    except PackageNotFoundError:
        return []
    return [each.name for each in requirements if each.marker is None or each.marker.evaluate(OLDEST_PYTHON)]


def test_requirements_are_complete_and_have_nothing_that_nobody_needs() -> None:
    pins = set(load_pins("requirements.txt"))
    needed: set[str] = set()
    waiting = [wanted.name for wanted in load_ranges()]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in needed:
            needed.add(name)
            waiting += needed_by(name)
    assert needed <= pins, f"not pinned: {sorted(needed - pins)}"
    assert pins <= needed, f"nobody needs: {sorted(pins - needed)}"
