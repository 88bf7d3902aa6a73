"""What a release says of itself agrees: version, changelog, citation, what is announced."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rksc

ROOT = Path(__file__).resolve().parent.parent


def read(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def test_one_version_everywhere() -> None:
    version = rksc.__version__
    assert re.findall(r"^## (\S+)", read("CHANGELOG.md"), re.M)[0] == version
    assert re.search(rf"^version: {re.escape(version)}$", read("CITATION.cff"), re.M)
    attribute = 'version = { attr = "rksc.version.__version__" }'
    assert re.search(rf"^{re.escape(attribute)}$", read("pyproject.toml"), re.M)


def test_wheels_are_built_for_every_python_that_is_announced() -> None:
    project = read("pyproject.toml")
    announced = re.findall(r"Python :: (3\.\d+)", project)
    build = re.search(r'^build = "(.*)"$', project, re.M)
    assert build is not None
    assert [f"cp{version.replace('.', '')}-*" for version in announced] == build[1].split()
    oldest = re.search(r'^requires-python = ">=(.*)"$', project, re.M)
    assert oldest is not None
    assert oldest[1] == announced[0]


def test_the_citation_names_the_paper() -> None:
    citation = read("CITATION.cff")
    for fact in ("arXiv:2606.09937", "family-names: Sekar", "year: 2026"):
        assert fact in citation


def test_a_clone_that_is_not_built_says_what_to_do(tmp_path: Path) -> None:
    """There it stands before an installed package. (An editable one would lend its _core.)"""
    program = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if '_Editable' not in repr(f)]\n"
        "import rksc"
    )
    shutil.copytree(ROOT / "rksc", tmp_path / "rksc", ignore=shutil.ignore_patterns("*.so", "data"))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: "), done.stderr
    assert "is not built for this Python. In a clone: pip install -e ." in last
    assert "pip install -e '.[hf" in read("README.md")


def test_the_source_archive_has_what_its_wheels_are_tested_with() -> None:
    (script,) = re.findall(r"\{project\}/([\w./]+)", read("pyproject.toml"))
    assert (ROOT / script).is_file()
    assert f"graft {Path(script).parent}\n" in read("MANIFEST.in")


# ---- building with CUDA ------------------------------------------------------------------------


def usage(registers: int, shared: int = 0) -> dict[str, int]:
    return {"REG": registers, "STACK": 0, "SHARED": shared, "LOCAL": 0}


def test_registers_are_compared_for_one_compiler_alone() -> None:
    """Another release allots others, and users build with what their GPU's toolkit is."""
    gate = runpy.run_path(str(ROOT / ".ci" / "cuda_gate.py"))
    table, is_old = gate["table"], gate["is_old"]
    used = {"sm_80": {"norm": usage(32, 64), "pick": usage(40)}, "sm_90": {"norm": usage(30, 1088)}}
    more = {**used, "sm_90": {"norm": usage(31, 1088)}}
    made = table(used, "13.0.88")
    assert "| `norm` | 32 | 30 | 64 | 0 |" in made  # 1 KB of sm_90's is the system's
    assert not is_old(f"\n{made}\n", made)
    assert is_old(made, table(more, "13.0.88"))
    assert not is_old(made, table(more, "13.5.37"))
    assert is_old(made, table({"sm_80": used["sm_90"], "sm_90": used["sm_90"]}, "13.5.37"))
    page = read("docs/cuda.md").partition(gate["BEGIN"])[2]
    pinned = re.search(r"nvidia-cuda-nvcc==([\d.]+)\.\*", read(".ci/run"))
    assert pinned is not None
    assert page.startswith(f"\nnvcc {pinned[1]}.")


def make_toolkit(root: Path) -> None:
    """What the build looks for, empty."""
    for name in ("bin/nvcc", "include/cuda_runtime.h", "include/cublas_v2.h",
                 "include/cccl/nv/target", "lib64/libcudart.so.13",
                 "lib64/libcublas.so.13"):  # fmt: skip
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.mark.parametrize("missing", ["bin/nvcc", "include/cccl/nv/target", "lib64/libcublas.so.13"])
def test_a_toolkit_without_a_part_is_none(
    missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`auto` builds without CUDA then, where the compiler would stop; `on` names the part."""
    setuptools = pytest.importorskip("setuptools")
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(setuptools, "setup", lambda **options: found.append(options))
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("RKSC_CUDA", "off")
    find_cuda = runpy.run_path("setup.py")["find_cuda"]
    assert [extension.name for extension in found[0]["ext_modules"]] == ["rksc._core"]
    make_toolkit(tmp_path)
    monkeypatch.setitem(find_cuda.__globals__, "_cuda_roots", lambda: [tmp_path])
    monkeypatch.setenv("RKSC_CUDA", "auto")
    assert find_cuda().nvcc == str(tmp_path / "bin" / "nvcc")
    (tmp_path / missing).unlink()
    assert find_cuda() is None
    monkeypatch.setenv("RKSC_CUDA", "on")
    with pytest.raises(SystemExit, match=f"{Path(missing).name} not found.*nvidia-cuda-cccl"):
        find_cuda()
