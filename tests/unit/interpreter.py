"""Scripts in an interpreter of their own, without a second's wait for torch each time.

A server process imports torch, not cumem, and forks for each script. The fork runs the script as its main module, loads
cumem itself, and ends as any interpreter does: that is what the tests of exit and fork look at.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path

from unit.machine import PATIENCE_S

# What a script begins with.
PRELUDE = """
import os, sys, threading
import torch
import cumem
from cumem import _core
GRANULE = 64 << 10
driver = _core.FaultyDriver(
    _core.host_driver(device_count=2, device_bytes=1024 * GRANULE, granularity_bytes=GRANULE)
)
a = cumem.Allocator(driver=driver)
weights = a.full(GRANULE, fill_value=7, dtype=torch.uint8, tag="weights")
cache = a.full(GRANULE, fill_value=9, dtype=torch.uint8, tag="cache")
"""

_SERVER = """
import gc, json, os, sys, types
import torch
assert "cumem" not in sys.modules
gc.freeze()  # torch's objects need no collecting at each end
while line := sys.stdin.readline():
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, path in enumerate((os.devnull, job["stdout"], job["stderr"])):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), number)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
sys.modules["__main__"] = types.ModuleType("__main__")  # not frozen: it ends as a main module does
exec(compile(job["script"], "script", "exec"), sys.modules["__main__"].__dict__)
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Ends when its input does, at the latest with this process."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _SERVER]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)
    return server


def _run(script: str, folder: Path) -> tuple[int, str, str]:
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    paths = {name: str(folder / name) for name in ("stdout", "stderr")}
    server.stdin.write(json.dumps({"script": script} | paths) + "\n")
    server.stdin.flush()
    if not select.select([server.stdout], [], [], PATIENCE_S)[0]:
        _server.cache_clear()
        with contextlib.suppress(ProcessLookupError):
            for child in _children(server.pid):
                os.kill(child, 9)
        server.kill()
        server.wait()
        raise AssertionError(f"the script hangs; stderr: {(folder / 'stderr').read_text()}")
    status = int(server.stdout.readline())
    return status, (folder / "stdout").read_text(), (folder / "stderr").read_text()


def _children(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def run_script(script: str, *, prelude: str = PRELUDE, status: int = 0, stderr: str = "") -> str:
    """What the script printed. It must end with that status, and write that to stderr (by default nothing)."""
    with tempfile.TemporaryDirectory() as folder:
        ended, printed, errors = _run(prelude + script, Path(folder))
    assert ended == status, f"status {ended}; stderr: {errors}"
    assert errors == "" if stderr == "" else stderr in errors, f"stderr: {errors}"
    return printed
