"""Writes torch_names.md from `cumem.torch_names` and torch_versions.json: `python docs/torch_names.py [OPTION]`.

--check    write nothing; exit status 1 if the page is not the one that the list and the data give
--record   put what the torch of this interpreter has into torch_versions.json first
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

from cumem import torch_names, torch_settings
from cumem.torch_names import NAMES

FOLDER = Path(__file__).parent
PAGE = FOLDER / "torch_names.md"
DATA = FOLDER / "torch_versions.json"
HEAD = """# The names of torch that torch does not promise

Made by `docs/torch_names.py` from `cumem/torch_names.py` and `docs/torch_versions.json`; not edited by hand.

cumem needs some names of torch that are private, and some public ones with parameters that older releases lack.
`cumem doctor` says which of them the installed torch has.
"""
_WORDS = {"True": "yes", "False": "no", "None": "not told"}
VERSIONS = """
## What the releases have

Found by importing each release without a GPU: that a name is there and takes what cumem gives it, and what can be asked
before CUDA is in use. What the names *do* is held by the tests on a GPU, with the release that is installed there.
`make test-torch-versions` looks again; it fetches several gigabytes for each release, so it is no part of CI.
"""


def observe() -> dict[str, Any]:
    """What the torch of this interpreter has."""
    settings = torch_settings.read_settings()
    return {
        "cuda_build": torch_names.has_cuda(),
        "names": {name.path: _state(name) for name in NAMES},
        "answers": {
            "allocator backend": torch_settings.allocator_backend(),
            "caching is enabled": torch_settings.caching_enabled(),
            "settings come from": settings.source,
            "a snapshot of one pool loses references": snapshot_loses_references(),
        },
    }


def snapshot_loses_references() -> bool | None:
    """Whether this torch has the defect that `cumem.torch_snapshot` works around; None without CUDA."""
    import torch

    if not torch_names.has_cuda():
        return None
    pool = int("1" + "0" * 12)  # no small integer: those may be immortal
    spare = [pool] * 8
    before = sys.getrefcount(pool)
    torch._C._cuda_memorySnapshot((pool, pool, False))
    lost = before - sys.getrefcount(pool)
    for _ in range(lost):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
    del spare
    return lost > 0


def _state(name: torch_names.TorchName) -> str:
    if not torch_names.exists(name):
        return "absent"
    return "present" if torch_names.is_present(name) else "other parameters"


def recorded() -> dict[str, Any]:
    """What was found in each release, by its version with the build: "2.13.0+cpu"."""
    data: dict[str, Any] = json.loads(DATA.read_text()) if DATA.exists() else {}
    return data


def record() -> None:
    """Adds the torch of this interpreter to the data."""
    import torch

    data = {**recorded(), str(torch.__version__): observe()}
    DATA.write_text(json.dumps(dict(sorted(data.items())), indent=2) + "\n")


def page() -> str:
    """The page's text."""
    lines = [HEAD, "| name | since | why | without it |", "|---|---|---|---|"]
    for name in NAMES:
        takes = f"({', '.join(name.takes)})" if name.takes and not name.takes[0].startswith("arg") else ""
        kind = " *public*" if name.public else ""
        lines.append(f"| `{name.path}{takes}`{kind} | {name.since or 'always'} | {name.why} | {name.without} |")
    data = recorded()
    lines += [VERSIONS, f"| name | {' | '.join(data)} |", f"|---|{'---|' * len(data)}"]
    marks = {"present": "yes", "absent": "-"}
    for name in NAMES:
        found = [release["names"].get(name.path, "not looked at") for release in data.values()]
        lines.append(f"| `{name.path}` | {' | '.join(marks.get(state, state) for state in found)} |")
    questions = dict.fromkeys(question for release in data.values() for question in release["answers"])
    for question in questions:
        found = [str(release["answers"].get(question, "not looked at")) for release in data.values()]
        answers = [_WORDS.get(answer, answer) for answer in found]
        lines.append(f"| {question} | {' | '.join(answers)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Writes or checks; the exit status."""
    if "--record" in sys.argv[1:]:
        record()
    made = page()
    if "--check" in sys.argv[1:]:
        return int(not PAGE.exists() or PAGE.read_text() != made)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
