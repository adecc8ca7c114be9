"""The entry point of `mlx-kv`: Ctrl-C ends it with one line and exit code 130, whenever it comes.

It is no part of the package, since importing that takes a while: here the signal is caught before anything else is
imported. Decides what an interrupt does: in an import it ends the process at once, as an exception in the middle of an
extension module's set-up may come out as another, or as none; elsewhere it is a KeyboardInterrupt, so that files are
closed, and one that comes while that is being done ends at once. Knows nothing about commands.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

_running = False
_interrupted = False


def main() -> None:
    """Runs `mlx-kv` with the arguments of this process, and ends it."""
    global _running
    guard()
    try:
        from mlx_kv.cli.main import main as command

        _running = True
        command()
    except SystemExit as end:
        if _interrupted:
            _end(said=end.code == 130)
        raise
    except BaseException:
        if _interrupted:
            _end()
        raise
    finally:
        # All is done. Python's own end, in which threads and extension modules are taken down, must not be interrupted
        # by an exception.
        if signal.getsignal(signal.SIGINT) is _on_interrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def guard() -> None:
    """From here on, an interrupt is one line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background jobs ignore it
        signal.signal(signal.SIGINT, _on_interrupt)
        sys.unraisablehook = _unraisable


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    global _interrupted
    if not _running or _interrupted or _imports(frame):
        _end()
    _interrupted = True
    raise KeyboardInterrupt


def _imports(frame: FrameType | None) -> bool:
    """Whether any module is being imported."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _unraisable(what: sys.UnraisableHookArgs) -> None:
    """An interrupt that came where Python drops exceptions, such as in a destructor, and would be lost."""
    if _interrupted and what.exc_type is KeyboardInterrupt:
        _end()
    sys.__unraisablehook__(what)


def _end(said: bool = False) -> None:
    """Ends the process, without what Python does at its end."""
    try:
        if not said:
            os.write(2, b"\nmlx-kv: interrupted\n" if os.isatty(2) else b"mlx-kv: interrupted\n")
        sys.stdout.flush()
    except (AttributeError, OSError, RuntimeError, ValueError):
        pass  # whoever read it has gone, it is closed, or was being written to
    os._exit(130)


if __name__ == "__main__":
    main()
