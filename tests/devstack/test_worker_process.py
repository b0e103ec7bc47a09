"""The worker that the tests start is the one that is deployed."""

from __future__ import annotations

import configparser

from devstack.worker_process import GLIBC_TUNABLES, PROJECT_FOLDER


def test_it_has_the_memory_settings_of_the_image_and_of_the_supervisord_section() -> None:
    assert f"ENV GLIBC_TUNABLES={GLIBC_TUNABLES}\n" in (PROJECT_FOLDER / "Dockerfile").read_text()
    section = configparser.ConfigParser(interpolation=None, inline_comment_prefixes=(" ;",))
    section.read_string((PROJECT_FOLDER / "deploy/supervisord/inference-worker.conf").read_text())
    assert section["program:inference-worker"]["environment"] == f'GLIBC_TUNABLES="{GLIBC_TUNABLES}"'
