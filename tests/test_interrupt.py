"""The first signal asks, the second Ctrl-C ends at once, and the old handlers come back."""

import os
import signal
import threading

import pytest

from octablox.train.interrupt import Interrupt


def handlers():
    return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_first_signal_only_sets_requested(name):
    before = handlers()
    texts = []
    with Interrupt(texts.append) as interrupt:
        assert interrupt.requested is None
        os.kill(os.getpid(), getattr(signal, name))
        assert interrupt.requested == name
    assert texts == [f"{name}: finishing this step, then saving; Ctrl-C again to quit at once"]
    assert handlers() == before
    assert interrupt.requested == name  # the loop may ask after the block


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_second_sigint_raises_at_once(first):
    before = handlers()
    texts = []
    with pytest.raises(KeyboardInterrupt), Interrupt(texts.append):
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second SIGINT did not raise")
    assert len(texts) == 1
    assert handlers() == before


def test_repeated_sigterm_changes_nothing():
    texts = []
    with Interrupt(texts.append) as interrupt:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
    assert interrupt.requested == "SIGTERM"
    assert len(texts) == 1


def test_without_callback():
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
    assert interrupt.requested == "SIGINT"


def test_callback_into_a_stream_at_work_does_not_stop_the_run():
    def write(text):
        raise RuntimeError("reentrant call inside <_io.BufferedWriter>")

    with Interrupt(write) as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
    assert interrupt.requested == "SIGINT"


def test_previous_handler_is_put_back():
    got = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        with Interrupt() as interrupt:
            os.kill(os.getpid(), signal.SIGTERM)
        assert (interrupt.requested, got) == ("SIGTERM", [])
        os.kill(os.getpid(), signal.SIGTERM)
        assert got == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_other_threads_do_nothing():
    before = handlers()
    seen = []

    def work():
        with Interrupt() as interrupt:
            seen.append((handlers(), interrupt.requested))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, None)]
    assert handlers() == before
