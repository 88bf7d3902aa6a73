"""RK_ABI: a number for what rksc._core and rksc._cuda must agree on, from the headers' text.

Both are compiled with it (setup.py, and what builds them for tests), and rk_cuda_open refuses a
library with another one.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path


def headers(source: Path) -> list[Path]:
    """backend.h in the folder `source` and the headers that it includes, directly or not."""
    found: list[Path] = []
    waiting = [source / "backend.h"]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.append(path)
            text = path.read_text("utf-8")
            waiting += [source / name for name in re.findall(r'^#include "(.+)"', text, re.M)]
    return sorted(found)


def flag(source: Path) -> str:
    """The compiler's flag."""
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in headers(source)))
    return f"-DRK_ABI=0x{digest.hexdigest()[:16]}"
