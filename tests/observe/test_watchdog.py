"""The watchdog by a clock of its own: when it tells, what it says, and when it keeps quiet."""

import threading
import time

from tlt_jax.observe.watchdog import LONGEST_NAP, Watchdog, stacks


class Kennel:
    """A watchdog of 10 seconds with a clock to be set and a compiler to be switched; `told` are its warnings."""

    def __init__(self, limit: float = 10.0):
        self.now, self.compiles, self.told = 0.0, False, []
        self.dog = Watchdog(limit, lambda message, stacks: self.told.append(message), lambda: self.compiles, self.clock)

    def clock(self) -> float:
        return self.now

    def at(self, now: float) -> list[str]:
        """What it has told by `now`, having looked then."""
        self.now = now
        self.dog.check()
        return self.told


def test_it_names_what_is_going_on_once_a_limit():
    kennel = Kennel()
    with kennel.dog.during("finetune policy"), kennel.dog.during("step 12"):
        kennel.now = 3.0
        with kennel.dog.during("rollout"):
            assert kennel.at(12.9) == []
            assert kennel.at(13.0) == ["finetune policy is stuck: step 12, rollout for 10 s, and nothing ends"]
            assert len(kennel.at(22.9)) == 1
            assert kennel.at(23.0)[1:] == ["finetune policy is stuck: step 12, rollout for 20 s, and nothing ends"]
        assert len(kennel.at(32.9)) == 2  # the rollout has ended at 23
        assert kennel.at(33.0)[2:] == ["finetune policy is stuck: step 12 for 10 s, and nothing ends"]


def test_it_keeps_quiet_while_things_end_and_where_nothing_goes_on():
    kennel = Kennel()
    with kennel.dog.during("pretrain pretrain"):
        for step in range(20):
            with kennel.dog.during(f"step {step}"):
                assert kennel.at(9.9 * (step + 1)) == []
    assert kennel.at(1000.0) == []


def test_what_goes_on_is_told_in_words():
    kennel = Kennel()
    with kennel.dog.during("pretrain pretrain"):
        assert "between two steps" in kennel.at(10.0)[-1]
        for kind, words in {"checkpoint": "saving", "evaluate": "evaluating", "data": "waiting for data"}.items():
            with kennel.dog.during(kind):
                assert f"is stuck: {words} for 10 s" in kennel.at(kennel.now + 10.0)[-1]


def test_a_compilation_has_ten_times_as_long_and_its_end_counts():
    kennel = Kennel()
    with kennel.dog.during("align ppo"):
        kennel.compiles = True
        assert kennel.at(99.9) == []
        assert len(kennel.at(100.0)) == 1
        assert len(kennel.at(190.0)) == 1
        kennel.compiles = False
        assert len(kennel.at(199.9)) == 1  # it was last seen compiling at 190
        assert len(kennel.at(200.0)) == 2


def test_a_limit_of_0_is_never_reached():
    kennel = Kennel(0.0)
    with kennel.dog, kennel.dog.during("pretrain pretrain"):
        assert kennel.at(1e9) == []


def test_the_stacks_are_those_of_all_other_threads():
    ready, done = threading.Event(), threading.Event()

    def a_function_that_waits():
        ready.set()
        done.wait()

    thread = threading.Thread(target=a_function_that_waits, name="waiter")
    thread.start()
    ready.wait()
    text = stacks()
    done.set()
    thread.join()
    assert "thread waiter:" in text and "a_function_that_waits" in text
    assert "test_the_stacks_are_those" not in text  # of the thread that asks


def test_its_thread_looks_by_itself_and_ends():
    told = []
    with Watchdog(0.02, lambda message, stacks: told.append(stacks)) as dog, dog.during("pretrain pretrain"):
        deadline = time.monotonic() + LONGEST_NAP
        while not told:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    assert "thread MainThread:" in told[0] and "test_its_thread_looks_by_itself" in told[0]
    assert not [thread for thread in threading.enumerate() if thread.name == "watchdog"]
