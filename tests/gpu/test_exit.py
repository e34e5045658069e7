"""The interpreter ends in every state: status 0, clean stderr. A use of asleep memory breaks only its own process."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

PRELUDE = """
import torch, cumem
a = cumem.Allocator(driver="cuda")
w = a.full(1 << 20, fill_value=3, dtype=torch.int32, tag="weights")
kv = a.empty(1 << 20, dtype=torch.int32, tag="kv", backend="discard")
torch.cuda.synchronize()
"""


def run(body: str) -> subprocess.CompletedProcess[str]:
    program = PRELUDE + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "body",
    [
        "pass",
        "a.sleep()",
        "a.sleep(); a.wake_up(['weights'])",
        "a.sleep(); a.close()",
        "a.sleep(); del w, kv",
        "view = (a.sleep(), a.host_view(w))[1]",
        """
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            w.add_(1)
        g.replay()
        a.sleep()
        """,
        """
        import threading
        threading.Thread(target=lambda: [a.sleep(), a.wake_up()], daemon=True).start()
        """,
    ],
    ids=["awake", "asleep", "half_awake", "closed", "dropped", "viewed", "graph", "thread"],
)
def test_the_interpreter_ends_cleanly(body: str) -> None:
    done = run(body)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_an_exception_on_the_way_out_is_the_only_thing_on_stderr() -> None:
    done = run("a.sleep()\nraise ValueError('mine')")
    assert done.returncode == 1
    assert done.stderr.strip().endswith("ValueError: mine")


def test_after_an_illegal_access_every_call_raises_at_once_and_backups_stay_readable() -> None:
    done = run("""
        a.sleep(["weights"])
        try:
            w.add_(1)
            torch.cuda.synchronize()
        except Exception as error:
            assert "illegal" in str(error).lower(), error
        else:
            raise SystemExit("the access to asleep memory did not fault")
        for call in (a.sleep, a.wake_up):
            try:
                call()
            except cumem.DriverError as error:
                assert error.context_broken, error
            else:
                raise SystemExit(f"{call} went through")
        assert a.state() == "broken"
        assert bool((a.host_view(w) == 3).all())
        print("held")
    """)
    assert done.stdout.strip() == "held", done.stderr


def test_a_forked_child_is_refused_and_the_parent_goes_on() -> None:
    done = run("""
        import os
        pid = os.fork()
        if pid == 0:
            try:
                a.sleep()
            except cumem.Unsupported:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        a.sleep()
        a.wake_up()
        assert bool((w == 3).all())
        print("held")
    """)
    assert done.stdout.strip() == "held", done.stderr
