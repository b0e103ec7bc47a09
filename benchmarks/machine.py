"""What the numbers were measured on: machine, kernel, versions."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from devstack.install import Programs, Servers

#: whose versions matter to the numbers
_LIBRARIES = ("pika", "redis", "requests", "urllib3", "msgspec", "dramatiq", "celery", "aio-pika", "aiohttp")


def machine_facts() -> dict[str, str]:
    """Name the processor, the memory, the kernel, the Python and the libraries."""
    versions = {name: _version(name) for name in _LIBRARIES}
    return {
        "CPU": f"{cpu_model()}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "libraries": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "load before": f"{os.getloadavg()[0]:.2f} (1 minute)",
    }


def cpu_model() -> str:
    """Return the processor's name, as the kernel gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return platform.processor() or platform.machine()


def redis_version(servers: Servers) -> str:
    """Return Redis' version, or nothing when it is in a container."""
    if not isinstance(servers, Programs):
        return ""
    said = subprocess.run(
        [servers.redis_server, "--version"], capture_output=True, text=True, timeout=10, check=False
    ).stdout
    return next((word.removeprefix("v=") for word in said.split() if word.startswith("v=")), "")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
