"""The demo passes with the real worker, and its checks see what is wrong. Needs RabbitMQ and Redis."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
PROJECT_FOLDER = Path(__file__).parent.parent.parent


def run_demo(**env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "devstack.demo"],
        cwd=PROJECT_FOLDER,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_demo_passes_within_a_minute() -> None:
    done = run_demo()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\r" not in done.stdout
    assert "30 of 30" in done.stdout


def test_a_model_url_without_a_model_is_one_clear_sentence() -> None:
    done = run_demo(MODEL_CONTAINER_URL="http://127.0.0.1:9")
    assert (done.returncode, done.stdout) == (
        2,
        "MODEL_CONTAINER_URL is set, so MODEL must name the model that is to answer there.\n",
    )
