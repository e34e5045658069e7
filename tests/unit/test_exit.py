"""The interpreter ends in every state with status 0 and a clean stderr."""

import pytest

from unit.interpreter import run_script

STATES = {
    "awake": "",
    "asleep": "a.sleep()",
    "partly asleep": "a.sleep(['weights'])",
    "closed": "a.sleep(); a.close()",
    "without its allocator": "a.sleep(); del a",
    "after a wake": "a.sleep(); a.wake_up()",
    "with a view of a backup": "a.sleep(); view = a.host_view(weights)",
    "after a failed wake": """
a.sleep()
driver.fail_at(0, only="create", times=2)
try:
    a.wake_up()
except cumem.WakeUpPartialFailure as caught:
    error = caught
""",
    "after a failed sleep": """
driver.fail_at(0, only="copy_to_host")
try:
    a.sleep()
except cumem.DriverError as caught:
    error = caught
""",
    "with a broken context": """
driver.fail_at(0, only="synchronize", code="context_broken")
try:
    a.sleep()
except cumem.DriverError:
    print(a.state())
""",
    "in the middle of an exception": """
try:
    a.sleep()
    raise ValueError(weights)
except ValueError:
    sys.exit(0)
""",
    "inside asleep()": """
with a.asleep():
    sys.exit(0)
""",
    "inside asleep() of a generator": """
def pause():
    with a.asleep():
        yield a.state()
generator = pause()
next(generator)
""",
    "inside asleep() that was entered by hand": "context = a.asleep(); context.__enter__()",
    "inside a hook": """
a.hooks.register("leave", before_sleep=lambda _: sys.exit(0))
a.sleep()
""",
    "with work in flight": "driver.launch_fill(weights.data_ptr(), 1, GRANULE)",
    "with a finalizer that sleeps": """
class Last:
    def __del__(self, sleep=a.sleep, error=cumem.StateError):
        try:
            sleep()
        except error:
            pass
keep = Last()
""",
    "with a handler at exit that sleeps and wakes": """
import atexit
@atexit.register
def last():
    a.sleep()
    a.wake_up()
    assert int(weights[0]) == 7
""",
    "with the default allocator": """
cumem.configure(driver=driver)
default = cumem.zeros(5, tag="weights")
cumem.sleep()
""",
    "with a tensor in a cycle": "cycle = [weights]; cycle.append(cycle); del weights; a.sleep()",
    "with numpy over its memory": "array = cache.numpy(); a.sleep(['weights'])",
}
THREADS = {
    "that sleep and wake for ever": """
begun = threading.Barrier(4)
def live():
    begun.wait()
    while True:
        a.sleep()
        a.wake_up()
for _ in range(3):
    threading.Thread(target=live, daemon=True).start()
begun.wait()
""",
    "that allocate and free for ever": """
begun = threading.Barrier(3)
core, slot = a._memory.core, a._memory.core.create_slot()
def live():
    begun.wait()
    while True:  # without torch, which aborts the process when a daemon thread is inside of it at exit
        core.free(core.malloc(slot, GRANULE, 0))
        a.trim()
        a.stats()
for _ in range(2):
    threading.Thread(target=live, daemon=True).start()
begun.wait()
""",
    "of which one waits for a device": """
driver.hold("synchronize")
threading.Thread(target=a.trim, daemon=True).start()
del cache
waiting = threading.Thread(target=lambda: a._memory.core.wait_devices([0]), daemon=True)
waiting.start()
driver.wait_held("synchronize", 60)
""",
    "of which one sleeps meanwhile and ends after the main thread": """
driver.hold("copy_to_host")
sleeper = threading.Thread(target=a.sleep, daemon=True)
sleeper.start()
driver.wait_held("copy_to_host", 60)
def open_gate(main=threading.main_thread()):
    main.join()
    driver.release("copy_to_host")
threading.Thread(target=open_gate).start()
""",
}


@pytest.mark.parametrize("state", STATES)
def test_the_interpreter_ends_cleanly(state):
    run_script(STATES[state])


@pytest.mark.parametrize("threads", THREADS)
def test_the_interpreter_ends_cleanly_beside_threads(threads):
    run_script(THREADS[threads])


def test_an_exception_that_nobody_catches_ends_it_as_always():
    run_script("a.sleep(); raise ValueError('mine')", status=1, stderr="ValueError: mine")
