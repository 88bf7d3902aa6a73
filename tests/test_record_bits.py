"""record_bits.py: the same program gives the same record, and a difference is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import record_bits

from rksc import _core


def test_a_record_repeats_and_a_difference_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = record_bits.record(40, ("T4",))
    assert len(found) == 4 * len(_core.isas)
    assert all(len(hashes) == 40 for hashes in found.values())
    monkeypatch.setattr(record_bits, "record", lambda: found)
    key = next(iter(found))
    assert record_bits.record_of(key, 40) == found[key]

    before, after = str(tmp_path / "before.json"), str(tmp_path / "after.json")
    assert record_bits.main(before) == 0
    assert record_bits.main(after, before) == 0
    other = json.loads(Path(before).read_text("utf-8"))
    other[key][7] = "prefill tuple 0"
    Path(before).write_text(json.dumps(other), "utf-8")
    capsys.readouterr()
    assert record_bits.main(after, before) == 1
    assert f"{key}: operation 7: prefill tuple 0 is now" in capsys.readouterr().out


def test_what_is_told_apart() -> None:
    """The last bit of a float, the type of an error, an order."""
    values = [1.0, 1.0 + 2**-52, ValueError(), TypeError(), [1, 2], [2, 1], 1, "1", None]
    assert len({record_bits.plain(value) for value in values}) == len(values)
