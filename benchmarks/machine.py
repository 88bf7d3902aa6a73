"""This machine, and where the repository lies on it."""

from __future__ import annotations

import os
from pathlib import Path

from rksc.calibration.runner import processor

ROOT = Path(__file__).resolve().parent.parent


def describe() -> str:
    """One line: processor, cores that this process may use, memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{processor()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB"
