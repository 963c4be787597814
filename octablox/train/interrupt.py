"""Ctrl-C and SIGTERM as a request to stop after the step at hand, not in the middle of it."""

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# What `Interrupt.requested` can be.
SIGNALS = (None, "SIGTERM", "SIGINT")


class Interrupt:
    """While entered, the first SIGINT or SIGTERM only sets `requested`; the loop then stops.

    A SIGINT after that raises KeyboardInterrupt at once; a SIGTERM after that changes nothing,
    since schedulers repeat it. The previous handlers come back on exit. Python delivers signals
    to the main thread only: in any other thread this does nothing.

    Attributes:
      requested: None, or the first signal's name, "SIGINT" or "SIGTERM".
    """

    def __init__(self, on_request: Callable[[str], None] | None = None) -> None:
        self.requested: str | None = None
        self._on_request = on_request
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            # None: a handler set from C, which Python cannot set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.requested = signal.Signals(number).name
        if self._on_request is not None:
            # The signal may have come in the middle of a write to the same stream, which refuses
            # to be entered twice with a RuntimeError; the request counts all the same.
            with contextlib.suppress(RuntimeError):
                self._on_request(
                    f"{self.requested}: finishing this step, then saving; "
                    "Ctrl-C again to quit at once"
                )
