"""Servers are found off PATH too, Debian's user-changing wrapper is passed over, and installing enables nothing."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from devstack import apt_packages, install


def make_program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_a_program_off_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    program = make_program(tmp_path / "erlang-26" / "bin" / "epmd")
    assert install.find_program("epmd", folders=[f"{tmp_path}/nowhere", f"{tmp_path}/erlang-*/bin"]) == program


def test_the_folders_come_before_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = make_program(tmp_path / "sbin" / "rabbitmq-server")
    server = make_program(tmp_path / "lib" / "rabbitmq-server")
    monkeypatch.setenv("PATH", str(wrapper.parent))
    assert install.find_program("rabbitmq-server", folders=[str(server.parent)]) == server
    assert install.find_program("rabbitmq-server", folders=[]) == wrapper


def test_a_missing_program_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install.find_program("redis-server", folders=[str(tmp_path)]) is None


def test_with_nothing_at_all_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "find_programs", lambda: None)
    monkeypatch.setattr(install, "find_containers", lambda: None)
    monkeypatch.setattr(apt_packages, "usable", lambda: False)
    with pytest.raises(install.ServersMissing, match="install") as caught:
        install.provide_servers()
    assert "\n" not in str(caught.value)


def test_docker_without_an_answering_daemon_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker = make_program(tmp_path / "docker")
    docker.write_text('#!/bin/sh\n[ "$1" = info ] && exit 1\nexit 0\n')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert install.find_containers() is None
    docker.write_text("#!/bin/sh\nexit 0\n")
    assert install.find_containers() == install.Containers(docker)


def test_the_policy_forbids_services_and_is_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tmp_path / "policy-rc.d"
    monkeypatch.setattr(apt_packages, "POLICY", policy)
    with contextlib.suppress(KeyboardInterrupt), apt_packages.services_forbidden():
        assert "exit 101" in policy.read_text()
        assert policy.stat().st_mode & 0o111
        raise KeyboardInterrupt
    assert not policy.exists()


def test_a_policy_of_somebody_elses_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tmp_path / "policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 0\n")
    monkeypatch.setattr(apt_packages, "POLICY", policy)
    with apt_packages.services_forbidden():
        assert policy.read_text() == "#!/bin/sh\nexit 0\n"
    assert policy.exists()


def test_a_policy_of_ours_left_by_a_killed_run_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tmp_path / "policy-rc.d"
    policy.write_text(apt_packages.POLICY_TEXT)
    monkeypatch.setattr(apt_packages, "POLICY", policy)
    with apt_packages.services_forbidden():
        pass
    assert not policy.exists()
