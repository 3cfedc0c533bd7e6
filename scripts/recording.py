"""Shorten an asciinema recording of a run and render it as an animated picture for the README.

    make .venv/demo-ready
    env -i PATH="$PATH" HOME="$HOME" LANG=C.UTF-8 TERM=xterm-256color \
        asciinema rec --cols 120 --rows 32 --command "make demo" demo.cast
    python scripts/recording.py demo.cast docs/images/demo.svg

Record in a fresh clone: the first command keeps pip's output out of the recording, and `env -i`
excludes the settings of this machine. asciinema is on PyPI; svg-term, which this script calls, is
npm's `svg-term-cli`.

The first frame is the command at a prompt; viewers without animations show only this frame. The
terminal's output within one time slot becomes one frame, because its escape sequences refer to
earlier ones. The minutes of training pass at the speed of the frames.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

#: Seconds of recording per frame: at the beginning and the end, and while the run trains.
_SLOT, _TRAINING_SLOT = 0.5, 5.0
#: Seconds at the beginning and at the end in which much is printed.
_FIRST, _LAST = 15.0, 1.0
#: Seconds for which a frame, the first frame and the last frame are shown.
_SHOWN, _FIRST_SHOWN, _LAST_SHOWN = 0.4, 1.5, 6.0


def shortened(cast: str, command: str) -> str:
    """Return the recording (asciicast v2: a header and a line of JSON for each output) in fewer
    frames, after a frame of the recorded command at a prompt."""
    header, *lines = cast.splitlines()
    events = [json.loads(line) for line in lines]
    end = events[-1][0]
    frames: dict[float, str] = {}
    for time, _, text in events:
        slot = _SLOT if time < _FIRST or time > end - _LAST else _TRAINING_SLOT
        start = time // slot * slot
        frames[start] = frames.get(start, "") + text
    shown: list[list[float | str]] = [[0.0, "o", f"$ {command}\r\n"]]
    for number, text in enumerate(frames.values()):
        shown.append([_FIRST_SHOWN + number * _SHOWN, "o", text])
    shown.append([_FIRST_SHOWN + len(frames) * _SHOWN + _LAST_SHOWN, "o", ""])
    return "\n".join([header, *map(json.dumps, shown)]) + "\n"


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description="Render a recording of a run as a picture.")
    parser.add_argument("cast", type=Path, help="asciinema's file")
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    parser.add_argument("--command", default="make demo", help="the command that was recorded")
    options = parser.parse_args()
    subprocess.run(
        ["svg-term", "--out", str(options.picture), "--window", "--no-cursor"],
        input=shortened(options.cast.read_text(encoding="utf-8"), options.command),
        encoding="utf-8",
        check=True,
    )


if __name__ == "__main__":
    main()
