"""DEVSTACK_RABBITMQ_ROOT: the broker that was asked for, or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from devstack import install


def test_a_program_below_a_root_is_named_as_the_chroot_sees_it(tmp_path: Path) -> None:
    program = tmp_path / "usr/lib/rabbitmq/lib/rabbitmq_server-9.9/sbin/rabbitmq-server"
    program.parent.mkdir(parents=True)
    program.write_text("")
    program.chmod(0o755)
    found = install.find_program("rabbitmq-server", folders=["/usr/lib/rabbitmq/lib/*/sbin"], root=tmp_path)
    assert found == Path("/usr/lib/rabbitmq/lib/rabbitmq_server-9.9/sbin/rabbitmq-server")


def test_below_a_root_nothing_is_taken_from_path(tmp_path: Path) -> None:
    assert install.find_program("sh", folders=["/usr/bin"], root=tmp_path) is None


def test_a_root_without_rabbitmq_is_refused_and_no_other_broker_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(install.RABBITMQ_ROOT_VARIABLE, str(tmp_path))
    with pytest.raises(install.ServersMissing, match=r"devstack\.rabbitmq_next"):
        install.find_programs()
