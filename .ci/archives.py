"""What a release may hold: python .ci/archives.py WHEEL SDIST, from the repository's root.

The wheel is the package and its licences; data in it is named with its licence in
rksc/data/README.md, and none of that is share-alike. The source archive is the repository.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import PurePosixPath

KNOWN = {"rksc/data/README.md", "rksc/limits/peak.c", "rksc/limits/peak_dot.h"}
CODE = (".py", ".pyi", ".so", ".typed")
GIT_ONLY = {".gitignore"}  # says nothing outside of a repository
PACKAGES = ("rksc", "pytest_rksc.py")


def check_wheel(path: str) -> None:
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if not name.endswith("/")]
        page = wheel.read("rksc/data/README.md").decode()
    for name in names:
        top, *rest = PurePosixPath(name).parts
        if top.endswith(".dist-info"):
            continue
        data = rest[:1] == ["data"] and f"`{rest[-1]}`" in page
        if top not in PACKAGES or not (name.endswith(CODE) or data or name in KNOWN):
            raise SystemExit(f"{path} holds {name}, which is neither code nor described data")
    if re.search(r"share-?alike|\bBY-SA\b", page, re.IGNORECASE):
        raise SystemExit(f"{path}: share-alike data stays out of the wheel")
    libraries = [name for name in names if name.endswith(".so")]
    licences = [name for name in names if "dist-info/licenses/LICENSE" in name]
    if len(libraries) != 1 or not licences:
        raise SystemExit(f"{path}: {libraries}, {licences}")
    print(f"{PurePosixPath(path).name}: {len(names)} files, one library, licences inside")


def check_sdist(path: str) -> None:
    tracked = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True)
    with tarfile.open(path) as sdist:
        held = {name.partition("/")[2] for name in sdist.getnames()}
    left_out = set(tracked.stdout.split()) - held
    unexpected = left_out - GIT_ONLY
    if unexpected:
        raise SystemExit(f"{path} lacks {sorted(unexpected)}")
    print(f"{PurePosixPath(path).name}: all {len(tracked.stdout.split()) - len(left_out)} files")


if __name__ == "__main__":
    check_wheel(sys.argv[1])
    check_sdist(sys.argv[2])
