from __future__ import annotations

import math
import subprocess
import sys
from types import SimpleNamespace

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from buffer_rl.observe.metrics import TensorBoardLogger


def _scalars(folder, tag):
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_scalars_can_be_read_back_by_tensorboard_and_numbers_that_are_not_finite_are_left_out(tmp_path):
    logger = TensorBoardLogger(SimpleNamespace(load=None), str(tmp_path))
    logger.log({"train/loss": 0.5, "eval/dev": 0.25}, 0)
    logger.log({"train/loss": math.nan, "eval/dev": 0.75}, 1)
    logger.close()
    assert _scalars(logger.folder, "train/loss") == [(0, 0.5)]
    assert _scalars(logger.folder, "eval/dev") == [(0, 0.25), (1, 0.75)]


def test_logging_loads_neither_torch_nor_tensorflow(tmp_path):
    code = (
        "import sys; from types import SimpleNamespace; from buffer_rl.observe.metrics import TensorBoardLogger;"
        f"logger = TensorBoardLogger(SimpleNamespace(load=None), {str(tmp_path)!r}); logger.log({{'a/b': 1.0}}, 0);"
        "logger.close(); print([m for m in ('torch', 'tensorflow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
