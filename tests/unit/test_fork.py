"""A forked child is refused by every call and harms nothing; a spawned one works."""

import multiprocessing

import torch

import cumem
from unit.interpreter import run_script
from unit.machine import GRANULE, Sample, small_allocator

CALLS = """
sleeping = a.full(GRANULE, fill_value=5, dtype=torch.uint8, tag="sleeping")
a.sleep(["sleeping"])
calls = {
    "empty": lambda: a.empty(1, tag="weights"),
    "zeros": lambda: a.zeros(1, tag="new"),
    "full": lambda: a.full(1, fill_value=1, tag="weights"),
    "adopt": lambda: a.adopt([torch.ones(1)], "weights"),
    "host_view": lambda: a.host_view(sleeping),
    "tag_of": lambda: a.tag_of(weights),
    "is_resident": lambda: a.is_resident(weights),
    "assert_resident": lambda: a.assert_resident(weights),
    "set_policy": lambda: a.set_policy("weights", "cpu"),
    "tags": a.tags,
    "state": a.state,
    "state of a tag": lambda: a.state("weights"),
    "is_sleeping": a.is_sleeping,
    "undefined_tags": a.undefined_tags,
    "mark_loaded": lambda: a.mark_loaded("weights"),
    "bytes_needed_to_wake": a.bytes_needed_to_wake,
    "stats": a.stats,
    "driver_memory": a.driver_memory,
    "sleep": a.sleep,
    "wake_up": a.wake_up,
    "discard": lambda: a.discard(["weights"]),
    "asleep": lambda: a.asleep().__enter__(),
    "trim": a.trim,
    "Allocator": lambda: cumem.Allocator(driver="host"),
    "the default allocator": cumem.stats,
}
def refused():
    for name, call in calls.items():
        try:
            call()
        except cumem.Unsupported as error:
            assert "spawn" in str(error), error
        else:
            print(name, "works in a forked child", flush=True)
def unharmed():
    assert int(weights[0]) == 7 and int(cache[-1]) == 9
    a.wake_up()
    assert bool((sleeping == 5).all())
    a.sleep()
    a.wake_up()
    assert int(weights[-1]) == 7 and int(cache[0]) == 9 and int(sleeping[3]) == 5
    a.empty(1, tag="weights")
    print("unharmed", flush=True)
"""


def test_a_forked_child_is_refused_by_every_call_and_its_end_harms_nothing():
    printed = run_script(
        CALLS
        + """
child = os.fork()
if child == 0:
    refused()
    del weights, cache, sleeping
    a.close()
    del a, calls
    sys.exit(0)
print("status", os.waitpid(child, 0)[1], flush=True)
unharmed()
"""
    )
    assert printed.splitlines() == ["status 0", "unharmed"]


def test_the_list_of_calls_is_complete():
    names = {name for name in vars(cumem.Allocator) if not name.startswith("_")}
    harmless = {"close", "driver_name", "torch_device", "follow_memory_fraction", "region"}
    assert [name for name in names - harmless if f'"{name}"' not in CALLS] == []


def test_a_child_that_is_forked_in_the_middle_of_a_transition_is_refused_and_hangs_nowhere():
    printed = run_script(
        CALLS
        + """
driver.hold("copy_to_host")
sleeper = threading.Thread(target=lambda: a.sleep(["weights"]))
sleeper.start()
driver.wait_held("copy_to_host", 60)
child = os.fork()
if child == 0:
    refused()
    os._exit(0)
print("status", os.waitpid(child, 0)[1], flush=True)
driver.release("copy_to_host")
sleeper.join()
a.wake_up(["weights"])
unharmed()
"""
    )
    assert printed.splitlines() == ["status 0", "unharmed"]


def test_a_child_that_drops_everything_while_its_parent_sleeps_leaves_the_backups_alone():
    printed = run_script(
        CALLS
        + """
a.sleep()
for leave in (sys.exit, os._exit):
    child = os.fork()
    if child == 0:
        del weights, cache, sleeping, a, calls
        leave(0)
    print("status", os.waitpid(child, 0)[1], flush=True)
a.wake_up()
unharmed()
"""
    )
    assert printed.splitlines() == ["status 0", "status 0", "unharmed"]


def cycle_in_worker(seed):
    allocator = small_allocator()
    sample = Sample(allocator, "weights", 2, seed=seed)
    report = allocator.sleep()
    allocator.wake_up()
    sample.check()
    return report


def test_a_spawned_worker_has_an_allocator_of_its_own_and_its_reports_come_back():
    allocator = small_allocator()
    mine = Sample(allocator, "weights")
    allocator.sleep()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        report = pool.apply(cycle_in_worker, (4,))
    assert isinstance(report, cumem.SleepReport)
    assert (report.freed_bytes, report.by_tag["weights"].saved_bytes) == (2 * GRANULE, 2 * GRANULE)
    allocator.wake_up()
    mine.check()
    assert mine.tensor.dtype == torch.uint8
