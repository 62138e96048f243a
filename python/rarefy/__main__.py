"""``python -m rarefy``: what is in use and why; ``advise``, ``convert``, ``report``, ``bench``."""

from __future__ import annotations

import argparse
import json
import signal
import sys

from . import advice, folder
from .backend import backend_info


def main() -> int:
    """Print backend_info(); the exit code is 1 when the library is not loaded, 3 when output is lost."""
    if sys.argv[1:2] == ["advise"]:
        return advice.main(sys.argv[2:])
    if sys.argv[1:2] == ["convert"]:
        from .legacy import load

        return load.main(sys.argv[2:])
    if sys.argv[1:2] in (["report"], ["bench"]):
        return folder.main(sys.argv[2:], measure=sys.argv[1] == "bench")
    if sys.argv[1:2] == ["completion"]:
        from . import completion

        return completion.main(sys.argv[2:])
    parser = argparse.ArgumentParser(
        prog="python -m rarefy",
        description=main.__doc__,
        epilog="python -m rarefy advise predicts what linear layers gain, convert reads checkpoints of old"
        " formats, report says what a saved model holds, bench times its layers, completion completes words"
        " in a shell; each has its --help.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--block", default="32x32", help="block shape RxC that kernels are selected for")
    arguments = parser.parse_args()
    try:
        rows, cols = (int(part) for part in arguments.block.split("x"))
        info = backend_info((rows, cols))
    except ValueError as error:
        parser.error(f"--block must be RxC, like 16x16; got {arguments.block!r} ({error})")
    if arguments.json:
        print(json.dumps(info, indent=2))
    else:
        for key, value in info.items():
            if key != "kernels":
                print(f"{key:13} {', '.join(value) or 'none' if isinstance(value, list) else value}")
        for row in info.get("kernels", ()):
            if row["device"] == "cuda" and not info["cuda_devices"]:
                continue  # nothing here could run them
            print(f"  {row['device']:4} {row['op']:11} {row['dtype']:4} -> {row['kernel']}: {row['why']}")
    return 0 if info["problem"] is None else 1


def _run() -> int:
    """main() as a program: a reader that has seen enough ends it quietly, a full disk with a sentence."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        code = main()
        sys.stdout.flush()
    except OSError as error:
        sys.stdout = None  # Python would try to write the rest again
        print(f"rarefy: the standard output must be writable; got {error.strerror}", file=sys.stderr)
        return 3
    return code


if __name__ == "__main__":
    raise SystemExit(_run())
