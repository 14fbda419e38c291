"""The timeline picture and the Chrome trace."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from dflash_lightning.callbacks.timeline import _COLOURS, draw_timeline, write_chrome_trace

LANES = {
    "producer0": [("target.model_forward", 4.0, 14.0), ("target.pack_hidden", 1.0, 15.0)],
    "rank0": [("drafter.forward", 2.0, 13.0), ("dflash.layers", 1.0, 12.5), ("drafter.backward", 3.0, 25.0)],
}


def test_lanes_are_coloured_by_stage_where_the_spans_lie() -> None:
    picture = draw_timeline(LANES, 10.0, 20.0)
    assert picture.dtype == np.uint8
    row = picture[30 + 5]  # inside the first lane
    share = (row == _COLOURS["target.model_forward"]).all(-1).mean()
    assert abs(share - 0.4 * 1240 / 1400) < 0.01, "four of ten seconds"
    second = picture[30 + 34 + 5]
    assert (second == _COLOURS["drafter.forward"]).all(-1).any()
    assert not (second == _COLOURS["drafter.backward"]).all(-1).any(), "it lies after the end"
    strip = picture[30 + 34 + 22]
    assert (strip == _COLOURS["dflash.layers"]).all(-1).any(), "a part lies over the span that holds it"


def test_the_chrome_trace_has_a_process_a_lane_and_nesting_tracks(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    write_chrome_trace(file, LANES)
    events = json.loads(file.read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["producer0", "rank0"]
    forward = next(e for e in events if e["name"] == "drafter.forward")
    assert (forward["pid"], forward["ts"], forward["dur"]) == (1, 11e6, 2e6)
    assert len({e["tid"] for e in events if e["pid"] == 0 and e["ph"] == "X"}) == 2, "a worker's threads overlap"
