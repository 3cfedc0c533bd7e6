"""Shorten an asciinema recording of a run and render it as an animated picture for the README.

    asciinema rec --cols 100 --rows 32 -c "make demo" demo.cast
    python scripts/recording.py demo.cast docs/images/demo.svg

asciinema is on PyPI, svg-term (which is called) is npm's `svg-term-cli`. What the terminal received
in one time slot becomes one frame, as its escape sequences refer to those before. The minutes of
training pass as quickly as frames follow each other.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

#: Seconds of recording for one frame: at the beginning and the end, and while the run trains.
_SLOT, _TRAINING_SLOT = 0.5, 5.0
#: Seconds at the beginning and at the end in which much is printed.
_FIRST, _LAST = 15.0, 1.0
#: Seconds for which a frame is shown, and the last one.
_SHOWN, _LAST_SHOWN = 0.4, 6.0


def shortened(cast: str) -> str:
    """The recording (asciicast v2: a header and a line of JSON for each output) in fewer frames."""
    header, *lines = cast.splitlines()
    events = [json.loads(line) for line in lines]
    end = events[-1][0]
    frames: dict[float, str] = {}
    for time, _, text in events:
        slot = _SLOT if time < _FIRST or time > end - _LAST else _TRAINING_SLOT
        start = time // slot * slot
        frames[start] = frames.get(start, "") + text
    shown = [[number * _SHOWN, "o", text] for number, text in enumerate(frames.values())]
    shown.append([len(shown) * _SHOWN + _LAST_SHOWN, "o", ""])
    return "\n".join([header, *map(json.dumps, shown)]) + "\n"


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description="Render a recording of a run as a picture.")
    parser.add_argument("cast", type=Path, help="asciinema's file")
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    options = parser.parse_args()
    subprocess.run(
        ["svg-term", "--out", str(options.picture), "--window", "--no-cursor"],
        input=shortened(options.cast.read_text(encoding="utf-8")),
        encoding="utf-8",
        check=True,
    )


if __name__ == "__main__":
    main()
