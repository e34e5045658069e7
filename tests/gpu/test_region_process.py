"""What only a fresh process shows: first uses, exits in every state, IPC, forks."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PRELUDE = """
import torch, cumem
a = cumem.Allocator(driver="cuda")
"""


def run(body: str, prelude: str = PRELUDE) -> subprocess.CompletedProcess[str]:
    program = prelude + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)


def test_the_first_matrix_product_of_a_process_inside_a_dropped_region_does_not_sleep_with_it() -> None:
    done = run("""
        with a.region("kv_cache", backend="discard"):
            x = torch.randn(512, 512, device="cuda")
            y = x @ x
            z = torch.nn.functional.linear(x, x, x[0])
        b = torch.randn(512, 512, device="cuda")
        before = b @ b, torch.nn.functional.linear(b, b, b[0])
        a.sleep()
        after = b @ b, torch.nn.functional.linear(b, b, b[0])
        torch.cuda.synchronize()
        assert all(torch.equal(p, q) for p, q in zip(before, after))
        a.wake_up()
        print("held")
    """)
    assert done.stdout.strip() == "held", done.stderr


def test_a_graph_with_random_numbers_captured_inside_a_region_leaves_other_graphs_right() -> None:
    done = run("""
        x = torch.zeros(1024, device="cuda")
        with a.region("kv_cache", backend="discard"):
            first = torch.cuda.CUDAGraph()
            with torch.cuda.graph(first):
                inside = torch.rand(1024, device="cuda")
        second = torch.cuda.CUDAGraph()
        with torch.cuda.graph(second):
            x.copy_(torch.rand(1024, device="cuda"))
        torch.manual_seed(1)
        second.replay()
        before = x.clone()
        a.sleep(["kv_cache"])
        torch.manual_seed(1)
        second.replay()
        torch.cuda.synchronize()
        assert torch.equal(x, before)
        a.wake_up()
        first.replay()
        torch.cuda.synchronize()
        assert 0.4 < float(inside.mean()) < 0.6
        print("held")
    """)
    assert done.stdout.strip() == "held", done.stderr


IPC = """
import torch, cumem
import torch.multiprocessing as mp

def child(tensor, results):
    results.put(float(tensor.sum()))

if __name__ == "__main__":
    mp.set_start_method("spawn")
    a = cumem.Allocator(driver="cuda")
    with a.region("weights"):
        mine = torch.ones(1024, device="cuda")
        with cumem.exclude():
            shared = torch.ones(1024, device="cuda")
    for _ in range(2):
        results = mp.SimpleQueue()
        process = mp.Process(target=child, args=(shared, results))
        process.start()
        print(results.get())
        process.join()
        a.sleep()
        a.wake_up()
    assert bool((mine == 1).all())
"""


def test_an_excluded_tensor_is_shared_with_another_process_by_cuda_ipc(tmp_path: Path) -> None:
    script = tmp_path / "ipc.py"
    script.write_text(IPC)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["1024.0", "1024.0"], done.stderr


STATES = {
    "awake": "",
    "asleep": "a.sleep()",
    "half_awake": "a.sleep(); a.wake_up(['weights'])",
    "dropped_asleep": "a.sleep(); del w, kv",
    "inside_a_region": "r = a.region('weights'); r.__enter__()",
    "inside_a_process_region": "r = a.region('w', scope='process'); r.__enter__(); t = torch.ones(9, device='cuda')",
    "graph_alive": "g.replay(); a.sleep()",
    "thread": "threading.Thread(target=lambda: [a.sleep(), a.wake_up()], daemon=True).start()",
}


@pytest.mark.parametrize("state", list(STATES.values()), ids=list(STATES))
def test_the_interpreter_ends_cleanly_with_regions_used(state: str) -> None:
    done = run(
        """
        import threading
        with a.region("weights"):
            w = torch.ones(1 << 20, device="cuda")
            with cumem.exclude():
                n = torch.ones(4, device="cuda")
        with a.region("kv", backend="discard"):
            kv = torch.ones(1 << 20, device="cuda")
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            w.add_(1)
        exec(STATE)
        """,
        PRELUDE + f"STATE = {state!r}\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_an_exception_inside_a_region_is_the_only_thing_on_stderr() -> None:
    done = run("""
        with a.region("weights"):
            w = torch.ones(1 << 20, device="cuda")
            raise ValueError("mine")
    """)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("ValueError: mine")
    assert "terminate" not in done.stderr
